"""Check a packed folder, and measure what packing cost.

The steps, in this order, each with its modules. No model runs on bytes that are wrong.

    files, layer_spec, checks    the files, the settings and the tensors by themselves
    weights                      the weights against those of the model that the folder was packed from, MODEL
    readers, reference           every reader installed here against a reference that is built from the bytes
    quality                      on prompts, the error of each layer and of the model, beside INT8's
    sizes                        the bytes that the folder takes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError, read_json
from octavo.artifact.packed.plausible import reciprocal_warning, suspected
from octavo.artifact.run import RunFolder, refuse_run
from octavo.device import choose_device
from octavo.evaluation.limits import Budget, check_budgets
from octavo.evaluation.prompts import OnRead, PromptOptions, has_tokenizer, open_prompts
from octavo.hf.inputs import random_inputs
from octavo.hf.meta_model import MetaModel, transformers_meta_model
from octavo.hf.outputs import is_language_model
from octavo.progress import Progress, no_progress
from octavo.verification.checks import check_folder
from octavo.verification.files import CheckpointFiles, Finding, read_files
from octavo.verification.kv_cache import cache_scales, rounding_cache
from octavo.verification.layer_spec import LayerSpec
from octavo.verification.numbers import (
    RoundInput,
    leave_input,
    round_input,
    round_input_by_compressed_tensors,
    scale_values,
    widen,
)
from octavo.verification.quality import measure_quality
from octavo.verification.readers import Probe, try_readers
from octavo.verification.reference import PackedLayers
from octavo.verification.result import LayerReport, Report, over_budget
from octavo.verification.sizes import measure_sizes
from octavo.verification.streamed_model import BaselineModel, StreamedModel, required_by
from octavo.verification.weights import check_weights


def verify(
    packed: str | Path,
    against: str | Path,
    data: Sequence[str] = (),
    *,
    budgets: Sequence[Budget] = (),
    prompts: PromptOptions = PromptOptions(),
    device: str = "cpu",
    folded: bool = False,
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> Report:
    """Check a packed folder against its model and its readers, and measure what packing cost.

    Args:
        packed: the folder. Its errors become findings of the report.
        against: the model that it was packed from (MODEL), a Hugging Face folder or a run of `octavo train`. Of a run,
            the checkpoint is read that octavo.json names, or the newest if the run has removed that one.
        data: sources of text, see `octavo.text.read_text`. Without it the quality is not measured.
        budgets: limits on the quality; an exceeded one is a finding.
        prompts: which prompts are taken from `data`.
        device: for the reference and for Octavo's runtime. transformers runs on the CPU.
        folded: smoothing or a rotation was folded into the weights, which are then not compared with MODEL's.
            octavo.json states it too.
        progress: see `octavo.progress`.
        on_read: called with the report of the text, before anything runs.

    Raises:
        FileNotFoundError, ArtifactError, ImportError: there is no packed folder, or MODEL cannot be read.
        DataError: the text cannot be read, or makes no prompts.
        ValueError: the device is not there, or a budget lacks text or is not for this kind of model.
    """
    packed, against = Path(packed), Path(against)
    if not packed.is_dir():
        raise FileNotFoundError(f"there is no folder {packed}: give a packed folder")
    refuse_run(packed)
    device = str(choose_device(device))
    if budgets and not data:
        raise ValueError("a budget is measured on text: give --data")
    baseline = BaselineModel(against, _packed_step(packed, against))
    check_budgets(budgets, language_model=baseline.logits)
    report = Report(packed, against)
    batches: list[Tensor] = []
    if data:
        read_prompts = open_prompts(data, baseline.folder, prompts, baseline.meta_model, on_read)
        report.data, batches = read_prompts.report, read_prompts.batches(prompts.batch, shortest=2)
    files = read_files(packed)
    files.folded |= folded
    verification = Verification(files, baseline, device, batches, progress, report)
    verification.check_bytes()
    if report.findings:
        report.not_run = "nothing was run on this folder, since its bytes are wrong"
        return report
    verification.try_readers()
    if batches:
        verification.measure_quality(budgets)
    report.sizes = measure_sizes(files, verification.layers)
    return report


@dataclass
class Verification:
    """The steps of `verify`, which add their results to `report`."""

    files: CheckpointFiles
    baseline: BaselineModel
    device: str
    batches: list[Tensor]
    progress: Progress
    report: Report
    layers: dict[str, LayerSpec] = field(default_factory=dict)
    kv_scales: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def check_bytes(self) -> None:
        """The files, the settings and the tensors, by themselves and against MODEL."""
        files, report = self.files, self.report
        report.architecture = ", ".join(map(str, files.config.get("architectures") or ()))
        report.findings, report.remarks = files.findings, files.remarks
        self.layers = self._check_structure()
        if files.findings:
            return
        if not self.layers:
            files.add_finding("config", "config.json", "no layer is packed")
        ratios: dict[str, float] = {}
        if files.folded:
            report.remarks.append("something was folded into the weights: they are not compared with MODEL's")
            _check_plausible(files, self.layers)
        else:
            ratios = check_weights(files, self.layers, self.baseline.shapes, self.baseline.get, self.progress)
        for name, spec in self.layers.items():
            report.layers.append(LayerReport(name, str(spec), files.shapes[f"{name}.weight"], ratios.get(name)))

    def _check_structure(self) -> dict[str, LayerSpec]:
        files = self.files
        if not files.config or not files.shapes:
            return {}
        try:
            required = required_by(self._meta_model())
        except ImportError:
            raise
        except Exception as error:  # a damaged config.json may raise anything
            message = f"transformers cannot build the model ({type(error).__name__}: {error})"
            files.add_finding("config", "config.json", message)
            return {}
        return check_folder(files, required, self.progress)

    def try_readers(self) -> None:
        """Open the folder with every reader installed here."""
        meta_model = self._meta_model()
        if meta_model.takes_text and not has_tokenizer(self.files.folder):
            self.report.remarks.append("the folder has no tokenizer: programs that generate text from it need one")
        self.progress(0, 4, "opening with every reader")
        self.kv_scales = cache_scales(self.files)
        given = self.batches[0][:4, :64] if self.batches else random_inputs(meta_model.model, meta_model.positions)

        def run(rounding: RoundInput, dtype: torch.dtype = torch.float32) -> Tensor:
            return self._packed_model(rounding, dtype)(given).cpu()

        probe = Probe(
            self.files.folder,
            self.layers,
            self.files.settings,
            causal=is_language_model(meta_model.model),
            logits=self.baseline.logits,
            cache=bool(self.kv_scales),
            mixture=meta_model.experts is not None,
            inputs=given,
            reference=run(round_input),
            emulated=run(round_input_by_compressed_tensors),
            unrounded=run(leave_input),
            bf16=run(round_input, torch.bfloat16),
        )
        for done, reader in enumerate(try_readers(probe, self.device), start=1):
            self.progress(done, 4, "opening with every reader")
            self.report.readers.append(reader)
            if reader.is_wrong:
                self.report.findings.append(Finding("reader", reader.name, reader.describe_error()))

    def measure_quality(self, budgets: Sequence[Budget]) -> None:
        """Measure the quality on the prompts, and compare it with the budgets."""
        if self.kv_scales:
            self.report.remarks.append("keys and values are rounded by the folder's scales, as its cache does")
        layers = PackedLayers(self.files, self.layers, self.device)
        quality, int8, sums = measure_quality(self.baseline, layers, self._packed_model(), self.batches, self.progress)
        self.report.quality, self.report.int8 = quality, int8
        for i, layer in enumerate(self.report.layers):
            if seen := sums.get(layer.name):
                self.report.layers[i] = replace(
                    layer, output_sqnr=seen.sqnr, clip_rate=seen.clip_rate, headroom=seen.headroom
                )
        self.report.findings += over_budget(quality, budgets)

    def _packed_model(self, rounding: RoundInput = round_input, dtype: torch.dtype = torch.float32) -> StreamedModel:
        """The reference. Keys and values are rounded unless inputs are left as they are."""
        meta_model, stored = self._meta_model(), self.files.shapes
        experts = [] if meta_model.experts is None else meta_model.experts.experts
        unrounded = experts if rounding is round_input_by_compressed_tensors else []  # transformers widens experts
        layers = PackedLayers(self.files, self.layers, self.device, rounding, unrounded)
        rounds_cache = self.kv_scales and rounding is not leave_input
        make_cache = partial(rounding_cache, self.kv_scales) if rounds_cache else None
        return StreamedModel(meta_model, layers.get, stored, layers, self.device, dtype, make_cache)

    def _meta_model(self) -> MetaModel:
        return transformers_meta_model(self.files.config, self.files.folder)


def _packed_step(packed: Path, against: Path) -> int | None:
    """The step of the checkpoint of the run `against` that octavo.json names as the source; None if there is none."""
    run = RunFolder(against)
    if not run.has_model:
        return None
    try:
        source = read_json(packed / "octavo.json").get("source")
    except (FileNotFoundError, ArtifactError):  # a folder of another program, or damaged: `check_folder` judges it
        return None
    return next((run.step_of(path) for path in run.checkpoints() if path.name == source), None)


def _check_plausible(files: CheckpointFiles, layers: dict[str, LayerSpec]) -> None:
    """Check folded weights, which differ from MODEL's, for scales that look reciprocal."""

    def scales_and_weight(name: str, spec: LayerSpec) -> tuple[str, Tensor, Callable[[], Tensor]]:
        data, scale = files.get(f"{name}.weight"), files.get(f"{name}.{spec.scale}")
        return name, scale_values(scale, spec), partial(widen, data, scale, spec)

    suspects = suspected(scales_and_weight(name, spec) for name, spec in layers.items() if not spec.integers)
    if suspects:
        scale = f"{suspects[0]}.{layers[suspects[0]].scale}"
        files.add_finding("scale", scale, reciprocal_warning(suspects, len(layers)))
