"""`bisect`: which GEMMs and which layers of an FP8 run raise its loss over that of BF16.

settings -> short runs in BF16 and in FP8, with several seeds -> is the gap resolved?
         -> short runs with parts in FP8 (`octavo.bisection.search`) -> GEMMs, layers, and what remains without them
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.artifact.run import RunFolder
from octavo.bisection.search import Finding, Part, Search, Trial
from octavo.bisection.short_runs import BF16, ShortRun, ShortRuns
from octavo.recipe import GEMMS
from octavo.train.config import Config, ConfigError
from octavo.train.model import chosen_recipe
from octavo.train.processes import own_device
from octavo.train.start import settle

LEAST = 0.0005
STEPS = 200  # of a short run, at most, unless they are given


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`.

    Attributes:
        finding: the gap and its causes.
        layers: the names of all layers that the recipe converts.
        losses: of the runs in BF16, by seed.
        steps: of each short run.
        runs: the short runs that the folder has.
    """

    finding: Finding
    layers: tuple[str, ...]
    losses: tuple[float, ...]
    steps: int
    runs: int

    @property
    def spread(self) -> float:
        """The relative standard deviation of the losses of BF16 between seeds."""
        return statistics.stdev(self.losses) / statistics.fmean(self.losses)

    @property
    def causes(self) -> list[str]:
        """The names of the layers that cause the gap."""
        return [name for trial in self.finding.layers for name in trial.part.layers or self.layers]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        found = self.finding
        return {
            "verdict": found.verdict,
            "gap": found.whole.gap.to_dict(),
            "seeds_needed": found.whole.gap.seeds_needed,
            "gemms": list(found.gemms),
            "layers": [self._trial(trial) for trial in found.layers],
            "trials": [self._trial(trial) for trial in found.trials],
            "bf16_losses": list(self.losses),
            "bf16_spread": self.spread,
            "steps": self.steps,
            "runs": self.runs,
        }

    def _trial(self, trial: Trial) -> dict[str, Any]:
        whole = self.finding.whole.gap
        return {
            "gemms": list(trial.part.gemms),
            "layers": list(self.layers if trial.part.layers is None else trial.part.layers),
            "gap": trial.gap.to_dict() | {"half_width": trial.half_width, "resolved": trial.resolved},
            "share": trial.gap.share_of(whole) if whole.mean else None,
        }


def bisect(
    config: Config,
    out: str | Path,
    *,
    seeds: int = 3,
    steps: int | None = None,
    least: float = LEAST,
    checkpoint: Path | None = None,
    on_run: Callable[[ShortRun, int], None] = lambda run, count: None,
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
        raise ConfigError(f"the smallest gap (--least) must be 0 or more; got {least}")
    gemms = _quantized_gemms(config)
    if not gemms:
        raise ConfigError(f"the recipe {config.recipe} runs no GEMM in FP8: there is no gap to bisect")
    with ShortRuns(settle(config), Path(out), length, checkpoint, Part(gemms), on_run) as runs:
        whole = runs.run(Part(gemms), config.seed)
        finding = Search(lambda part: runs.gap(part, seeds), gemms, whole.converted, least).run()
        losses = tuple(runs.run(BF16, seed).loss for seed in runs.seeds(seeds))
        return Bisection(finding, whole.converted, losses, length, runs.count)


def _quantized_gemms(config: Config) -> tuple[str, ...]:
    recipe = chosen_recipe(config, own_device(config.device))
    return tuple(name for name in GEMMS if getattr(recipe, name) is not None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint `path`, or the newest of the run in the folder `path`. An ArtifactError if none is there."""
    return (path if (path / "train.json").is_file() else RunFolder(path).newest()).resolve()
