"""octavo bisect: the GEMMs and the layers of an FP8 run that raise its loss over that of BF16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.display import print_table, say
from octavo_cli.options import AsJson, option

if TYPE_CHECKING:
    from octavo.bisection import Bisection
    from octavo.bisection.gap import Gap
    from octavo.bisection.search import Part
    from octavo.bisection.short_runs import ShortRun
    from octavo.train.config import Config


def bisect_command(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="The settings of the FP8 run: a TOML file, the config.json of a run, or a preset."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--from", metavar="CHECKPOINT", help="Start from a checkpoint, or from the newest of a run."),
    ] = None,
    seeds: Annotated[int, option("NUMBER", "Runs of each part, with seeds that follow --seed.")] = 3,
    run_steps: Annotated[int | None, option("NUMBER", "Steps of a short run. Default: --steps, 200 at most.")] = None,
    least: Annotated[float, option("PERCENT", "The smallest gap that is searched.")] = 0.05,
    out: Annotated[Path, option("FOLDER", "The folder that remembers the short runs.")] = Path("runs/bisect"),
    as_json: AsJson = False,
) -> None:
    """Find the layers and GEMMs that raise the loss in FP8.

    Short runs of the trainer with the same seeds and data have parts of the model in FP8 and the rest in BF16. A gap is
    the relative difference of the training loss, over the last quarter of the steps, from the run in BF16. It is
    resolved if it differs from 0 by more than its spread between seeds; a gap that is not resolved ends the search.

    Settings of octavo train can follow. Each short run is remembered: the same command continues after Ctrl-C, and more
    --seeds add to those that are there. Without CONFIG, --from takes the settings of the run. Without both, at least
    one setting must be given: a search of the default run takes long.

    Examples:

      octavo bisect small.toml --data book.txt --recipe tensorwise --run-steps 100

      octavo bisect --from runs/fp8 --seeds 4 --out runs/why
    """
    from octavo.train.processes import run_in_group  # imports torch.distributed, which takes a second

    words = list(context.args)
    if config is not None and str(config).startswith("--"):  # click takes the first unknown option for the argument
        words, config = [str(config), *words], None
    run_in_group(lambda: _bisect(config, checkpoint, words, seeds, run_steps, least / 100, out, as_json))


def _bisect(
    path: Path | None,
    checkpoint: Path | None,
    words: list[str],
    seeds: int,
    run_steps: int | None,
    least: float,
    out: Path,
    as_json: bool,
) -> None:
    from octavo.bisection import bisect
    from octavo.bisection.pipeline import find_checkpoint
    from octavo.train.ranks import rank

    start = None if checkpoint is None else find_checkpoint(checkpoint)
    try:
        config = _settings(path, start, words)
        found = bisect(config, out, seeds=seeds, steps=run_steps, least=least, checkpoint=start, on_run=_print_run)
    except KeyboardInterrupt:
        say(f"interrupted: the short runs that ended are in {out}; the same command continues", error=True)
        raise typer.Exit(130) from None
    if rank() > 0:
        return
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    _print_trials(found)
    for line in _verdict(found, seeds, least):
        say(line)


def _settings(path: Path | None, checkpoint: Path | None, words: list[str]) -> Config:
    from octavo.artifact.run import RunFolder
    from octavo.train.config import Config, ConfigError
    from octavo.train.run_settings import read_settings

    if path is None and checkpoint is not None:
        return read_settings(RunFolder(checkpoint.parent)).replace(words)
    if path is None and not words:
        raise ConfigError(
            "octavo bisect needs the FP8 run to search, and none is given: give its settings as CONFIG, --from a run, "
            "or settings of octavo train (octavo bisect small.toml --data book.txt)"
        )
    return Config.load(path, words)


def _print_run(run: ShortRun, count: int) -> None:
    """One line on standard error for each short run that ends."""
    from octavo.train.ranks import rank

    if rank() == 0:
        what = f"{_gemms(run.part)} in FP8, {len(run.converted)} layers" if run.part.gemms else "BF16"
        say(f"short run {count}: {what}, seed {run.seed}: loss {run.loss:.4f}, {run.seconds:.1f} s", error=True)


def _print_trials(found: Bisection) -> None:
    whole = found.finding.whole.gap
    rows = [
        (
            _gemms(trial.part),
            _layers(trial.part, found.layers),
            f"{trial.gap.mean:+.2%}",
            f"{trial.half_width:.2%}",
            f"{trial.gap.share_of(whole):.0%}" if whole.mean else "",
            "" if trial.resolved else "within the noise",
        )
        for trial in found.finding.trials
    ]
    columns = ("in FP8", "layers", "gap", "+-", "share", "")
    print_table(columns, rows, right=("gap", "+-", "share"), prose=("layers",), title="short runs against BF16")
    say(f"The losses of BF16 with other seeds differ by {found.spread:.2%} (standard deviation).")


def _verdict(found: Bisection, seeds: int, least: float) -> list[str]:
    finding, gap = found.finding, found.finding.whole.gap
    size = f"{gap.mean:+.2%} +- {gap.half_width:.2%} after {found.steps} steps with {seeds} seeds"
    if finding.verdict == "unresolved":
        if gap.seeds_needed is None:
            return [f"No gap can be resolved: {size}. FP8 and BF16 have the same losses."]
        return [f"No gap can be resolved: {size}.", _advice(gap, least)]
    if finding.verdict == "small":
        return [f"The gap is smaller than --least: {size}. There is nothing to find."]
    if finding.verdict == "lower":
        return [f"FP8 has the lower loss: {size}. There is nothing to find."]
    lines = [f"FP8 raises the loss: {size}.", f"GEMM: {_words(finding.gemms)}"]
    for trial in finding.layers:
        lines.append(f"layers: {_layers(trial.part, found.layers)}, {trial.gap.share_of(gap):.0%} of the gap")
    return [*lines, *_remedies(found)]


def _advice(gap: Gap, least: float) -> str:
    """The way to resolve a gap, for one that is not resolved."""
    if gap.mean < least:
        return (
            "It is smaller than --least, so more seeds find nothing; longer runs (--run-steps) may show a larger gap."
        )
    return (
        f"About --seeds {gap.seeds_needed} would resolve a gap of this size; longer runs (--run-steps) may show a "
        "larger one."
    )


def _remedies(found: Bisection) -> list[str]:
    """The settings that keep the causes in BF16, and the gap that is left with them."""
    from octavo.bisection.search import Part

    finding, gemms = found.finding, found.finding.whole.part.gemms
    gaps = {trial.part: f"{trial.gap.mean:+.2%} +- {trial.half_width:.2%}" for trial in finding.trials}
    others = tuple(name for name in gemms if name not in finding.gemms)
    rest = tuple(name for name in found.layers if name not in found.causes)
    lines = []
    if others:
        keeps = f"--bf16-gemms {' '.join(finding.gemms)} keeps {_words(finding.gemms)} in BF16 in all layers"
        lines.append(f"{keeps}: {gaps[Part(others)]}")
    if rest:
        lines.append(f"--skip {' '.join(found.causes)} keeps these layers in BF16: {gaps[Part(gemms, rest)]}")
    return lines


def _gemms(part: Part) -> str:
    return ", ".join(part.gemms)


def _words(names: tuple[str, ...]) -> str:
    return " and ".join(names)


def _layers(part: Part, every: tuple[str, ...]) -> str:
    """The layers of a part: one by its name, several by the first and the last, and their number."""
    layers = every if part.layers is None else part.layers
    if len(layers) == len(every):
        return f"all {len(every)}"
    if len(layers) < 3:
        return ", ".join(layers)
    return f"{len(layers)}: {layers[0]} to {layers[-1]}"
