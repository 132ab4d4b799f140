"""`bisect`: which GEMMs and which layers of an FP8 run raise its loss over that of BF16.

A trial runs some GEMMs of some layers in FP8, and all else in BF16.

    GEMMs    each of y, dx and dw alone, in all layers. If none of them causes the gap, each pair.
    layers   with these GEMMs: one half of the layers, then the other, and so on into each half that causes the gap. If
             neither does, the layers are halved by kind (all q_proj, all down_proj, ...) instead of by depth.

A part *causes* the gap if its own gap is resolved and at least a fourth of the whole. So a cause in a few layers is
followed to each of them, and a cause that is spread evenly ends in groups of layers, with their shares. The second half
is not tried yet if the first has three fourths of what both have. In the end the layers that were not found run in FP8,
and the search goes on among them if they cause a gap. Source of the search: group testing by halves, as in delta
debugging (Zeller and Hildebrandt, 2002), with a measured share in place of pass and fail.
"""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from octavo.checkpoint.files import ArtifactError, read_json, replace_file, whole_lines
from octavo.checkpoint.folder import RunFolder, locked_folder, writing
from octavo.evaluation.metrics import student_quantile
from octavo.nn import select_linears
from octavo.nn.conversion import find_experts
from octavo.recipe import GEMMS, Recipe
from octavo.train.config import Config, ConfigError
from octavo.train.model import chosen_recipe
from octavo.train.processes import mean_of_ranks, on_first, own_device, rank
from octavo.train.run_records import different_settings
from octavo.train.saving import load_checkpoint
from octavo.train.trainer import TokenizedText, Trainer, prepare_run, read_data, settle
from octavo.util import Progress, finite, no_progress, reading

# ---- The gap of the loss between a run with parts in FP8 and the run in BF16, over several seeds.
#
#   gap(seed) = loss(seed) / loss of BF16(seed) - 1        the same seed: the same initial weights and the same batches
#
# Two runs of one seed see the same batches, so the luck of the data cancels. The noise of rounding, which sends the two
# runs different ways, remains. The mean over seeds has the interval of Student's t. A gap is *resolved* if that
# interval of 95 % does not contain 0.


def half_width(gaps: Iterable[Sequence[float]]) -> float:
    """Half of the interval around the mean of one gap, from the spread that all `gaps` share; 0 if none is finite. Each
    gap has the noise of the same few seeds. So the variance is the mean of all variances, with the sum of their degrees
    of freedom. A large gap spreads more than a small one, which makes the interval of the small one wider."""
    known = [gap for gap in gaps if math.inf not in gap]
    if not known:
        return 0.0
    seeds = len(known[0])
    variance = statistics.fmean(statistics.variance(gap) for gap in known)
    return student_quantile(min(len(known) * (seeds - 1), 200)) * math.sqrt(variance / seeds)


CAUSES = 0.25  # the share of the whole gap from which a part is a cause
ENOUGH = 0.75  # the share of its group from which one half explains the group


@dataclass(frozen=True)
class Part:
    """The GEMMs `gemms` of the layers `layers`; None stands for all layers that the recipe converts."""

    gemms: tuple[str, ...]
    layers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """The gap of the runs in which only `part` is in FP8, of two or more seeds; inf where a run diverged."""

    part: Part
    gap: tuple[float, ...]
    half_width: float  # of its own interval, or of that with all trials until then: the narrower one

    @property
    def mean(self) -> float:
        return math.inf if math.inf in self.gap else statistics.fmean(self.gap)

    @property
    def resolved(self) -> bool:
        return abs(self.mean) > self.half_width

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would resolve a gap of this size and spread; None if the gap is exactly 0."""
        if self.mean == 0:
            return None
        if self.resolved:
            return len(self.gap)
        spread = statistics.stdev(self.gap) / abs(self.mean)
        enough = (n for n in range(len(self.gap), 100) if student_quantile(n - 1) * spread < math.sqrt(n))
        return next(enough, math.ceil((student_quantile(100) * spread) ** 2))

    def share_of(self, whole: "Trial") -> float:
        """This gap as a part of that of `whole`: 1 if both runs diverged."""
        if math.isinf(whole.mean):
            return 1.0 if math.isinf(self.mean) else 0.0
        return self.mean / whole.mean

    def to_dict(self) -> dict[str, Any]:
        """The gap as JSON values: null for inf."""
        mean, by_seed = finite(self.mean), finite(self.gap)
        return {"mean": mean, "half_width": self.half_width, "resolved": self.resolved, "by_seed": by_seed}


# ---- The search for the parts of a model that cause a gap: first among y, dx and dw, then among the layers.


@dataclass(frozen=True)
class Bisection:
    """The result of the search. `bisect` adds what its short runs tell."""

    layers: tuple[str, ...]  # the names of all layers that the recipe converts
    whole: Trial  # the run with every part in FP8
    trials: tuple[Trial, ...]  # in the order of the search
    gemms: tuple[str, ...] = ()  # that cause the gap; all of the recipe if no smaller set does, and none without a gap
    groups: tuple[Trial, ...] = ()  # of layers that cause it, of one layer where the search went down to it
    losses: tuple[float, ...] = ()  # of the runs in BF16, by seed
    steps: int = 0  # of each short run
    runs: int = 0  # the short runs that the folder has

    @property
    def verdict(self) -> str:
        """Either unresolved (the gap is within the noise), lower (FP8 has the lower loss), small or found."""
        if not self.whole.resolved:
            return "unresolved"
        if self.whole.mean < 0:
            return "lower"
        return "found" if self.groups else "small"

    @property
    def spread(self) -> float:
        """The relative standard deviation of the losses of BF16 between seeds."""
        return statistics.stdev(self.losses) / statistics.fmean(self.losses)

    @property
    def causes(self) -> list[str]:
        """The names of the layers that cause the gap."""
        return [name for group in self.groups for name in group.part.layers or self.layers]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "verdict": self.verdict,
            "gap": self.whole.to_dict(),
            "seeds_needed": self.whole.seeds_needed,
            "gemms": list(self.gemms),
            "layers": [self._trial(group) for group in self.groups],
            "trials": [self._trial(trial) for trial in self.trials],
            "bf16_losses": list(self.losses),
            "bf16_spread": self.spread,
            "steps": self.steps,
            "runs": self.runs,
        }

    def _trial(self, trial: Trial) -> dict[str, Any]:
        return {
            "gemms": list(trial.part.gemms),
            "layers": list(self.layers if trial.part.layers is None else trial.part.layers),
            "gap": trial.to_dict(),
            "share": trial.share_of(self.whole) if self.whole.mean else None,
        }


@dataclass(eq=False)
class Search:
    """Runs the search. `measure` gives the gap of a part in FP8; a gap below `least` is not searched."""

    measure: Callable[[Part], tuple[float, ...]]
    gemms: tuple[str, ...]
    layers: tuple[str, ...]
    least: float
    _trials: dict[Part, Trial] = field(default_factory=dict)

    def run(self) -> Bisection:
        whole = self._try(Part(self.gemms))
        if not whole.resolved or whole.mean < self.least:
            return Bisection(self.layers, whole, tuple(self._trials.values()))
        gemms = self._find_gemms(whole)
        found = tuple(self._find_all_layers(gemms))
        # The remedies: the whole without the GEMMs that cause the gap, and the whole without the layers.
        causes = {name for trial in found for name in trial.part.layers or ()}
        if others := tuple(gemm for gemm in self.gemms if gemm not in gemms):
            self._try(Part(others))
        if rest := tuple(name for name in self.layers if name not in causes):
            self._try(Part(self.gemms, rest))
        return Bisection(self.layers, whole, tuple(self._trials.values()), gemms, found)

    def _find_gemms(self, whole: Trial) -> tuple[str, ...]:
        for count in range(1, len(self.gemms)):
            sets = list(combinations(self.gemms, count))
            causes = [gemms for gemms in sets if self._causes(self._try(Part(gemms)), whole)]
            if causes and count == 1:
                return tuple(gemm for (gemm,) in causes)
            if causes:
                return max(causes, key=lambda gemms: self._try(Part(gemms)).share_of(whole))
        return self.gemms

    def _find_all_layers(self, gemms: tuple[str, ...]) -> Iterator[Trial]:
        """The groups of layers that cause the gap, until the layers that are left cause none."""
        whole = self._try(Part(gemms))
        group, left = replace(whole, part=Part(gemms, self.layers)), self.layers
        while True:
            found = list(self._find_layers(group, whole))
            yield from found
            named = {name for trial in found for name in trial.part.layers or ()}
            left = tuple(name for name in left if name not in named)
            if not left:
                return
            group = self._try(Part(gemms, left))
            if not self._causes(group, whole):
                return

    def _find_layers(self, group: Trial, whole: Trial) -> Iterator[Trial]:
        layers = group.part.layers or ()
        for halves in _halves(layers):
            causes = []
            for half in halves:
                trial = self._try(Part(group.part.gemms, half))
                if self._causes(trial, whole):
                    causes.append(trial)
                    if trial.share_of(group) >= ENOUGH:
                        break
            if causes:
                for trial in causes:
                    yield from self._find_layers(trial, whole)
                return
        yield group

    def _causes(self, trial: Trial, whole: Trial) -> bool:
        return trial.resolved and trial.share_of(whole) >= CAUSES

    def _try(self, part: Part) -> Trial:
        if part not in self._trials:
            gap = self.measure(part)
            every = [*(trial.gap for trial in self._trials.values()), gap]
            self._trials[part] = Trial(part, gap, min(half_width([gap]), half_width(every)))
        return self._trials[part]


def _halves(layers: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Ways to halve the layers: by depth, and by kind, the last word of the name, if there are several kinds."""
    if len(layers) < 2:
        return
    middle = len(layers) // 2
    by_depth = layers[:middle], layers[middle:]
    yield by_depth
    kinds = {name: name.rpartition(".")[2] for name in layers}
    all_kinds = list(dict.fromkeys(kinds.values()))
    first = all_kinds[: len(all_kinds) // 2]
    by_kind = tuple(n for n in layers if kinds[n] in first), tuple(n for n in layers if kinds[n] not in first)
    if first and by_kind != by_depth:
        yield by_kind


# ---- Short runs of the trainer with parts in FP8, each of which is remembered in a folder.
#
#     OUT/
#       bisect.json     the settings of the runs, their length, and the checkpoint that they start from
#       runs.jsonl      one line a run: gemms, layers (null: all), seed, converted, losses (by step), seconds
#
# A run that is remembered is not repeated, so more seeds add to those that are there.


BF16 = Part(())


@dataclass(frozen=True)
class ShortRun:
    """A run that has ended."""

    part: Part  # what ran in FP8
    seed: int
    converted: tuple[str, ...]  # the layers that ran in FP8, in the order of the model
    skipped: tuple[str, ...]  # the layers that `only_if_faster` left in BF16
    losses: tuple[float, ...]  # the mean training loss of each step; up to the first that is not finite
    seconds: float  # of the whole run

    @property
    def loss(self) -> float:
        """The mean of the last quarter; inf if the run diverged."""
        return statistics.fmean(self.losses[-max(len(self.losses) // 4, 1) :])


@dataclass(eq=False)
class ShortRuns:
    """The short runs of one search, in the folder `out`. `whole` is what the settings run in FP8. Runs start from
    `checkpoint`, or from new weights."""

    config: Config
    out: Path
    steps: int
    checkpoint: Path | None
    whole: Part
    on_run: Callable[[ShortRun, int], None]
    progress: Progress = no_progress
    runs: dict[tuple[Part, int], ShortRun] = field(default_factory=dict)
    _data: TokenizedText | None = None

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Read the runs that the folder has, and hold its lock in the block."""
        with ExitStack() as stack:
            if rank() == 0:
                stack.enter_context(locked_folder(self.out))
            self.runs = {(run.part, run.seed): run for run in on_first(self._open)}
            if gc.get_freeze_count() == 0:  # else it would undo what the caller has frozen
                stack.callback(gc.unfreeze)
            gc.freeze()  # a collection after each run then looks at the objects of that run alone
            yield self

    def gap(self, part: Part, seeds: int) -> tuple[float, ...]:
        """The gap of `part` against BF16 with each of the first `seeds` seeds."""
        each = range(self.config.seed, self.config.seed + seeds)
        pairs = [(self.run(part, seed), self.run(BF16, seed)) for seed in each]
        for _, baseline in pairs:
            if math.isinf(baseline.loss):
                raise ConfigError(
                    f"the run in BF16 with seed {baseline.seed} diverged at step {len(baseline.losses)}: FP8 is not "
                    "the cause. Lower learning_rate, or choose another seed"
                )
        return tuple(run.loss / baseline.loss - 1 for run, baseline in pairs)

    def run(self, part: Part, seed: int) -> ShortRun:
        """The short run with `part` in FP8, made now unless it is remembered."""
        if (part, seed) not in self.runs:
            self.runs[part, seed] = found = self._make(part, seed)
            if rank() == 0:
                fields = asdict(found)
                self._append("runs.jsonl", json.dumps(finite(fields | fields.pop("part"))))
            self.on_run(found, len(self.runs))
        return self.runs[part, seed]

    def _make(self, part: Part, seed: int) -> ShortRun:
        began = time.perf_counter()
        config = self._settings(part, seed)
        run = RunFolder(self.out if self.checkpoint is None else self.checkpoint.parent)
        if self._data is None:
            self._data = read_data(config, run, Console(quiet=True))
        trainer = prepare_run(config, run, ExitStack(), Console(quiet=True), data=self._data)
        if self.checkpoint is not None:
            load_checkpoint(self.checkpoint, trainer.state, other_recipe=True)
        with trainer.lock:
            linears = [layer for layer in select_linears(trainer.model, self.config.skip) if not layer.reason]
            linears = [layer for layer in linears if ".lora_" not in layer.name]  # not adapters, but layers in them
            modules = {layer.name.removesuffix(".base_layer"): layer.module for layer in linears}
            modules |= find_experts(trainer.model)
            names = dict.fromkeys(name.removesuffix(".base_layer") for name, _ in trainer.model.named_modules())
            recipes: dict[str, Recipe | None] = {n: getattr(modules[n], "recipe", None) for n in names if n in modules}
            in_fp8 = {name: recipe is not None and recipe.quantized for name, recipe in recipes.items()}
            losses = self._train(trainer)
        # Give back the memory of the model, which holds references to itself, and the code that was compiled for it.
        del trainer, linears, modules
        if self.config.compile.blocks:
            torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU
        converted, skipped = (tuple(name for name in in_fp8 if in_fp8[name] == fp8) for fp8 in (True, False))
        return ShortRun(part, seed, converted, skipped, losses, round(time.perf_counter() - began, 3))

    def _settings(self, part: Part, seed: int) -> Config:
        if not part.gemms:
            return self.config.change(seed=seed, recipe="bf16", bf16_gemms=(), calibration="", only_if_faster=False)
        changes: dict[str, Any] = {"seed": seed, "bf16_gemms": tuple(name for name in GEMMS if name not in part.gemms)}
        if part.layers is not None:
            whole = self.run(self.whole, self.config.seed)
            others = [name for name in whole.converted if name not in part.layers]
            changes |= {"skip": (*self.config.skip, *others, *whole.skipped), "only_if_faster": False}
        return self.config.change(**changes)

    def _train(self, trainer: Trainer) -> tuple[float, ...]:
        with trainer.state.cast_once():
            losses = []
            for step in range(1, self.steps + 1):
                losses.append(trainer.step()[0])
                self.progress(step, self.steps, f"short run {len(self.runs) + 1}")
        found: list[float] = mean_of_ranks(torch.stack(losses)).tolist()
        diverged = next((at for at, loss in enumerate(found) if not math.isfinite(loss)), len(found) - 1)
        return tuple(loss if math.isfinite(loss) else math.inf for loss in found[: diverged + 1])

    def _open(self) -> list[ShortRun]:
        """The runs that the folder has, after a check that they are of these settings."""
        settings = {name: value for name, value in self.config.to_dict().items() if name != "out"}
        described: dict[str, Any] = {"settings": settings, "steps": self.steps, "from": str(self.checkpoint or "")}
        path, log = self.out / "bisect.json", self.out / "runs.jsonl"
        if path.is_file():
            pair, more = (read_json(path), described), ("steps", "from")
            both = [each.get("settings", {}) | {name: each.get(name) for name in more} for each in pair]
            for name, (there, here) in sorted(different_settings(both).items()):
                raise ConfigError(
                    f"{self.out} has short runs of other settings: {name} is {there!r} there and {here!r} here. Choose "
                    "another --out"
                )
        elif self.out.exists() and any(self.out.iterdir()):
            raise FileExistsError(f"{self.out} is not empty and has no short runs: choose another --out")
        else:
            self._append(path.name, json.dumps(described, indent=1))
        whole = whole_lines(log)
        if log.is_file():  # without the line that a run was killed in
            replace_file(log, "".join(whole))
        return [_from_line(line, f"{log}, line {number}") for number, line in enumerate(whole, 1)]

    def _append(self, name: str, text: str) -> None:
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / name).open("a") as file:
                file.write(text + "\n")


def _from_line(line: str, where: str) -> ShortRun:
    with reading(where, "a short run: move that line to another file, and the run is made again", ArtifactError):
        fields = json.loads(line)
        layers, gemms = fields.pop("layers"), tuple(fields.pop("gemms"))
        part = Part(gemms, None if layers is None else tuple(layers))
        losses = tuple(math.inf if loss is None else float(loss) for loss in fields.pop("losses"))
        converted, skipped = (tuple(fields.pop(name)) for name in ("converted", "skipped"))
        return ShortRun(part, converted=converted, skipped=skipped, losses=losses, **fields)


# ---- `bisect`: which GEMMs and which layers of an FP8 run raise its loss over that of BF16.


LEAST = 0.0005
STEPS = 200  # of a short run, at most, unless they are given


def bisect(
    config: Config,
    out: str | Path,
    *,
    seeds: int = 3,
    steps: int | None = None,
    least: float = LEAST,
    checkpoint: Path | None = None,
    on_run: Callable[[ShortRun, int], None] = lambda run, count: None,
    progress: Progress = no_progress,
) -> Bisection:
    """Find the GEMMs and the layers that raise the loss of an FP8 run over that of BF16.

    Every rank of a process group must call this.

    Args:
        config: the settings of the FP8 run. The learning rate follows its schedule, of which a short run is the start.
        out: the folder that remembers the short runs. The same call continues a search that was interrupted.
        seeds: runs of each part, from the setting `seed` on.
        steps: of a short run; None takes those of the settings, 200 at most.
        least: the smallest gap that is searched, a share of the loss of BF16.
        checkpoint: a checkpoint in the folder of a run, to start from in place of new weights.
        on_run: called with each short run that ends, and with the number of runs so far.
        progress: called with the steps of a short run that are done, those of all its steps, and its number in words.

    Raises:
        ConfigError: a recipe without FP8, fewer than two seeds, no step, a negative `least`, BF16 that diverges itself,
            or a folder with the runs of other settings.
        ArtifactError: the checkpoint is damaged or does not fit the settings or the data.
        LockedError, WriteError: the folder is in use, or cannot be written.
    """
    length = min(config.steps, STEPS) if steps is None else steps
    if seeds < 2:
        raise ConfigError(f"seeds must be at least 2, since the noise is judged by their spread; got {seeds}")
    if length < 1:
        raise ConfigError(f"the steps of a short run must be at least 1; got {length}")
    if least < 0:
        raise ConfigError(f"the smallest gap (--least) must be 0% or more; got {least:.2%}")
    recipe = chosen_recipe(config, own_device(config.device))
    gemms = tuple(name for name in GEMMS if getattr(recipe, name) is not None)
    if not gemms:
        raise ConfigError(f"the recipe {config.recipe} runs no GEMM in FP8: there is no gap to bisect")
    with ShortRuns(settle(config), Path(out), length, checkpoint, Part(gemms), on_run, progress).opened() as runs:
        whole = runs.run(Part(gemms), config.seed)
        found = Search(lambda part: runs.gap(part, seeds), gemms, whole.converted, least).run()
        losses = tuple(runs.run(BF16, config.seed + seed).loss for seed in range(seeds))
        return replace(found, losses=losses, steps=length, runs=len(runs.runs))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint `path`, or the newest of the run in the folder `path`. An ArtifactError if none is there."""
    return (path if (path / "train.json").is_file() else RunFolder(path).newest()).resolve()
