"""The records of runs, and the verdict on the losses of two groups of runs, within a margin.

Runs are paired where they have the same seed and the same branch: they see the same batches. The loss of a run is the
mean of its last three evaluations, and the gap of a pair the relative difference of its losses. For n pairs with the
mean gap d and the standard deviation s, the interval is

    d +- t(n - 1, 1 - alpha_n / 2) * s / sqrt(n),    alpha_n = 5 % * 2 / (n (n - 1)),    n >= 3

One may look after every added pair, and stop as one likes. The alpha_n of all n from 3 on sum to 5 %. So by the union
bound the intervals of all looks together hold the true gap with 95 % probability: the 5 % are spent over the looks (Lan
and DeMets, Biometrika 70, 1983). This takes the gaps of the pairs to be independent and normal, as Student's t does.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import ArtifactError, ShardReader, read_json, whole_lines
from octavo.checkpoint.folder import RunFolder, weights_stem
from octavo.evaluation.metrics import student_quantile
from octavo.train.config import flatten
from octavo.util import check_kinds, parse_object

# ---- Reading the metrics.jsonl of runs (`octavo.train.step_metrics` writes that file).


# The numbers of a record. null stands for inf and NaN.
SERIES = (
    "loss", "evaluation_loss", "tokens_per_second", "peak_memory", "gradient_norm", "learning_rate", "mfu",
    "loss_scale",
)  # fmt: skip
# What stands wherever the losses of single runs are compared.
ONE_SEED = "one seed: cannot tell. Two seeds of one recipe differ too: octavo bisect compares several."


@dataclass(frozen=True)
class RunRecord:
    """The settings and the measurements of a run, read from its files."""

    path: Path
    settings: dict[str, Any]  # of its config.json
    evaluations: dict[int, float]  # step to evaluation loss
    tokens_per_second: float | None  # the median over the log records; None without one
    peak_memory: int | None  # bytes
    step: int  # the last that was logged


def read_run(path: Path) -> RunRecord:
    """Read what the run in the folder `path` logged."""
    run = RunFolder(path)
    run.check()
    records = read_records(run.metrics)
    speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second") is not None]
    memory = [r["peak_memory"] for r in records if r.get("peak_memory") is not None]
    return RunRecord(
        path,
        read_json(run.config),
        {r["step"]: r["evaluation_loss"] for r in records if r.get("evaluation_loss") is not None},
        statistics.median(speeds) if speeds else None,
        max(memory) if memory else None,
        max((r["step"] for r in records), default=0),
    )


def names_of_runs(paths: Sequence[Path]) -> list[str]:
    """The name of each folder, or its whole path where another has the same name."""
    names = [path.resolve().name for path in paths]
    return [name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def different_settings(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which runs differ, other than their folders: name to the value of each run."""
    settings = [flatten(each, ("recipe",)) for each in of_runs]
    if all(isinstance(each.get("recipe"), Mapping) for each in settings):
        settings = [each | _leaves("recipe", each.pop("recipe")) for each in settings]
    elif any("recipe" in each for each in settings):  # a preset is its name alone
        settings = [each | {"recipe": recipe_name(each)} for each in settings]
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names if name not in ("out", "derived")}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """`value` by its name, or if it is a mapping, all that it holds by names such as recipe.y.x.format."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {path: leaf for key, entry in value.items() for path, leaf in _leaves(f"{name}.{key}", entry).items()}


def recipe_name(settings: Mapping[str, Any]) -> str:
    """The name of a run's recipe, which its settings hold as a name or as fields; "" if they have none."""
    recipe = settings.get("recipe", "")
    return str(recipe["name"] if isinstance(recipe, Mapping) else recipe)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl. A last line that is being written, or was cut short, is left out."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: the run has logged nothing")
    return [read_record(line, f"{path}, line {number}") for number, line in enumerate(whole_lines(path), 1)]


def read_record(line: str | bytes, where: str) -> dict[str, Any]:
    """The record of a line. An ArtifactError, which begins with `where`, if it holds none."""
    record = parse_object(line, where, ArtifactError)
    check_record(record, where)
    return record


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, unless a record has a step, and its `SERIES` are numbers."""
    kinds = {"step": int} | {key: float | None for key in SERIES if key in record}
    check_kinds(record, kinds, f"{where}: ", ArtifactError)


# ---- Deciding between groups of runs.


LAST = 3  # evaluations at the end of a run
FEWEST, MOST = 3, 100  # pairs: of an interval, and that are worth asking for
OUTSIDE = 0.05
_OF_A_PAIR = ("seed", "branch")  # settings in which the runs of a group differ, and those of a pair do not
_OF_NO_GROUP = (*_OF_A_PAIR, "out", "derived")


@dataclass(frozen=True)
class Group:
    """Runs with the same settings but the seed and the branch, by these two."""

    name: str
    twin: bool
    runs: dict[tuple[Any, ...], RunRecord]


@dataclass(frozen=True)
class Decision:
    """The verdict of the gaps of pairs about a margin; all are relative."""

    gaps: list[float]
    mean: float
    half_width: float | None  # of the interval around the mean; None below three pairs
    verdict: str  # "within", "worse", "better", or "undecided"
    more: int | None  # pairs like these that would decide; None if more than 100 would, or if nothing is undecided


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """The groups of runs, in the order of their first run, named by recipe, or folder where two have one."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = flatten(run.settings, ("recipe",))
        own = sorted((name, value) for name, value in settings.items() if value and name not in _OF_NO_GROUP)
        found.setdefault(repr(own), []).append(run)  # older runs lack settings that are empty in newer ones
    firsts = [group[0] for group in found.values()]
    names = ["twin" if run.settings.get("disturb") else recipe_name(run.settings) for run in firsts]
    groups = []
    for name, members in zip(names, found.values(), strict=True):
        pairs = {tuple(run.settings.get(key) for key in _OF_A_PAIR): run for run in members}
        if len(pairs) < len(members):
            raise ValueError(
                f"the runs {', '.join(str(run.path) for run in members)} have the same settings; two of them the same "
                "seed and branch too, and one would be counted twice: leave it out"
            )
        unique = name if names.count(name) == 1 else members[0].path.resolve().name
        groups.append(Group(unique, bool(members[0].settings.get("disturb")), pairs))
    return groups


def gaps_of(group: Group, base: Group) -> list[float]:
    """The gaps of the pairs of a group with the first group, in the order of the latter's runs."""
    shared = [key for key in base.runs if key in group.runs]
    if not shared:
        raise ValueError(
            f"no run of {group.name} has the seed and the branch of a run of {base.name}, so nothing can be paired: "
            "train both with the same --seed, or --branch from the same checkpoint"
        )
    return [_loss(group.runs[key], base.runs[key]) / _loss(base.runs[key], base.runs[key]) - 1 for key in shared]


def _loss(run: RunRecord, base: RunRecord) -> float:
    """The mean loss of a run at the last evaluations of `base`."""
    steps = sorted(base.evaluations)[-LAST:]
    missing = [step for step in steps if step not in run.evaluations]
    if missing or not steps:
        step = missing[0] if missing else base.step
        raise ValueError(
            f"{run.path} must have a finite evaluation loss at step {step}, near the end of {base.path}, and has none: "
            "let both runs end, or leave them out; a run that diverged is worse"
        )
    return statistics.fmean(run.evaluations[step] for step in steps)


def decide(gaps: Sequence[float], margin: float) -> Decision:
    """Judge the gaps of pairs by `margin`, relative (0.0025 for 0.25 %)."""
    count, mean = len(gaps), statistics.fmean(gaps)
    spread = statistics.stdev(gaps) if count > 1 else math.inf
    half = half_width(count, spread) if count >= FEWEST else math.inf
    if abs(mean) + half <= margin:
        verdict = "within"
    elif abs(mean) - half >= margin:
        verdict = "worse" if mean > 0 else "better"
    else:
        verdict = "undecided"
    more = None
    if verdict == "undecided":
        away = abs(abs(mean) - margin)
        enough = (n - count for n in range(max(FEWEST, count + 1), MOST) if half_width(n, spread) <= away)
        more = FEWEST - count if count < 2 else next(enough, None)
    return Decision(list(gaps), mean, None if math.isinf(half) else half, verdict, more)


def half_width(count: int, spread: float) -> float:
    """Half of the interval of the mean of `count` gaps with the standard deviation `spread`, after any looks."""
    alpha = OUTSIDE * 2 / (count * (count - 1))
    return student_quantile(count - 1, alpha) * spread / math.sqrt(count)


# --- Where the runs stand on their curve -------------------------------------------------------------------------


def slope_of(group: Group) -> float | None:
    """The mean relative fall of the loss in a step at the end of the runs; None below two evaluations."""
    falls = []
    for run in group.runs.values():
        steps = sorted(run.evaluations)[-LAST:]
        if len(steps) > 1:
            first, last = (run.evaluations[step] for step in (steps[0], steps[-1]))
            falls.append((first - last) / last / (steps[-1] - steps[0]))
    return statistics.fmean(falls) if falls else None


def tokens_per_parameter(run: RunRecord) -> float | None:
    """The tokens that a run and its trunk have read for each weight that it trains; None without a checkpoint."""
    folders = RunFolder(run.path).checkpoints()
    if not folders:
        return None
    specs = ShardReader(folders[-1], weights_stem(folders[-1])).specs.values()
    read = math.prod(int(run.settings[name]) for name in ("batch", "accumulate", "context")) * run.step
    return read / sum(math.prod(spec.shape) for spec in specs)
