"""The rules over samples. Each compares a number of an operand, or of a layer, with a limit.

A rule whose number is above its limit has found a fault. Where a number is missing (NaN), it has found none.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.numerics.formats import FP8_FORMATS
from octavo.watching.storage import FULL_SHARE, OPERANDS, UNQUANTIZED, Event, Records, WatchedLayer

# ---- A sample as arrays with one number for each operand of each layer, and what the rules remember of earlier
# samples.


Grid = npt.NDArray[np.float64]  # [layers, 3]: one number for each operand x, w, dy of each layer
Mask = npt.NDArray[np.bool_]

RECENT = 16  # samples that a history has
_ALMOST_ALL = 0.999


class SampleGrids:
    """The records of one sampled step, each field as a grid of the operands of all `layers`, by the number that records
    have for them, and then of their experts."""

    def __init__(self, operands: Records, layer_records: Records, layers: Sequence[WatchedLayer]) -> None:
        self._operands, self._layer_records = operands, layer_records
        self._places = operands["layer"].astype(np.int64) * len(OPERANDS) + operands["operand"]
        # The binades of formats of eight bits, from the smallest subnormal number to the largest: 17.8 of e4m3.
        known = {name: np.log2(f.max / f.smallest_subnormal) for name, f in FP8_FORMATS.items()}
        rows = [[known.get(layer.formats.get(operand, ""), np.nan) for operand in OPERANDS] for layer in layers]
        self.binades: Grid = np.concatenate([rows, np.repeat(rows, [layer.experts for layer in layers], axis=0)])
        self.step = int((operands if len(operands) else layer_records)["step"].max(initial=0))
        # The operands that a GEMM read in eight bits, and the share of their elements that are not zero.
        self.quantized: Mask = self._grid(operands["flags"] & UNQUANTIZED) == 0
        self.nonzero: Grid = self._grid(operands["binades"].sum(axis=1) / FULL_SHARE)
        # Those that are all zero before they are quantized, and those of which nearly all becomes zero.
        self.all_zero: Mask = (self["amax"] == 0) & self.quantized
        flushed = self["flushed"]
        self.all_flushed: Mask = (flushed > 0) & (flushed >= _ALMOST_ALL * self.nonzero) & self.quantized

    def __getitem__(self, name: str) -> Grid:
        """A field of the operands' records; NaN where there is no record."""
        return self._grid(self._operands[name])

    def of_layers(self, name: str) -> Grid:
        """A field of the layers' records, [layers, 1]; NaN where there is no record."""
        found = np.full((len(self.binades), 1), np.nan)
        found[self._layer_records["layer"], 0] = self._layer_records[name]
        return found

    def _grid(self, values: npt.NDArray[Any]) -> Grid:
        found = np.full(self.binades.size, np.nan)
        found[self._places] = values
        return found.reshape(self.binades.shape)


class History:
    """The numbers of earlier samples that rules compare with. A resumed run begins a new history."""

    def __init__(self, layers: int) -> None:
        self.samples, shape = 0, (layers, len(OPERANDS))
        # [RECENT, layers, 3], of the last samples in any order; NaN where there was none
        self.amax, self.kurtosis = np.full((RECENT, *shape), np.nan), np.full((RECENT, *shape), np.nan)
        # [layers, 3], the number of samples in a row, up to the last, in which an operand was all zero
        self.zeros: Grid = np.zeros(shape)

    @property
    def known(self) -> Grid:
        """[layers, 3], the number of the last samples in which the amax was a number."""
        return np.isfinite(self.amax).sum(0).astype(np.float64)

    def add(self, sample: SampleGrids) -> None:
        """Take a sample into the history."""
        for name, recent in (("amax", self.amax), ("kurtosis", self.kurtosis)):
            recent[self.samples % RECENT] = np.where(np.isfinite(sample[name]), sample[name], np.nan)
        self.zeros = np.where(sample.all_zero, self.zeros + 1, 0)
        self.samples += 1


# ---- The rules over samples.


FIRST = 4  # samples before which nothing is compared: a run changes fast while its learning rate rises
JUMP, GRADIENT_JUMP = 8.0, 64.0  # times the largest amax of the last samples
SATURATED = 0.05  # share of elements
CLIPPED = 0.5  # binades by which amax is above what its scale expects, where saturation is a fault
FLUSHED = 0.2  # share of the elements that are not zero
SHIFTED = 0.5  # share of the bytes that are not zero
ALIGNED = 0.7  # mean |cosine|
GROWTH = 8.0  # times the largest kurtosis of the last samples
LEAST_KURTOSIS = 10.0  # a smaller one counts as this much
TOO_SMALL = 3.0  # binades by which amax may be above what a scale expects
TOO_LARGE = 0.5  # of the format's binades, by which it may be below
ZERO_SAMPLES = 2  # in a row


@dataclass(frozen=True)
class Rule:
    """A rule over a sample, under the name that events have. Its message is `words`, a template. `number` gives the
    numbers [layers, 3] of the operands, or [layers, 1] of the layers, of a sample and the history before it; NaN where
    the rule does not apply. One above `limit` is a fault. The rule is about some `operands`: all; those that are
    quantized; or of these, those that were in `FIRST` samples before (`later`)."""

    name: str
    limit: float
    words: str  # with value, operand and format
    number: Callable[[SampleGrids, History], Grid]
    about: str = "all"
    operands: tuple[str, ...] = OPERANDS

    def numbers(self, sample: SampleGrids, history: History) -> Grid:
        """The numbers of the operands, or layers, that the rule is about; NaN for others."""
        found = self.number(sample, history)
        if self.about == "all":
            return found
        known = sample.quantized & [operand in self.operands for operand in OPERANDS]
        if self.about == "later":  # an expert without tokens is in no sample
            known &= history.known >= FIRST
        return np.where(known, found, np.nan)


def _jump(sample: SampleGrids, history: History) -> Grid:
    """amax by the largest of the last samples."""
    largest: Grid = np.fmax.reduce(history.amax)
    return sample["amax"] / np.where(largest > 0, largest, np.nan)


def _flushed(sample: SampleGrids, history: History) -> Grid:
    """The share of the elements other than zero that become zero. All of them is the matter of `all_flushed`. Four bits
    have no limit: in e2m1 a fifth becomes zero in every run."""
    share: Grid = sample["flushed"] / np.maximum(sample.nonzero, sample["flushed"])
    return np.where(sample.all_flushed | np.isnan(sample.binades), np.nan, share)


def _zeros_in_a_row(sample: SampleGrids, history: History) -> Grid:
    """The number of samples in a row, this one included, in which the operand was all zero. One is enough, and counts
    as two, where no sample before was so. A batch without any target is excepted, in which the operand is zero in all
    layers."""
    zero, unknown = sample.all_zero, np.isnan(sample["amax"])
    became = (history.known >= FIRST) & (np.fmin.reduce(history.amax) > 0) & ~(zero | unknown).all(axis=0)
    return np.where(zero, history.zeros + 1 + became, 0)


def _no_scale(sample: SampleGrids, history: History) -> Grid:
    """1 where a finite operand has a scale that is zero or not finite."""
    bad = (sample["nonfinite"] == 0) & ~((sample["scale"] > 0) & np.isfinite(sample["scale"]))
    return (bad & np.isfinite(sample["amax"])).astype(np.float64)


_JUMPED = "the amax of {operand} is {value:.3g} times the largest before"

# In the order in which a sample is judged. A hard batch has gradients several times as large as those before it, and
# the kurtosis of dy changes by orders in every run. Elements that saturate are a fault where the largest become smaller
# by a third at least.
RULES = (
    Rule("non_finite", 0.0, "{value:.2%} of {operand} is inf or NaN", lambda s, _: s["nonfinite"]),
    Rule(
        "non_finite", 0.0, "{value:.2%} of the weight's gradient is inf or NaN",
        lambda s, _: s.of_layers("gradient_nonfinite"),
    ),
    Rule("amax_jump", JUMP, _JUMPED, _jump, "later", ("x", "w")),
    Rule("amax_jump", GRADIENT_JUMP, _JUMPED, _jump, "later", ("dy",)),
    Rule(
        "saturation_spike", SATURATED, "{value:.2%} of {operand} saturates in {format}",
        lambda s, _: np.where(s["gap"] <= -CLIPPED, s["saturated"], np.nan), "later",
    ),
    Rule("underflow", FLUSHED, "{value:.1%} of {operand} underflows to zero in {format}", _flushed, "quantized"),
    Rule(
        "underflow", SHIFTED, "{value:.1%} of {operand} underflows to zero in dw, shifted by the scale of x",
        lambda s, _: s["shift_lost"], "quantized",
    ),
    Rule(
        "swiglu_alignment", ALIGNED, "the rows of gate and up are aligned: mean |cosine| {value:.2f}",
        lambda s, _: s.of_layers("alignment"),
    ),
    Rule(
        "kurtosis_growth", GROWTH, "the kurtosis of {operand} is {value:.3g} times the largest before",
        lambda s, history: s["kurtosis"] / np.maximum(np.fmax.reduce(history.kurtosis), LEAST_KURTOSIS),
        "later", ("x", "w"),
    ),
    Rule(
        "scale_gap", TOO_SMALL, "the amax of {operand} is {value:.1f} binades above its scale's range",
        lambda s, _: -s["gap"], "quantized",
    ),
    Rule(
        "scale_gap", TOO_LARGE, "the amax of {operand} leaves {value:.0%} of the binades of {format} unused",
        lambda s, _: np.where(s.all_flushed | s.all_zero, np.nan, s["gap"] / s.binades), "quantized",
    ),
    Rule(
        "dead_scale", 0.0, "all of {operand} becomes zero in {format}",
        lambda s, _: s.all_flushed.astype(np.float64), "quantized",
    ),
    Rule("dead_scale", ZERO_SAMPLES - 1, "all of {operand} is zero", _zeros_in_a_row),
    Rule("dead_scale", 0.0, "the scale of {operand} is zero or not finite", _no_scale, "quantized"),
)  # fmt: skip


class SampleRules:
    """Judges the samples of a run by all rules, and reports a fault when it begins, and again when it returns.

    Args:
        layers: of the model, by the number that records have for them. The experts of a stack are numbered after all
            layers, in the order of the stacks. An event names the worst of the experts that have a fault.

    Example:
        >>> watched = read_watch(run)  # doctest: +SKIP
        >>> rules = SampleRules(watched.layers)
        >>> for step in np.unique(watched.operands["step"]):
        ...     of_step = (records[records["step"] == step] for records in (watched.operands, watched.layer_records))
        ...     events = rules.check(*of_step)
    """

    def __init__(self, layers: Sequence[WatchedLayer]) -> None:
        self.layers = list(layers)  # may be replaced where a layer has changed its formats
        self._history = History(len(layers) + sum(layer.experts for layer in layers))
        self._faults: dict[Rule, Mask] = {}  # of the sample before

    def check(self, operands: Records, layer_records: Records) -> list[Event]:
        """The faults that the records of one step (`octavo.watching.storage`) have, and the sample before had not."""
        sample = SampleGrids(operands, layer_records, self.layers)
        events = [event for rule in RULES for event in self._judge(rule, sample)]
        self._history.add(sample)
        return events

    def _judge(self, rule: Rule, sample: SampleGrids) -> Iterator[Event]:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf are numbers that were found
            if not ((numbers := rule.numbers(sample, self._history)) > rule.limit).any():  # as in most samples
                self._faults.pop(rule, None)
                return
            values, experts = self._of_layers(numbers)
            faults: Mask = values > rule.limit
        new = faults & ~self._faults.get(rule, np.zeros_like(faults))
        self._faults[rule] = faults
        for number, column in np.argwhere(new).tolist():
            operand, value = OPERANDS[column] if values.shape[1] > 1 else None, float(values[number, column])
            layer, expert = self.layers[number], int(experts[number, column])
            fmt = "" if operand is None else layer.formats.get(operand, "eight bits")
            message = rule.words.format(value=value, operand=operand, format=fmt)
            event = Event(sample.step, rule.name, layer.name, operand, value, rule.limit, message)
            of_expert = replace(event, message=f"expert {expert}: {message}", expert=expert)
            yield event if expert < 0 else of_expert

    def _of_layers(self, values: Grid) -> tuple[Grid, Grid]:
        """The numbers of the layers, of a stack that of the worst of its experts; and that expert, -1 for none."""
        end = len(self.layers)
        found, experts = values[:end].copy(), np.full_like(values[:end], -1)
        for i, layer in enumerate(self.layers):
            if layer.experts:
                begin, end = end, end + layer.experts
                worst = np.where(np.isnan(values[begin:end]), -np.inf, values[begin:end]).argmax(0)
                value = values[begin + worst, np.arange(values.shape[1])]
                known = ~np.isnan(value)
                found[i], experts[i] = np.where(known, value, found[i]), np.where(known, worst, -1)
        return found, experts


# ---- The rules over the losses of a run, a spike and a stall, and over its learning rate.


NEW = 3  # steps whose median loss is judged: one hard batch is no spike
BEFORE = 64  # steps before them that it is compared with
FEWEST = 16  # of which there must be so many
DEVIATIONS = 8.0
LEAST = 0.5  # nats above the median that are no spike, however even the losses were
STEADY = 128  # steps before which no stall is looked for
LONGER, LOOKS = 1.1, 2  # times the steps of the last look; looks in a row without a fall
RATE = 1.0  # times the RMS of the weights


class LossRule:
    """Finds a loss spike: the median of the last three losses is far above that of those before. The limit is the
    median + 8 standard deviations, at least 0.5. The deviation is 1.4826 times the median absolute deviation, which a
    few losses far off do not change. While a spike lasts, its losses do not count as those before."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=BEFORE)
        self._new: deque[float] = deque(maxlen=NEW)
        self._fault = False

    def check(self, step: int, loss: float) -> Event | None:
        """Take the loss of a step; the event if a spike begins with it. A loss that is not finite does not count."""
        if not math.isfinite(loss):
            return None
        if len(self._new) == NEW and not self._fault:
            self._before.append(self._new[0])
        self._new.append(loss)
        if len(self._before) < FEWEST or len(self._new) < NEW:
            return None
        losses = np.array(self._before)
        median = float(np.median(losses))
        deviation = 1.4826 * float(np.median(np.abs(losses - median)))
        value, limit = float(np.median(self._new)), median + max(DEVIATIONS * deviation, LEAST)
        began = value > limit and not self._fault
        self._fault = value > limit
        message = f"the loss of the last steps is {value:.4g}: the steps before allow {limit:.4g}"
        return Event(step, "loss_spike", None, None, value, limit, message) if began else None

    def restart(self) -> None:
        """Forget the spike: the run went back to a step before it."""
        self._new.clear()
        self._fault = False


class StallRule:
    """Finds a loss that stopped falling: its mean over the last third of the steps is not below the mean before. The
    rule looks twice in a row, each time at a tenth more steps than the last. It waits for `first` steps, and for 128 at
    least: the loss of a run that goes on falls as slowly as its steps are many."""

    def __init__(self, first: int = 0) -> None:
        self._losses = array("d")
        self._next, self._looks = max(first, STEADY), 0

    def check(self, step: int, loss: float) -> Event | None:
        """Take the loss of a step; the event if it is the second look at which the loss has not fallen."""
        if not math.isfinite(loss):
            return None
        self._losses.append(loss)
        count = len(self._losses)
        if count < self._next:
            return None
        self._next = math.ceil(LONGER * count)
        before, last = (float(np.mean(self._losses[count * part // 3 : count * (part + 1) // 3])) for part in (1, 2))
        self._looks = self._looks + 1 if last >= before else 0
        message = f"the loss stopped falling: its mean over {count // 3} steps is {last:.4g}, and was {before:.4g}"
        return Event(step, "loss_stall", None, None, last, before, message) if self._looks == LOOKS else None


def judge_rate(step: int, rate: float, weights: float) -> Event | None:
    """The event of a learning rate as large as `weights`, the RMS of the matrices when the run began. AdamW moves each
    weight by up to about the rate (Kingma and Ba, arXiv:1412.6980, section 2.1)."""
    if weights == 0 or rate < RATE * weights:
        return None
    message = f"the learning rate {rate:.2g} is {rate / weights:.2g} times the weights' RMS, {weights:.2g}: lower it"
    return Event(step, "rate_too_high", None, None, rate / weights, RATE, message)
