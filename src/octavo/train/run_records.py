"""The records of runs, and the verdict on the losses of two groups of runs, within a margin.

A folder is a run if it holds one of these:

    metrics.jsonl         of `octavo train`, or of any loop: one object a line, with `step` and any of `SERIES`
    watch/                of `octavo.watch`
    trainer_state.json    of the Trainer of Hugging Face, also in checkpoint-N/

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import ArtifactError, ShardReader, read_json, whole_lines
from octavo.checkpoint.folder import RunFolder, refuse_checkpoint, weights_stem
from octavo.evaluation.metrics import student_quantile
from octavo.train.config import flatten
from octavo.util import check_kinds, number, parse_object, plural
from octavo.watching.storage import Watched, read_watch, watch_folder

# ---- Reading the metrics.jsonl of runs (`octavo.train.step_metrics` writes that file).


# The numbers of a record. null stands for inf and NaN.
SERIES = (
    "loss", "evaluation_loss", "tokens_per_second", "peak_memory", "gradient_norm", "learning_rate", "mfu",
    "loss_scale", "tokens",
)  # fmt: skip
# What stands wherever the losses of single runs are compared.
ONE_SEED = "one seed: cannot tell. Two seeds of one recipe differ too. --decide tells, from several runs."


def different_settings(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which runs differ, but for their folders: name to the value of each run; {} if one has none."""
    in_fields = all(isinstance(each.get("recipe"), Mapping) for each in of_runs)
    settings = [flatten(each, () if in_fields else ("recipe",)) for each in of_runs]
    if not in_fields and any("recipe" in each for each in settings):  # a preset is its name alone
        settings = [each | {"recipe": recipe_name(each)} for each in settings]
    names = dict.fromkeys(name for each in settings for name in each) if all(of_runs) else {}
    values = {name: [each.get(name) for each in settings] for name in names if name not in ("out", "derived")}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def recipe_name(settings: Mapping[str, Any]) -> str:
    """The name of a run's recipe, which its settings hold as a name or as fields; "" if they have none."""
    recipe = settings.get("recipe", "")
    return str(recipe["name"] if isinstance(recipe, Mapping) else recipe)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl. A last line that is being written, or was cut short, is left out."""
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


# ---- Reading a run: the series of its metrics, its settings, and the watch.


# The names of the Trainer of Hugging Face, where they differ.
_OTHER_NAMES = {
    "eval_loss": "evaluation_loss",
    "grad_norm": "gradient_norm",
    "train_tokens_per_second": "tokens_per_second",
}

_NOT_WATCHED = (
    "The run was not watched, so its layers have no figures. octavo train watches unless watch.interval is 0; in a "
    "loop of your own, call octavo.watch."
)
_NO_SAMPLE = "The watch has no sample yet. A loop of yours must call `step()` of the watch after each optimizer step."


Series = Mapping[int, float]
"""the values of a number by step, in the order of the steps; NaN for null"""


@dataclass(frozen=True)
class RunData:
    """All that a report shows of a run; empty or None where the run has no such record."""

    path: Path
    name: str  # of the folder; the whole path if two runs of a report have the same
    settings: Mapping[str, Any]
    series: Mapping[str, Series]
    precision: Mapping[str, Any] = field(default_factory=dict)  # the last of `octavo.train.step_metrics.precision_of`
    watched: Watched | None = None
    remarks: Sequence[str] = ()  # unusual things, each a sentence
    started: Mapping[str, Any] = field(default_factory=dict)  # the command, the machine and the versions
    written: str = ""  # the time of the last record (UTC)

    @property
    def evaluations(self) -> dict[int, float]:
        """The evaluation losses that are numbers, by step."""
        return self.numbers("evaluation_loss")

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the log records; None without one."""
        speeds = self.numbers("tokens_per_second").values()
        return statistics.median(speeds) if speeds else None

    @property
    def peak_memory(self) -> int | None:
        """Bytes; None if no record has them."""
        return int(max(self.numbers("peak_memory").values(), default=0)) or None

    def numbers(self, key: str) -> dict[int, float]:
        """The values of a series that are neither inf nor NaN, by step."""
        return {step: value for step, value in self.series.get(key, {}).items() if math.isfinite(value)}

    def wrong_steps(self, key: str) -> list[int]:
        """The steps at which a series is inf or NaN."""
        return [step for step, value in self.series.get(key, {}).items() if not math.isfinite(value)]

    def last(self, key: str) -> str:
        """The last value of a series; if that is inf or NaN, the last number and its step, too. "" without a value."""
        if (value := self.last_number(key)) is not None or key not in self.series:
            return number(value, ".4f")
        before = "".join(f", {v:.4f} at step {step:,}" for step, v in [*self.numbers(key).items()][-1:])
        return f"inf or NaN at step {max(self.series[key]):,}{before}"

    def last_number(self, key: str) -> float | None:
        """The last value of a series; None if that is inf or NaN, or if there is none."""
        value = [math.nan, *self.series.get(key, {}).values()][-1]
        return value if math.isfinite(value) else None

    @property
    def last_step(self) -> int:
        """The last step that was logged or sampled."""
        steps = list(map(max, self.series.values()))
        if self.watched is not None and len(self.watched.operands):
            steps.append(int(self.watched.operands["step"][-1]))
        return max(steps, default=0)


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read the runs in the folders `paths`, with distinct names. An ArtifactError if a folder is no run, or its metrics
    are damaged; a watch that cannot be read is a remark."""
    names = [path.resolve().name for path in paths]
    names = [name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(path: Path, name: str) -> RunData:
    run, states = RunFolder(path), _trainer_states(path)
    if not path.is_dir():
        raise ArtifactError(f"{path} is no folder: give the folder of a run, which octavo train wrote")
    refuse_checkpoint(path)
    if not (run.metrics.is_file() or watch_folder(path).is_dir() or states):
        raise ArtifactError(
            f"{path} is no run: it has no metrics.jsonl, no watch/ and no trainer_state.json. Give the folder that "
            "octavo train, octavo.watch or the Trainer of Hugging Face wrote"
        )
    remarks = []
    records: list[dict[str, Any]] = []
    if run.metrics.is_file():
        records = read_records(run.metrics)
        if not run.metrics.read_bytes().endswith(b"\n") and run.metrics.stat().st_size:
            remarks.append("The last line of metrics.jsonl is incomplete: it is being written, or the run was killed.")
    elif states:
        history = read_json(states[-1]).get("log_history")
        if not isinstance(history, list) or not all(isinstance(each, dict) for each in history):
            raise ArtifactError(f"{states[-1]} must have a list log_history of objects")
        records = [{_OTHER_NAMES.get(key, key): value for key, value in each.items()} for each in history]
    series = read_series(records, str(path))
    if "loss" not in series:
        remarks.append("The run has logged no loss.")
    for key, each in series.items():
        if wrong := [step for step, value in each.items() if not math.isfinite(value)]:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            remarks.append(f"{key.replace('_', ' ')} is inf or NaN at step {wrong[0]}{more}.")
    watched, remark = _read_watch(path)
    precision: dict[str, Any] = next((each["precision"] for each in reversed(records) if "precision" in each), {})
    settings = read_json(run.config) if run.config.is_file() and run.metrics.is_file() else {}
    started: dict[str, Any] = next((each["started"] for each in records if "started" in each), {})
    newest = (run.metrics if run.metrics.is_file() else path).stat().st_mtime
    written = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return RunData(path, name, settings, series, precision, watched, [*remarks, *remark], started, written)


def read_series(records: Iterable[Mapping[str, Any]], where: str) -> dict[str, Series]:
    """The series of `SERIES` in records. The ArtifactError of a value that is no number begins with `where`."""
    points: dict[str, dict[int, float]] = {}
    for record in records:
        check_record(record, where)
        for key in SERIES:
            if key in record:
                points.setdefault(key, {})[record["step"]] = math.nan if record[key] is None else float(record[key])
    return {key: dict(sorted(by_step.items())) for key, by_step in points.items()}


def _read_watch(path: Path) -> tuple[Watched | None, list[str]]:
    if not watch_folder(path).is_dir():
        return None, [_NOT_WATCHED]
    try:
        watched = read_watch(path)
    except ArtifactError as error:
        return None, [f"Figures of the layers are missing: {error}."]
    remarks = [] if len(watched.operands) else [_NO_SAMPLE]
    if watched.damaged:
        lines = ", ".join(map(str, watched.damaged[:5])) + (", ..." if len(watched.damaged) > 5 else "")
        number = plural(len(watched.damaged), "damaged line")
        remarks.append(f"watch/events.jsonl has {number}, left out here: line {lines}.")
    return watched, remarks


def _trainer_states(path: Path) -> list[Path]:
    """The records of the Trainer of Hugging Face, oldest first; that of the folder itself is the newest."""
    inner = [each for each in path.glob("checkpoint-*/trainer_state.json") if each.parent.name[11:].isdigit()]
    outer = [path / "trainer_state.json"] if (path / "trainer_state.json").is_file() else []
    return [*sorted(inner, key=lambda each: int(each.parent.name[11:])), *outer]


# ---- Deciding between groups of runs.


LAST = 3  # evaluations at the end of a run
FEWEST, MOST = 3, 100  # pairs: of an interval, and that are worth asking for
_OF_A_PAIR = ("seed", "branch")  # settings in which the runs of a group differ, and those of a pair do not
_OF_NO_GROUP = (*_OF_A_PAIR, "out", "derived")


@dataclass(frozen=True)
class Group:
    """Runs with the same settings but the seed and the branch, by these two."""

    name: str
    twin: bool
    runs: dict[tuple[Any, ...], RunData]


@dataclass(frozen=True)
class Decision:
    """The verdict of the gaps of pairs about a margin; all are relative."""

    gaps: list[float]
    mean: float
    half_width: float | None  # of the interval around the mean; None below three pairs
    verdict: str  # "within", "worse", "better", or "undecided"
    more: int | None  # pairs like these that would decide; None if more than 100 would, or if nothing is undecided


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """The groups of runs, in the order of their first run, named by recipe, or folder where two have one."""
    found: dict[str, list[RunData]] = {}
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


def _loss(run: RunData, base: RunData) -> float:
    """The mean loss of a run at the last evaluations of `base`."""
    steps = [*base.series["evaluation_loss"]][-LAST:] if base.evaluations else []
    missing = [step for step in steps if step not in run.evaluations]
    if missing or not steps:
        step = missing[0] if missing else base.last_step
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
    alpha = 0.05 * 2 / (count * (count - 1))
    return student_quantile(count - 1, alpha) * spread / math.sqrt(count)


def slope_of(group: Group) -> float | None:
    """The mean relative fall of the loss in a step at the end of the runs; None below two evaluations."""
    falls = []
    for run in group.runs.values():
        steps = sorted(run.evaluations)[-LAST:]
        if len(steps) > 1:
            first, last = (run.evaluations[step] for step in (steps[0], steps[-1]))
            falls.append((first - last) / last / (steps[-1] - steps[0]))
    return statistics.fmean(falls) if falls else None


def tokens_per_parameter(run: RunData) -> float | None:
    """The tokens that a run and its trunk have read for each weight that it trains; None without a checkpoint."""
    folders = RunFolder(run.path).checkpoints()
    if not folders:
        return None
    specs = ShardReader(folders[-1], weights_stem(folders[-1])).specs.values()
    return (run.last_number("tokens") or 0) / sum(math.prod(spec.shape) for spec in specs)
