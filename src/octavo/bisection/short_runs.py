"""Short runs of the trainer with parts in FP8, each of which is remembered in a folder.

    OUT/
      bisect.json     the settings of the runs, their length, and the checkpoint that they start from
      runs.jsonl      one line a run: gemms, layers (null: all), seed, converted, losses (by step), seconds

A run that is remembered is not repeated, so the same command continues a search that was interrupted, and more seeds
add to those that are there. Its loss is the mean training loss of the last quarter of its steps.
"""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octavo.artifact.atomic_folder import locked_folder, write_error
from octavo.artifact.files import ArtifactError, read_json
from octavo.artifact.run import RunFolder
from octavo.bisection.gap import Gap
from octavo.bisection.search import Part
from octavo.nn import cast_once, select_linears
from octavo.nn.linear import RecipeLayer
from octavo.recipe import GEMMS
from octavo.train.checkpoint import load_into_other_recipe
from octavo.train.config import Config, ConfigError
from octavo.train.loop import Trainer
from octavo.train.processes import mean_of_ranks, on_first
from octavo.train.ranks import rank
from octavo.train.records import different_settings
from octavo.train.start import RunData, prepare_run, read_data

BF16 = Part(())


@dataclass(frozen=True)
class ShortRun:
    """A run that has ended.

    Attributes:
        part: what ran in FP8.
        seed: the setting `seed`.
        converted: the layers that ran in FP8, in the order of the model.
        skipped: the layers that `only_if_faster` left in BF16.
        losses: the mean training loss of each step; up to the first that is not finite.
        seconds: of the whole run.
    """

    part: Part
    seed: int
    converted: tuple[str, ...]
    skipped: tuple[str, ...]
    losses: tuple[float, ...]
    seconds: float

    @property
    def loss(self) -> float:
        """The mean of the last quarter; inf if the run diverged."""
        if not math.isfinite(self.losses[-1]):
            return math.inf
        return statistics.fmean(self.losses[-max(len(self.losses) // 4, 1) :])


class ShortRuns:
    """The short runs of one search, in the folder `out`. A context manager that holds the lock of the folder.

    Args:
        config: the settings of the FP8 run.
        steps: of each run.
        checkpoint: that each run starts from; None starts from random weights, or from those of the model's folder.
        whole: what the settings run in FP8.
        on_run: called with each run that ends, and with the number of runs so far.

    Raises:
        ConfigError: the folder has runs of other settings.
        LockedError: another program uses the folder.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        steps: int,
        checkpoint: Path | None,
        whole: Part,
        on_run: Callable[[ShortRun, int], None],
    ) -> None:
        self.config, self.out, self.steps, self.checkpoint, self.whole = config, out, steps, checkpoint, whole
        self._on_run = on_run
        self._runs: dict[tuple[Part, int], ShortRun] = {}
        self._data: RunData | None = None
        self._lock = ExitStack()
        self._others_froze = False

    def __enter__(self) -> "ShortRuns":
        if rank() == 0:
            self._lock.enter_context(locked_folder(self.out))
        try:
            self._runs = {(run.part, run.seed): run for run in on_first(self._open)}
        except BaseException:
            self._lock.close()
            raise
        self._others_froze = gc.get_freeze_count() > 0
        gc.freeze()  # a collection after each run then looks at the objects of that run alone
        return self

    def __exit__(self, *error: object) -> None:
        if not self._others_froze:  # it would undo what the caller has frozen
            gc.unfreeze()
        self._lock.close()

    @property
    def count(self) -> int:
        return len(self._runs)

    def gap(self, part: Part, seeds: int) -> Gap:
        """The gap of `part` against BF16 with each of the first `seeds` seeds."""
        pairs = [(self.run(part, seed), self.run(BF16, seed)) for seed in self.seeds(seeds)]
        for _, baseline in pairs:
            if math.isinf(baseline.loss):
                raise ConfigError(
                    f"the run in BF16 with seed {baseline.seed} diverged at step {len(baseline.losses)}: FP8 is not "
                    "the cause. Lower learning_rate, or choose another seed"
                )
        return Gap(tuple(run.loss / baseline.loss - 1 for run, baseline in pairs))

    def seeds(self, count: int) -> range:
        return range(self.config.seed, self.config.seed + count)

    def run(self, part: Part, seed: int) -> ShortRun:
        """The short run with `part` in FP8, made now unless it is remembered."""
        known = self._runs.get((part, seed))
        if known is not None:
            return known
        found = self._make(part, seed)
        self._runs[part, seed] = found
        if rank() == 0:
            self._append(found)
        self._on_run(found, self.count)
        return found

    def _make(self, part: Part, seed: int) -> ShortRun:
        began = time.perf_counter()
        trainer = self._prepare(self._settings(part, seed))
        with trainer.lock:
            linears = [layer for layer in select_linears(trainer.model, self.config.skip) if not layer.reason]
            modules: list[Any] = [layer.module for layer in linears]
            fp8 = [isinstance(m, RecipeLayer) and m.recipe.quantized for m in modules]
            names = [layer.name for layer in linears]
            losses = self._train(trainer)
        del trainer, linears, modules
        self._free()
        return ShortRun(
            part,
            seed,
            tuple(name for name, is_fp8 in zip(names, fp8, strict=True) if is_fp8),
            tuple(name for name, is_fp8 in zip(names, fp8, strict=True) if not is_fp8),
            losses,
            round(time.perf_counter() - began, 3),
        )

    def _settings(self, part: Part, seed: int) -> Config:
        if not part.gemms:
            return self.config.change(seed=seed, recipe="bf16", bf16_gemms=(), calibration="", only_if_faster=False)
        changes: dict[str, Any] = {"seed": seed, "bf16_gemms": tuple(name for name in GEMMS if name not in part.gemms)}
        if part.layers is not None:
            whole = self.run(self.whole, self.config.seed)
            others = [name for name in whole.converted if name not in part.layers]
            changes |= {"skip": (*self.config.skip, *others, *whole.skipped), "only_if_faster": False}
        return self.config.change(**changes)

    def _prepare(self, config: Config) -> Trainer:
        run = RunFolder(self.out if self.checkpoint is None else self.checkpoint.parent)
        if self._data is None:
            self._data = read_data(config, run, Console(quiet=True))
        trainer = prepare_run(config, run, ExitStack(), Console(quiet=True), data=self._data)
        if self.checkpoint is not None:
            load_into_other_recipe(self.checkpoint, trainer.state)
        return trainer

    def _train(self, trainer: Trainer) -> tuple[float, ...]:
        with cast_once(trainer.model):
            losses = [trainer.step()[0] for _ in range(self.steps)]
        found: list[float] = mean_of_ranks(torch.stack(losses)).tolist()
        diverged = next((at for at, loss in enumerate(found) if not math.isfinite(loss)), len(found) - 1)
        return tuple(loss if math.isfinite(loss) else math.inf for loss in found[: diverged + 1])

    def _free(self) -> None:
        """Give back the memory of a model, which holds references to itself, and the code that was compiled for it."""
        if self.config.compile.blocks:
            torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- The folder ------------------------------------------------------------------------------------------------

    def _open(self) -> list[ShortRun]:
        """The runs that the folder has, after a check that they are of these settings."""
        settings = {name: value for name, value in self.config.to_dict().items() if name != "out"}
        described = {"settings": settings, "steps": self.steps, "from": str(self.checkpoint or "")}
        path, log = self.out / "bisect.json", self.out / "runs.jsonl"
        if path.is_file():
            _check_same(read_json(path), described, self.out)
        elif self.out.exists() and any(self.out.iterdir()):
            raise FileExistsError(f"{self.out} is not empty and has no short runs: choose another --out")
        else:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(described, indent=1) + "\n")
            except OSError as error:
                raise write_error(self.out, error) from error
        lines = log.read_text().splitlines(keepends=True) if log.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):  # the last run was killed while it wrote
            log.write_text("".join(whole))
        return [_from_line(line, f"{log}, line {number}") for number, line in enumerate(whole, 1)]

    def _append(self, run: ShortRun) -> None:
        fields = asdict(run)
        fields |= fields.pop("part") | {"losses": [loss if math.isfinite(loss) else None for loss in run.losses]}
        try:
            with (self.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(fields) + "\n")
        except OSError as error:
            raise write_error(self.out, error) from error


def _from_line(line: str, where: str) -> ShortRun:
    try:
        fields = json.loads(line)
        layers, gemms = fields.pop("layers"), tuple(fields.pop("gemms"))
        part = Part(gemms, None if layers is None else tuple(layers))
        losses = tuple(math.inf if loss is None else float(loss) for loss in fields.pop("losses"))
        converted, skipped = (tuple(fields.pop(name)) for name in ("converted", "skipped"))
        return ShortRun(part, converted=converted, skipped=skipped, losses=losses, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{where} is damaged ({error}): remove that line, and the run is made again") from error


def _check_same(found: dict[str, Any], given: dict[str, Any], out: Path) -> None:
    before, now = (
        each.get("settings", {}) | {name: each.get(name) for name in ("steps", "from")} for each in (found, given)
    )
    for name, (there, here) in sorted(different_settings([before, now]).items()):
        raise ConfigError(
            f"{out} has short runs of other settings: {name} is {there!r} there and {here!r} here. Choose another --out"
        )
