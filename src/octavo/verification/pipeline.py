"""Is a packed folder what it says, and what did packing cost?

In this order, and nothing runs on bytes that are wrong:

1. its files, settings and tensors, by themselves (`verify_bytes`, `verify_words`, `verify_check`);
2. its weights against those of the model that it was packed from;
3. every program installed here that opens it, against a reference that is built from the bytes (`verify_consumers`);
4. on prompts: each layer's error, and the model's (`quality`), beside INT8's;
5. its size (`octavo.verification.sizes`).

The BF16 model is MODEL with its weights rounded to BF16; all that is compared in quality runs in float32, so that only
what packing rounds differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError
from octavo.device import choose_device
from octavo.evaluation.limits import Budget, check_budgets
from octavo.evaluation.metrics import EmbeddingSums, LogitSums
from octavo.evaluation.prompts import OnRead, PromptOptions, has_tokenizer, open_prompts
from octavo.hf.meta_model import transformers_meta_model
from octavo.hf.outputs import is_language_model
from octavo.progress import Progress, no_progress
from octavo.verification.checks import check_folder, check_weights
from octavo.verification.files import Bytes, Finding, read_bytes
from octavo.verification.kv_cache import cache_scales, rounded_cache
from octavo.verification.layer_spec import Words
from octavo.verification.numbers import leave_input, round_input
from octavo.verification.readers import Consumer, make_probe, try_consumers
from octavo.verification.reference import LayerSums, PackedLayers, RoundInput, WatchedLayers, int8_layers, probe
from octavo.verification.result import LayerReport, Report, over_budget
from octavo.verification.sizes import measure_sizes
from octavo.verification.streamed_model import Against, Linear, StreamedModel, required_by


def verify(
    packed: Path,
    against: Path,
    data: Sequence[str] = (),
    *,
    budgets: Sequence[Budget] = (),
    prompts: PromptOptions = PromptOptions(),
    device: str = "cpu",
    folded: bool = False,
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> Report:
    """Check a packed folder against its bytes, its model and its readers, and measure what packing cost.

    Args:
        packed: the folder; whatever is wrong with it becomes a finding.
        against: the model that it was packed from, a Hugging Face folder or a run of ours.
        data: sources of text, see `octavo.text.read_text`; without it no quality is measured.
        budgets: packing that costs more than one of them is a finding.
        prompts: which prompts are taken from `data`.
        device: where the reference and our runtime run; transformers runs on the CPU.
        folded: something was folded into the weights, which are then compared with MODEL's by what they do alone; so
            where octavo.json says it.
        progress: called with every piece of work that is done (`octavo.progress`).
        on_read: called with the report of what was read, before anything runs.

    Raises:
        FileNotFoundError, ArtifactError, ImportError: of MODEL, which must be whole.
        DataError: the data.
        ValueError: a setting; a budget without data, or one that is not for this kind of model.
    """
    device = str(choose_device(device))
    if budgets and not data:
        raise ValueError("a budget is measured on text: give --data")
    model = Against(against)
    check_budgets(budgets, language_model=model.causal)
    report = Report(packed, against)
    batches: list[Tensor] = []
    if data:
        read_prompts = open_prompts(data, model.folder, model.context, prompts, on_read)
        report.data, batches = read_prompts.report, read_prompts.batches(prompts.batch, shortest=2)
    read = read_bytes(packed)
    read.folded |= folded
    report.architecture = ", ".join(map(str, read.config.get("architectures") or ()))
    layers = _check(read, model, report, progress)
    report.findings = read.findings
    if read.findings:
        report.not_run = "nothing was run on this folder, since its bytes are wrong"
        return report
    if not has_tokenizer(packed):
        report.remarks.append("the folder has no tokenizer: programs that generate text from it need one")
    work = _Work(read, layers, model, device, batches, progress, report)
    work.consumers()
    if batches:
        work.quality()
        report.findings += over_budget(report.quality, budgets)
    report.sizes = measure_sizes(read, layers)
    return report


def _check(read: Bytes, model: Against, report: Report, progress: Progress) -> dict[str, Words]:
    """Everything that needs no model to run."""
    if not read.config or not read.shapes:
        return {}
    try:
        required = required_by(transformers_meta_model(read.config, read.folder))
    except ImportError:
        raise
    except Exception as error:  # of a config.json that may say anything
        read.found("config", "config.json", f"transformers makes no model of it ({type(error).__name__}: {error})")
        return {}
    layers = check_folder(read, required, progress)
    report.remarks += read.remarks
    if read.findings:
        return layers
    if not layers:
        read.found("config", "config.json", "no layer is packed")
    weights = check_weights(read, layers, model.shapes, model.get, progress)
    if read.folded:
        report.remarks.append("something was folded into the weights: they are not compared with MODEL's")
    for name, words in layers.items():
        shape = read.shapes[f"{name}.weight"]
        report.layers.append(LayerReport(name, str(words), shape, weights.get(name), None, None, None))
    return layers


@dataclass
class _Work:
    """What needs models to run."""

    read: Bytes
    layers: Mapping[str, Words]
    model: Against
    device: str
    batches: list[Tensor]
    progress: Progress
    report: Report

    @cached_property
    def kv_scales(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of the folder's cache of keys and values, if it has them all."""
        return cache_scales(self.read)

    def packed(self, rounds: RoundInput = round_input, dtype: torch.dtype = torch.float32) -> StreamedModel:
        compute = PackedLayers(self.read, self.layers, self.device, rounds)
        cache = partial(rounded_cache, self.kv_scales) if rounds is not leave_input and self.kv_scales else None
        return StreamedModel(self.read.folder, compute.get, self.read.shapes, compute, self.device, dtype, cache)

    def plain(self, compute: Linear) -> StreamedModel:
        return StreamedModel(self.model.folder, self.model.get_bf16, self.model.shapes, compute, self.device)

    def consumers(self) -> None:
        """Open the folder with all that is installed."""
        self.progress(0, 4, "opening with every consumer")
        meta_model = transformers_meta_model(self.read.config, self.read.folder)
        rows = meta_model.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        ids = probe(self.batches, int(rows), meta_model.context)
        if int(ids.max()) >= rows:
            raise ArtifactError(f"the tokenizer of {self.model.folder} gives the id {int(ids.max())}, {rows} are there")

        def run(rounds: RoundInput, dtype: torch.dtype) -> Tensor:
            return self.packed(rounds, dtype)(ids)

        causal, cache = is_language_model(meta_model.model), bool(self.kv_scales)
        asked = make_probe(self.read.folder, self.layers, self.read.settings, ids, causal, cache, run)
        for done, consumer in enumerate(try_consumers(asked, self.device), start=1):
            self.progress(done, 4, "opening with every consumer")
            self.report.consumers.append(consumer)
            if consumer.outcome in ("disagrees", "failed"):
                self.report.findings.append(Finding("consumer", consumer.name, said_of(consumer)))

    def quality(self) -> None:
        """Run BF16, packed and INT8 on the prompts, a batch at a time."""
        layers = PackedLayers(self.read, self.layers, self.device)
        watched = WatchedLayers(self.model.get_bf16, layers, self.layers, self.device, not self.read.folded)
        reference, packed = self.plain(watched), self.packed()
        if self.kv_scales:
            self.report.remarks.append("keys and values are rounded by the folder's scales, as its cache does")
        baseline = int8_layers(self.model.get_bf16, self.layers, self.device)
        sums = [LogitSums() if reference.causal else EmbeddingSums() for _ in range(2)]
        for done, ids in enumerate(self.batches):
            self.progress(done, len(self.batches), "running prompts")
            reference.compute = watched
            truth = reference(ids)
            found = packed(ids)
            reference.compute = baseline
            for candidate, gathered in zip((found, reference(ids)), sums, strict=True):
                gathered.add(ids, truth, candidate)
        self.report.quality, self.report.int8 = (gathered.quality() for gathered in sums)
        self.report.layers = [_with(layer, watched.sums.get(layer.name)) for layer in self.report.layers]


def _with(layer: LayerReport, seen: LayerSums | None) -> LayerReport:
    if seen is None:
        return layer
    return LayerReport(
        layer.name, layer.words, layer.shape, layer.weight_sqnr, seen.sqnr, seen.clip_rate, seen.headroom
    )


def said_of(consumer: Consumer) -> str:
    """What is wrong with it, in a line."""
    if consumer.distance is None:
        return consumer.note
    return (
        f"its outputs differ from the bytes' by {consumer.distance:.2%} of their size, where rounding explains "
        f"{consumer.tolerance:.2%} ({consumer.note})"
    )
