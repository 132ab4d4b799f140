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
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from octavo.artifact.atomic_folder import check_absent
from octavo.device import choose_device
from octavo.evaluation.limits import Budget, check_budgets
from octavo.evaluation.metrics import EmbeddingSums, LogitQuality, LogitSums, Quality, compare_many
from octavo.evaluation.prompts import OnRead, PromptOptions, open_prompts
from octavo.hf.fused_groups import groups
from octavo.hf.outputs import predicts_tokens
from octavo.hf.source import Source, open_source
from octavo.packing.options import PackOptions
from octavo.packing.partly_packed import PartlyPackedModel
from octavo.packing.pipeline import pack_source
from octavo.packing.report import PackReport
from octavo.progress import Progress, no_progress


@dataclass(frozen=True)
class Group:
    """Layers that are packed together.

    `harm` is the KL divergence, or 1 - cosine, with them alone packed. `saved` is the bytes that packing them saves.
    """

    layers: tuple[str, ...]
    harm: float
    saved: int

    @property
    def name(self) -> str:
        """The name of the module that has the layers, and their own names, such as
        model.layers.0.mlp.gate_proj+up_proj."""
        parent = self.layers[0].rpartition(".")[0]
        return f"{parent}.{'+'.join(layer.rpartition('.')[2] for layer in self.layers)}"


@dataclass(frozen=True)
class BudgetReport:
    """The layers that stay in BF16 within budgets.

    Attributes:
        budgets: the limits, which all hold.
        ranking: every group, the most harm per byte first.
        kept: the number of groups, from the first, that stay in BF16.
        quality: of the model with the other groups packed.
        all_packed: of the model with every group packed.
        data: the fingerprint and number of the prompts, their tokens, and the report of the text that was read.
    """

    budgets: Sequence[Budget]
    ranking: Sequence[Group]
    kept: int
    quality: Quality
    all_packed: Quality
    data: Mapping[str, object]

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
            "quality": self.quality.to_dict(),
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

    The model is in memory twice, in BF16 and packed. The packed one is first written to `.OUT.budget`, which is
    removed.

    Args:
        source, out, options, step: see `pack`.
        budgets: limits for the whole model, measured on `data`.
        data: sources of text, see `octavo.text.read_text`.
        prompts: which prompts are taken from it. Prompts of one token do not count.
        device: where the model runs.
        progress: called with every piece of work that is done (`octavo.progress`).
        on_read: called with the report of the text that was read, before anything is measured.

    Raises:
        ValueError: the budgets cannot be held with anything packed; and the errors of `pack` and `open_prompts`.
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    if not budgets or not data:
        raise ValueError("a budget is measured on text: give --data, text files, folders, .jsonl or hf:DATASET")
    if options.experts:
        raise ValueError(
            "a budget chooses among linear layers, and measures no packed experts: leave --experts or --budget out"
        )
    place, opened = choose_device(device), open_source(source, step)
    check_budgets(budgets, language_model=predicts_tokens(opened.meta_model.model))
    chosen = open_prompts(data, opened.description, prompts, opened.meta_model, on_read)
    batches = chosen.batches(prompts.batch, shortest=2)
    model = _pack_trial(opened, out.parent / f".{out.name}.budget", options, place, progress)
    record = {
        "fingerprint": chosen.fingerprint, "prompts": sum(map(len, batches)), "seed": prompts.seed,
        "context": prompts.context, "read": chosen.report.to_dict(),
    }  # fmt: skip
    report = choose_groups(model, groups(model.saved), budgets, batches, record, progress)
    packed = [name for name in model.saved if name not in report.skip]
    layers = {glob: name for glob, name in options.layers.items() if any(fnmatchcase(layer, glob) for layer in packed)}
    options = replace(options, skip=[*options.skip, *report.skip], layers=layers)
    return pack_source(open_source(source, step), out, options, progress, {"budget": report.to_dict()}), report


def _pack_trial(
    source: Source, folder: Path, options: PackOptions, device: torch.device, progress: Progress
) -> PartlyPackedModel:
    """The model with every layer that `options` packs, by way of `folder`, which is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        packed = pack_source(source, folder, options, progress).packed
        return PartlyPackedModel(source, folder, packed, device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choose_groups(
    model: PartlyPackedModel,
    layers: Sequence[tuple[str, ...]],
    budgets: Sequence[Budget],
    batches: Sequence[Tensor],
    data: Mapping[str, object],
    progress: Progress,
) -> BudgetReport:
    """Rank the groups `layers`, and find how few must stay in BF16, measured on `batches`, ids int64 [B, T].

    Raises:
        ValueError: the budgets cannot be held. The message states what is reached.
    """
    ranking = _rank(model, layers, batches, progress)
    measured: dict[int, Quality] = {}

    def measure(kept: int) -> Quality:
        if kept not in measured:
            packed = {layer for group in ranking[kept:] for layer in group.layers}
            measured[kept] = _compare(model, {"": model.with_packed(packed, cache=True)}, batches)[""]
            progress(len(measured), 2 + math.ceil(math.log2(len(ranking) + 1)), "measuring the whole")
        return measured[kept]

    def holds(kept: int) -> bool:
        return all(budget.holds(measure(kept)) for budget in budgets)

    low, high = 0, len(ranking) - 1  # too few groups in BF16, and enough
    if holds(0):
        high = 0
    elif not holds(high):
        budget = next(budget for budget in budgets if not budget.holds(measure(high)))
        reached, best = (budget.show(budget.estimate(measure(kept)).value) for kept in (0, high))
        raise ValueError(
            f"the budget {budget.show(budget.limit)} leaves nothing to pack: with every layer packed it is {reached}, "
            f"and {best} with {ranking[high].name} alone. Allow more, or take another scheme"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    quality = measure(high)
    return BudgetReport(budgets, ranking, high, quality, measure(0), {**data, "tokens": quality.tokens})


def _rank(
    model: PartlyPackedModel, layers: Sequence[tuple[str, ...]], batches: Sequence[Tensor], progress: Progress
) -> list[Group]:
    seen = 0

    def counted(names: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
        run = model.with_packed(names)

        def outputs(ids: Tensor) -> Tensor:
            nonlocal seen
            seen += 1
            progress(seen, len(layers) * len(batches), "measuring each group")
            return run(ids)

        return outputs

    alone = _compare(model, {g[0]: counted(g) for g in layers}, batches)
    ranked = [Group(g, _harm(alone[g[0]]), sum(model.saved[layer] for layer in g)) for g in layers]
    return sorted(ranked, key=lambda group: group.harm / max(group.saved, 1), reverse=True)


def _compare(
    model: PartlyPackedModel, candidates: Mapping[str, Callable[[Tensor], Tensor]], batches: Sequence[Tensor]
) -> Mapping[str, Quality]:
    plain = model.with_packed(())
    if model.logits:
        return compare_many(plain, candidates, batches, LogitSums)
    return compare_many(plain, candidates, batches, EmbeddingSums)


def _harm(quality: Quality) -> float:
    return quality.kl.value if isinstance(quality, LogitQuality) else 1 - quality.cosine.value
