"""octavo train, bisect, compare and report: runs of training."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.util import Table, number, plural
from octavo_cli.display import check_output, print_facts, print_rows, print_table, progress, say, write_output
from octavo_cli.shared import MODEL_PRESETS, AsJson, argument, option, settings_after

if TYPE_CHECKING:
    from octavo.bisection import Bisection, Part, ShortRun, Trial
    from octavo.train.config import Config
    from octavo.train.run_records import Decision, RunData


def train_command(
    context: typer.Context,
    config: Annotated[
        Path | None,
        argument(
            "CONFIG", f"A TOML file of settings, the config.json of a run, or a preset: {', '.join(MODEL_PRESETS)}."
        ),
    ] = None,
    resume_from: Annotated[Path | None, option("--resume RUN", "Continue a run at its newest checkpoint.")] = None,
    or_resume: Annotated[bool, option("--or-resume", "Continue the run in --out, if its settings are these.")] = False,
    settings: Annotated[bool, option("--settings", "List every setting and its default, and exit.")] = False,
) -> None:
    """Train or fine-tune a language model in BF16 or FP8.

    The model is a Llama, mixture or GPT-2 of Octavo, or a Hugging Face model from a local folder. torchrun divides the
    work among several GPUs.

    Every setting is a --key value on the command line or a line of the TOML file: octavo train --settings lists them. A
    setting that is not given may follow from others, as the warmup from the number of steps. The most used settings:
    --data PATH ..., --recipe rowwise|bf16|FILE.json, --steps N, --batch N, --context N, --width N, --layers N, --device
    auto|cpu|cuda, --out FOLDER.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) finish the step, write a checkpoint and exit. --resume
    FOLDER continues the run bit for bit. With --or-resume the same command begins a run and later continues it.
    --branch begins a run of its own at a checkpoint, with the settings of that checkpoint's run.

    Examples:

      octavo train --steps 200 --out runs/first
      octavo train --data 'books/*.txt' --recipe bf16 --tokenizer bpe
      octavo train --resume runs/first --steps 400
      octavo train --branch runs/first/step-00000300 --recipe bf16 --out runs/second
      torchrun --nproc-per-node 8 -m octavo train llama-3-8b --data books --out runs/8b
    """
    with progress("starting"):
        from octavo.train.config import RULES, TYPE_NAMES, Config, ConfigError, settings_of  # with PyTorch: seconds

    if settings:
        rows = [
            (f"--{name.replace('_', '-')}", TYPE_NAMES[each.kind], default, each.help)
            for name, each in settings_of(Config).items()
            for default in [RULES[name].words if each.default is None else str(each.default)]
        ]
        print_table(Table("", ("setting", "type", "default", "meaning"), rows, prose=("meaning",)))
        return
    config, overrides = settings_after(config, context)
    if resume_from and config:
        raise ConfigError(f"a resumed run has its settings: change some with --key value, and leave {config} out")
    if resume_from and or_resume:
        raise ConfigError("--resume continues the run of a folder, --or-resume that in --out: leave one of them out")
    with progress("starting"):
        import_module("octavo.train.trainer")  # with PyTorch's compiler, which takes seconds
    from octavo.train.processes import run_in_group

    run_in_group(lambda: _train(config, resume_from, or_resume, overrides))


def _train(path: Path | None, resume_from: Path | None, or_resume: bool, overrides: list[str]) -> None:
    from octavo.train.processes import print_line, same_outcome, training_console, world_size
    from octavo.train.settings import load_config
    from octavo.train.trainer import branch_settings, resume_run, start_or_resume

    console = training_console()
    with console.bar:
        if resume_from:
            trainer = resume_run(resume_from, overrides, console)
        else:
            with same_outcome():
                config = load_config(path, overrides)
                if config.branch and path is None:
                    config = branch_settings(Path(config.branch), overrides)
            trainer = start_or_resume(config, console, asked=or_resume)
        result = trainer.run()
    run = trainer.run_folder.path
    if result.interrupted:
        octavo = "octavo" if world_size() == 1 else "torchrun ... -m octavo"  # its options are not known here
        message = f"{result.interrupted}: saved step {result.step}; continue with: {octavo} train --resume {run}"
    else:
        message = f"done: {plural(result.step, 'step')} in {run}"
    print_line(console, message)


def bisect_command(
    context: typer.Context,
    config: Annotated[
        Path | None,
        argument("CONFIG", "The settings of the FP8 run: a TOML file, the config.json of a run, or a preset."),
    ] = None,
    checkpoint: Annotated[Path | None, option("--from CHECKPOINT", "A checkpoint to start from, or a run.")] = None,
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
    from octavo.train.processes import rank, run_in_group  # imports torch.distributed, which takes a second

    path, words = settings_after(config, context)

    def search() -> None:
        from octavo.bisection import bisect, find_checkpoint

        start = None if checkpoint is None else find_checkpoint(checkpoint)
        whole, smallest = _settings(path, start, words), least / 100
        try:
            with progress("starting") as advance:
                found = bisect(
                    whole, out, seeds=seeds, steps=run_steps, least=smallest, checkpoint=start, on_run=_print_run,
                    progress=advance,
                )  # fmt: skip
        except KeyboardInterrupt:
            say(f"interrupted: the short runs that ended are in {out}; the same command continues", error=True)
            raise typer.Exit(130) from None
        if rank() == 0 and as_json:
            print(json.dumps(found.to_dict(), indent=2))
        elif rank() == 0:
            _print_trials(found)
            for line in _verdict(found, seeds, smallest):
                say(line)

    run_in_group(search)


def _settings(path: Path | None, checkpoint: Path | None, words: list[str]) -> Config:
    from octavo.checkpoint.folder import RunFolder
    from octavo.train.config import ConfigError
    from octavo.train.settings import load_config, parse, read_settings

    if path is None and checkpoint is not None:
        return read_settings(RunFolder(checkpoint.parent)).change(**parse(words))
    if path is None and not words:
        raise ConfigError(
            "octavo bisect needs the FP8 run to search, and none is given: give its settings as CONFIG, --from a run, "
            "or settings of octavo train (octavo bisect small.toml --data book.txt)"
        )
    return load_config(path, words)


def _print_run(run: ShortRun, count: int) -> None:
    from octavo.train.processes import rank

    if rank() == 0:
        what = f"{', '.join(run.part.gemms)} in FP8, {len(run.converted)} layers" if run.part.gemms else "BF16"
        say(f"short run {count}: {what}, seed {run.seed}: loss {run.loss:.4f}, {run.seconds:.1f} s", error=True)


def _print_trials(found: Bisection) -> None:
    rows = [
        {
            "in FP8": ", ".join(trial.part.gemms), "layers": _layers(trial.part, found.layers),
            "gap": f"{trial.mean:+.2%}", "+-": f"{trial.half_width:.2%}",
            "share": f"{trial.share_of(found.whole):.0%}" if found.whole.mean else "",
            "": "" if trial.resolved else "within the noise",
        }
        for trial in found.trials
    ]  # fmt: skip
    print_rows(rows, prose=("layers",), title="short runs against BF16")
    say(f"The losses of BF16 with other seeds differ by {found.spread:.2%} (standard deviation).")


def _verdict(found: Bisection, seeds: int, least: float) -> list[str]:
    gap = found.whole
    size = f"{gap.mean:+.2%} +- {gap.half_width:.2%} after {found.steps} steps with {seeds} seeds"
    if found.verdict == "unresolved":
        if gap.seeds_needed is None:
            return [f"No gap can be resolved: {size}. FP8 and BF16 have the same losses."]
        return [f"No gap can be resolved: {size}.", _advice(gap, least)]
    if found.verdict == "small":
        return [f"The gap is smaller than --least: {size}. There is nothing to find."]
    if found.verdict == "lower":
        return [f"FP8 has the lower loss: {size}. There is nothing to find."]
    lines = [f"FP8 raises the loss: {size}.", f"GEMM: {' and '.join(found.gemms)}"]
    for trial in found.groups:
        lines.append(f"layers: {_layers(trial.part, found.layers)}, {trial.share_of(gap):.0%} of the gap")
    return [*lines, *_remedies(found)]


def _advice(gap: Trial, least: float) -> str:
    """The way to resolve a gap, for one that is not resolved."""
    longer = "longer runs (--run-steps) may show a larger one."
    if gap.mean < least:
        return f"It is smaller than --least, so more seeds find nothing; {longer}"
    return f"About --seeds {gap.seeds_needed} would resolve a gap of this size; {longer}"


def _remedies(found: Bisection) -> list[str]:
    from octavo.bisection import Part

    gemms = found.whole.part.gemms
    gaps = {trial.part: f"{trial.mean:+.2%} +- {trial.half_width:.2%}" for trial in found.trials}
    others = tuple(name for name in gemms if name not in found.gemms)
    rest = tuple(name for name in found.layers if name not in found.causes)
    lines = []
    if others:
        keeps = f"--bf16-gemms {' '.join(found.gemms)} keeps {' and '.join(found.gemms)} in BF16 in all layers"
        lines.append(f"{keeps}: {gaps[Part(others)]}")
    if rest:
        lines.append(f"--skip {' '.join(found.causes)} keeps these layers in BF16: {gaps[Part(gemms, rest)]}")
    return lines


def _layers(part: Part, every: tuple[str, ...]) -> str:
    """The layers of a part: one by its name, several by the first and the last, and their number."""
    layers = every if part.layers is None else part.layers
    if len(layers) == len(every):
        return f"all {len(every)}"
    if len(layers) < 3:
        return ", ".join(layers)
    return f"{len(layers)}: {layers[0]} to {layers[-1]}"


def compare_command(
    runs: Annotated[list[Path], argument("RUN...", "Two or more runs of octavo train.")],
    margin: Annotated[str | None, option("--decide PERCENT", "Decide if losses are the same within 0.25%.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: losses by step, gaps, speed and memory.

    A gap is the relative difference between the evaluation losses of a run and of the first run. The runs may still be
    in progress.

    With --decide, runs with the same settings but the seed are a group. The first group is compared with each other
    group, in pairs of one seed and one branch. The interval holds however often one looks.

    Examples:

      octavo compare runs/bf16 runs/rowwise
      octavo compare runs/bf16-* runs/rowwise-* runs/twin-* --decide 0.25%
    """
    from octavo.train.run_records import ONE_SEED, different_settings, read_runs

    if len(runs) < 2:
        raise ValueError(f"compare takes two or more runs, got {len(runs)}")
    records = read_runs(runs)
    if margin is not None:
        _decide(records, margin, as_json)
        return
    different = different_settings([run.settings for run in records])
    summaries = [_summary(run, records[0]) for run in records]
    remark = ONE_SEED if any(each["gaps"] for each in summaries) else None
    if as_json:
        found = {"runs": summaries, "remark": remark, "different_settings": different}
        print(json.dumps(found, indent=2))
        return
    _print_runs(summaries, records)
    if remark:
        say(remark)
    for name, values in different.items():
        say(f"{name.replace('_', '-')}: {', '.join(_text(value) for value in values)}")


def _decide(records: list[RunData], margin: str, as_json: bool) -> None:
    from octavo.train.run_records import decide, gaps_of, group_runs, slope_of, tokens_per_parameter

    share = re.fullmatch(r"(\d*\.?\d+)%", margin)
    if not share or not 0 < float(share[1]) < 100:
        raise ValueError(f"--decide takes a percentage between 0% and 100%, such as 0.25%; got {margin!r}")
    allowed = float(share[1]) / 100
    base, *others = group_runs(records)
    if not others:
        raise ValueError(f"--decide compares groups of runs with different settings; all runs are of {base.name}")
    slope, each = slope_of(base), tokens_per_parameter(records[0])
    found = {group.name: decide(gaps_of(group, base), allowed) for group in others}
    if as_json:
        groups = {name: asdict(decision) for name, decision in found.items()}
        curve = {"slope": slope, "tokens_per_parameter": each}
        print(json.dumps({"base": base.name, "margin": allowed, **curve, "groups": groups}, indent=2))
        return
    rows = [
        {
            "group": name, "pairs": str(len(decision.gaps)), f"gap to {base.name}": f"{decision.mean:+.3%}",
            "+-": number(decision.half_width, ".3%"),
            "in steps": number(decision.mean / slope if slope else None, "+.1f"), "verdict": _decided(decision, margin),
        }
        for name, decision in found.items()
    ]  # fmt: skip
    print_rows(rows)
    at_the_end = "unknown" if slope is None else f"{slope:.4%} a step"
    say(f"slope of {base.name} at the end: {at_the_end}; {number(each, '.3g') or 'unknown'} tokens a parameter")
    if not any(group.twin for group in others):
        say("no twin: a branch of the first group with --disturb 0.002 shows what chance alone does")


def _decided(decision: Decision, margin: str) -> str:
    least = abs(decision.mean) - (decision.half_width or 0)
    if decision.verdict == "within":
        return f"within {margin}"
    if decision.verdict != "undecided":
        return f"{decision.verdict} by at least {least:.3%}"
    more = "" if decision.more is None else f"{plural(decision.more, 'more pair')} like these, or "
    return f"cannot decide: {more}a longer run"


def _print_runs(summaries: list[dict[str, Any]], runs: list[RunData]) -> None:
    names = [run.name for run in runs]
    gaps = ["gap"] if len(names) == 2 else [f"gap of {name}" for name in names[1:]]
    rows = []
    for step in sorted({step for each in summaries for step in each["evaluations"]}, key=int):
        losses = {name: number(s["evaluations"].get(step), ".4f") for name, s in zip(names, summaries, strict=True)}
        relative = {gap: number(s["gaps"].get(step), "+.2%") for gap, s in zip(gaps, summaries[1:], strict=True)}
        rows.append({"step": step, **losses, **relative})
    print_rows(rows, title="evaluation loss")
    say()
    rows = [
        {
            "run": run.name, "steps": str(s["steps"]), "final loss": run.last("evaluation_loss"),
            "gap": number(s["gaps"].get(max(s["evaluations"], key=int)) if s["final_loss"] else None, "+.2%"),
            "tokens/s": number(s["tokens_per_second"], ",.0f"), "peak memory, GB": number(s["peak_memory"], ".2f", 1e9),
        }
        for run, s in zip(runs, summaries, strict=True)
    ]  # fmt: skip
    print_rows(rows)


def _summary(run: RunData, first: RunData) -> dict[str, Any]:
    """Losses by step, and gaps: the loss relative to that of `first`, minus 1, where both have one."""
    before = {} if run is first else first.evaluations
    return {
        "run": str(run.path),
        "steps": run.last_step,
        "evaluations": {str(step): loss for step, loss in run.evaluations.items()},
        "gaps": {str(s): loss / before[s] - 1 for s, loss in run.evaluations.items() if loss and before.get(s)},
        "final_loss": run.last_number("evaluation_loss"),
        "tokens_per_second": run.tokens_per_second,
        "peak_memory": run.peak_memory,
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


_EVENTS = 8
_LINES = (("loss", "loss"), ("evaluation_loss", "evaluation loss"), ("tokens_per_second", "tokens/s"))


def report_command(
    runs: Annotated[list[Path], argument("RUN...", "Runs of octavo train, or folders of octavo.watch.")],
    to_html: Annotated[Path | None, option("--html FILE", "The page. Default: report.html in the first run.")] = None,
    as_json: Annotated[bool, option("--json", "Print JSON, and write no page unless --html is given.")] = False,
) -> None:
    """Show loss, speed, memory, and what FP8 did in each layer.

    The command writes one HTML page that opens offline, and prints a summary. The runs may still be in progress.
    A run that was not watched, or that another library trained, has its loss, speed and memory only.

    Examples:

      octavo report runs/rowwise
      octavo report runs/rowwise runs/bf16 --html report.html
    """
    from octavo.report.training_page import page_of_runs, to_dict
    from octavo.train.run_records import ONE_SEED, read_runs

    page = to_html if to_html is not None or as_json else runs[0] / "report.html"
    found = read_runs(runs)
    check_output(page, "--html", "a page")
    if page is not None:
        write_output(page, page_of_runs(found).html())
    if as_json:
        print(json.dumps([to_dict(run) for run in found], indent=1, allow_nan=False))
        return
    for run in found:
        _print(run)
    if len(found) > 1:
        say(ONE_SEED)
    say(f"the page: {page}")


def _print(run: RunData) -> None:
    from octavo.report.training_page import run_facts, sparkline, worst_layers

    say(run.name, "bold")
    print_facts(list(run_facts(run).items()))
    if lines := [(name, sparkline([*run.series[key].values()])) for key, name in _LINES if key in run.series]:
        print_table(Table("", ("", "over the steps"), lines))
    worst = worst_layers(run.watched) if run.watched is not None else []
    if worst:
        print_table(Table("", ("worst layers", "layer", "operand", "worst", "over the steps"), worst))
    events = run.watched.events if run.watched is not None else []
    if len(events) > _EVENTS:
        say(f"the first of each kind of {len(events)} events:")
        firsts = {(event.rule, event.operand): event for event in reversed(events)}
        events = sorted(firsts.values(), key=lambda event: event.step)
    for event in events:
        action = "undone: the run went back" if event.undone else event.action
        action = f" ({action})" if action else ""
        say(f"step {event.step}: {event.describe()}{action}", "yellow")
    for remark in run.remarks:
        say(remark)
    say()
