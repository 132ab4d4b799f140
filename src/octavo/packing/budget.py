"""Packing within a budget: measurement decides which layers stay in BF16.

    harm(g)  = KL divergence, from the BF16 model, of the model with the group g alone packed; for encoders 1 - cosine
    ranking  = groups by harm(g) / bytes saved(g), the largest first
    kept     = the smallest k with which the budget holds: the first k groups are in BF16, all others are packed

A group is the layers that readers run as one GEMM (q, k, v; gate, up), or one other layer. It is packed whole or not at
all. Groups are measured alone because independent rounding errors add in the square and KL is quadratic in the error,
so harms nearly add up. The harm of one group among packed others would be a small difference of two large numbers. A
budget of perplexity is ranked by KL too: the change in loss of one group has either sign and is mostly noise. The
budget itself is measured on the whole model, with keys and values rounded if the folder has scales for them. Bisection
finds k.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import check_absent
from octavo.checkpoint.scheme import groups
from octavo.evaluation.metrics import (
    Budget,
    EmbeddingSums,
    LogitQuality,
    LogitSums,
    Quality,
    check_budgets,
    compare_many,
)
from octavo.evaluation.prompts import OnRead, PromptOptions, open_prompts
from octavo.hf.meta_model import model_outputs, predicts_tokens
from octavo.hf.source import Source, open_source
from octavo.inference.packed_linear import PackedLinear
from octavo.models.decoder import Decoder
from octavo.numerics.formats import E4M3, cast, widen
from octavo.packing.options import PackOptions, choose_layers
from octavo.packing.packer import PackJob, PackReport, pack_source
from octavo.util import Progress, choose_device, no_progress


class PartlyPackedModel:
    """The model of `source` on `device`. Each of the layers that `options` pack runs in BF16, or with the bytes and the
    arithmetic of the packed folder, so a measurement with all of them is one of the folder. Both forms are in memory.

    `saved` has the bytes that packing saves, by layer. The outputs are `logits` of tokens, or else last hidden states.
    """

    def __init__(
        self, source: Source, options: PackOptions, device: str | torch.device, progress: Progress = no_progress
    ) -> None:
        job = PackJob(source, choose_layers(source, options), options)
        self.logits = predicts_tokens(source.meta_model.model)
        self.sums: type[LogitSums | EmbeddingSums] = LogitSums if self.logits else EmbeddingSums
        self._model: nn.Module = source.fill_bf16()
        self._forms: dict[str, tuple[nn.Module, nn.Module]] = {}
        self.saved: dict[str, int] = {}
        keys_and_values = list(job.layers.static.keys_and_values.values())
        self._kv_scales = list(zip(keys_and_values[0::2], keys_and_values[1::2], strict=True))
        for done, name in enumerate(names := job.layers.linears, start=1):
            linear: Any = self._model.get_submodule(name)
            stored = job.packed(name, source.get(f"{name}.weight"))
            self.saved[name] = 2 * linear.weight.numel() - sum(tensor.nbytes for tensor in stored.values())
            state = {key.rpartition(".")[2]: tensor for key, tensor in stored.items()}
            layer = PackedLinear(linear, job.layers.schemes[name], name)
            layer.load_state_dict(state if linear.bias is None else state | {"bias": linear.bias.detach()}, assign=True)
            self._forms[name] = (linear, layer.to(device))
            progress(done, len(names), "packing")
        if not isinstance(self._model, Decoder):
            self._model.config.use_cache = False
        self._model.to(device)
        self._device = torch.device(device)

    def run(self, ids: Tensor, packed: Collection[str] = (), *, cache: bool = False) -> Tensor:
        """Run the model with exactly the layers `packed` packed: ids int64 [B, T] -> logits [B, T, V], or the last
        hidden states [B, T, width]. `cache` rounds keys and values if the folder has scales for them."""
        for name, forms in self._forms.items():
            self._model.set_submodule(name, forms[name in packed])
        rounds = [partial(_rounded, scales) for scales in self._kv_scales] if cache else []
        result = model_outputs(self._model, ids.to(self._device), self.logits, rounds)
        if result.shape[:-1] != ids.shape:
            raise ArtifactError(
                f"{type(self._model).__name__} gives {list(result.shape)} for {list(ids.shape)} tokens: nothing to "
                "measure"
            )
        return result


def _rounded(scales: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    pairs = [(x, scale.to(x.device)) for x, scale in zip((k, v), scales, strict=True)]
    return [(widen(cast(x.float() / scale, E4M3)) * scale).to(x.dtype) for x, scale in pairs]


@dataclass(frozen=True)
class Group:
    """Layers that are packed together. `harm` is the KL divergence, or 1 - cosine, with them alone packed; `saved` is
    the bytes that packing them saves."""

    layers: tuple[str, ...]
    harm: float
    saved: int

    @property
    def name(self) -> str:
        """Such as model.layers.0.mlp.gate_proj+up_proj."""
        parent = self.layers[0].rpartition(".")[0]
        return f"{parent}.{'+'.join(layer.rpartition('.')[2] for layer in self.layers)}"


@dataclass(frozen=True)
class BudgetReport:
    """The layers that stay in BF16 within budgets."""

    budgets: Sequence[Budget]  # the limits, which all hold
    ranking: Sequence[Group]  # every group, the most harm per byte first
    kept: int  # the number of groups, from the first, that stay in BF16
    quality: Quality  # of the model with the other groups packed
    all_packed: Quality  # of the model with every group packed
    data: Mapping[str, object]  # the prompts, their fingerprint and tokens, and the report of the text that was read

    @property
    def skip(self) -> list[str]:
        return [layer for group in self.ranking[: self.kept] for layer in group.layers]

    @property
    def harm(self) -> str:
        """The name of the harm of a group in octavo.json."""
        return "kl_alone" if isinstance(self.quality, LogitQuality) else "cosine_lost_alone"

    def to_dict(self) -> dict[str, object]:
        """The entry "budget" of octavo.json."""
        return {
            "limits": [
                {
                    "measure": budget.measure,
                    "limit": budget.limit,
                    "measured": budget.estimate(self.quality).value,
                    "with_all_packed": budget.estimate(self.all_packed).value,
                }
                for budget in self.budgets
            ],
            "quality": asdict(self.quality),
            "kept_in_bf16": [list(group.layers) for group in self.ranking[: self.kept]],
            "groups": [{"layers": list(g.layers), self.harm: g.harm, "bytes_saved": g.saved} for g in self.ranking],
            "data": dict(self.data),
        }


def pack_within(
    source: str | Path,
    out: str | Path,
    budgets: Sequence[Budget],
    data: Sequence[str],
    options: PackOptions = PackOptions(),
    *,
    prompts: PromptOptions = PromptOptions(samples=32),
    device: str = "cpu",
    step: int | None = None,
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> tuple[PackReport, BudgetReport]:
    """`pack`, with as many layers left in BF16 as the budgets require, and no more.

    The model is in memory in BF16 and packed.

    Args:
        source, out, options, step: see `pack`.
        budgets: limits for the whole model, measured on `data`.
        data: sources of text, see `octavo.data.read_text`.
        prompts: which prompts are taken from it. Prompts of one token do not count.
        device: where the model runs.
        progress: called with every piece of work that is done (`octavo.util`).
        on_read: called with the report of the text that was read, before anything is measured.

    Raises:
        ValueError: the budgets cannot be held with anything packed; and the errors of `pack` and `open_prompts`.
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    if not budgets or not data:
        raise ValueError("a budget is measured on text: give --data, text files, folders, .jsonl or hf:DATASET")
    if options.experts:
        raise ValueError("a budget chooses linear layers, and measures no experts: leave --experts or --budget out")
    place, opened = choose_device(device), open_source(source, step)
    check_budgets(budgets, language_model=predicts_tokens(opened.meta_model.model))
    chosen = open_prompts(data, opened.description, prompts, opened.meta_model, on_read)
    batches = chosen.batches(prompts.batch, shortest=2)
    model = PartlyPackedModel(opened, options, place, progress)
    record = {
        "fingerprint": chosen.fingerprint, "prompts": sum(map(len, batches)), "seed": prompts.seed,
        "context": prompts.context, "read": chosen.report.to_dict(),
    }  # fmt: skip
    report = choose_groups(model, budgets, batches, record, progress)
    packed = [name for name in model.saved if name not in report.skip]
    layers = {glob: name for glob, name in options.layers.items() if any(fnmatchcase(layer, glob) for layer in packed)}
    options = replace(options, skip=[*options.skip, *report.skip], layers=layers)
    return pack_source(open_source(source, step), out, options, progress, {"budget": report.to_dict()}), report


def choose_groups(
    model: PartlyPackedModel,
    budgets: Sequence[Budget],
    batches: Sequence[Tensor],
    data: Mapping[str, object],
    progress: Progress,
) -> BudgetReport:
    """Rank the groups of packed layers, and find how few must stay in BF16, measured on `batches`, ids int64 [B, T]. If
    the budgets cannot be held, a ValueError has the values that are reached."""
    ranking = _rank(model, batches, progress)
    measured: dict[int, Quality] = {}

    def measure(kept: int) -> Quality:
        if kept not in measured:
            packed = {layer for group in ranking[kept:] for layer in group.layers}
            whole = {"": lambda ids: model.run(ids, packed, cache=True)}
            measured[kept] = compare_many(model.run, whole, batches, model.sums)[""]
            progress(len(measured), 2 + math.ceil(math.log2(len(ranking) + 1)), "measuring the whole")
        return measured[kept]

    def holds(kept: int) -> bool:
        return all(budget.holds(measure(kept)) for budget in budgets)

    kept = 0 if holds(0) else bisect_left(range(len(ranking)), True, lo=1, key=holds)
    if kept == len(ranking):
        budget = next(budget for budget in budgets if not budget.holds(measure(kept - 1)))
        reached, best = (budget.show(budget.estimate(measure(count)).value) for count in (0, kept - 1))
        raise ValueError(
            f"the budget {budget.show(budget.limit)} leaves nothing to pack: with every layer packed it is {reached}, "
            f"and {best} with {ranking[-1].name} alone. Allow more, or take another scheme"
        )
    quality = measure(kept)
    return BudgetReport(budgets, ranking, kept, quality, measure(0), {**data, "tokens": quality.tokens})


def _rank(model: PartlyPackedModel, batches: Sequence[Tensor], progress: Progress) -> list[Group]:
    layers, seen = groups(model.saved), count(1)

    def outputs(group: tuple[str, ...], ids: Tensor) -> Tensor:
        progress(next(seen), len(layers) * len(batches), "measuring each group")
        return model.run(ids, group)

    alone = compare_many(model.run, {group[0]: partial(outputs, group) for group in layers}, batches, model.sums)
    harms = [q.kl.value if isinstance(q, LogitQuality) else 1 - q.cosine.value for q in alone.values()]
    saved = [sum(model.saved[layer] for layer in group) for group in layers]
    ranked = [Group(*each) for each in zip(layers, harms, saved, strict=True)]
    return sorted(ranked, key=lambda group: group.harm / max(group.saved, 1), reverse=True)
