"""The rules over samples. Each compares a number of an operand, or of a layer, with a limit.

A rule whose number is above its limit has found a fault. Where a number is missing (NaN), it has found none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.telemetry.rules.sample import Grid, History, SampleGrids
from octavo.telemetry.schema import OPERANDS

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
    """A rule over a sample.

    Args:
        name: of the rule, which events have.
        limit: the largest number that is no fault.
        number: of a sample and the history before it, the numbers [layers, 3] of the operands or [layers, 1] of the
            layers; NaN where the rule does not apply.
        words: a template of the message, with `value`, `limit`, `operand` and `format`.
    """

    name: str
    limit: float
    number: Callable[[SampleGrids, History], Grid]
    words: str


def amax_jump(sample: SampleGrids, history: History) -> Grid:
    """amax of x and w by the largest of the last samples."""
    return _of_operands(_jump(sample, history), "x", "w")


def gradient_jump(sample: SampleGrids, history: History) -> Grid:
    """amax of dy by the largest of the last samples. A hard batch has gradients several times as large."""
    return _of_operands(_jump(sample, history), "dy")


def _jump(sample: SampleGrids, history: History) -> Grid:
    largest = np.fmax.reduce(history.amax)
    return _later(history, _of_quantized(sample, sample["amax"] / np.where(largest > 0, largest, np.nan)))


def saturated(sample: SampleGrids, history: History) -> Grid:
    """The share of elements that saturate, where the largest become smaller by a third at least."""
    share = np.where(sample["gap"] <= -CLIPPED, sample["saturated"], np.nan)
    return _later(history, _of_quantized(sample, share))


def flushed(sample: SampleGrids, history: History) -> Grid:
    """The share of the elements other than zero that become zero. All of them is the matter of `all_flushed`."""
    share = sample["flushed"] / np.maximum(sample.nonzero, sample["flushed"])
    return _of_quantized(sample, np.where(sample.all_flushed, np.nan, share))


def shifted(sample: SampleGrids, history: History) -> Grid:
    """The share of the bytes of dy other than zero that become zero where the scale of x is folded into them."""
    return _of_quantized(sample, sample["shift_lost"])


def alignment(sample: SampleGrids, history: History) -> Grid:
    """The mean |cosine| of matching rows of a SwiGLU's gate and up weights."""
    return sample.of_layers("alignment")


def kurtosis_growth(sample: SampleGrids, history: History) -> Grid:
    """The kurtosis of x and w by the largest of the last samples. That of dy changes by orders in every run."""
    growth = sample["kurtosis"] / np.maximum(np.fmax.reduce(history.kurtosis), LEAST_KURTOSIS)
    return _of_operands(_later(history, _of_quantized(sample, growth)), "x", "w")


def scale_too_small(sample: SampleGrids, history: History) -> Grid:
    """The binades by which amax is above what a scale expects that was fixed before."""
    return _of_quantized(sample, -sample["gap"])


def scale_too_large(sample: SampleGrids, history: History) -> Grid:
    """The binades by which amax is below what a scale expects that was fixed before, by those of the format."""
    known = ~sample.all_flushed & ~sample.all_zero
    return _of_quantized(sample, np.where(known, sample["gap"] / sample.binades, np.nan))


def all_flushed(sample: SampleGrids, history: History) -> Grid:
    """1 where nearly all elements other than zero become zero."""
    return _of_quantized(sample, sample.all_flushed.astype(np.float64))


def zeros_in_a_row(sample: SampleGrids, history: History) -> Grid:
    """The number of samples in a row, this one included, in which the operand was all zero.

    One is enough, and counts as two, where no sample before was so. A batch without any target is excepted, in which
    the operand is zero in all layers.
    """
    zero, unknown = sample.all_zero, np.isnan(sample["amax"])
    became = (history.known >= FIRST) & (np.fmin.reduce(history.amax) > 0) & ~(zero | unknown).all(axis=0)
    return np.where(zero, history.zeros + 1 + became, 0)


def no_scale(sample: SampleGrids, history: History) -> Grid:
    """1 where a finite operand has a scale that is zero or not finite."""
    scale = sample["scale"]
    bad = np.isfinite(sample["amax"]) & ((scale <= 0) | ~np.isfinite(scale))
    return _of_quantized(sample, bad.astype(np.float64))


def nonfinite(sample: SampleGrids, history: History) -> Grid:
    """The share of elements that are inf or NaN."""
    return sample["nonfinite"]


def nonfinite_gradient(sample: SampleGrids, history: History) -> Grid:
    """The share of elements of the weight's gradient that are inf or NaN."""
    return sample.of_layers("gradient_nonfinite")


def _later(history: History, numbers: Grid) -> Grid:
    """The numbers of what was in so many samples before. An expert without tokens is in none."""
    return np.where(history.known >= FIRST, numbers, np.nan)


def _of_operands(numbers: Grid, *operands: str) -> Grid:
    """The numbers of these operands."""
    return np.where([operand in operands for operand in OPERANDS], numbers, np.nan)


def _of_quantized(sample: SampleGrids, numbers: Grid) -> Grid:
    return np.where(sample.quantized, numbers, np.nan)


RULES = (
    Rule("non_finite", 0.0, nonfinite, "{value:.2%} of {operand} is inf or NaN"),
    Rule("non_finite", 0.0, nonfinite_gradient, "{value:.2%} of the weight's gradient is inf or NaN"),
    Rule("amax_jump", JUMP, amax_jump, "the amax of {operand} is {value:.3g} times the largest before"),
    Rule("amax_jump", GRADIENT_JUMP, gradient_jump, "the amax of {operand} is {value:.3g} times the largest before"),
    Rule("saturation_spike", SATURATED, saturated, "{value:.2%} of {operand} saturates in {format}"),
    Rule("underflow", FLUSHED, flushed, "{value:.1%} of {operand} underflows to zero in {format}"),
    Rule("underflow", SHIFTED, shifted, "{value:.1%} of {operand} underflows to zero in dw, shifted by the scale of x"),
    Rule("swiglu_alignment", ALIGNED, alignment, "the rows of gate and up are aligned: mean |cosine| {value:.2f}"),
    Rule(
        "kurtosis_growth", GROWTH, kurtosis_growth, "the kurtosis of {operand} is {value:.3g} times the largest before"
    ),
    Rule(
        "scale_gap", TOO_SMALL, scale_too_small, "the amax of {operand} is {value:.1f} binades above its scale's range"
    ),
    Rule(
        "scale_gap",
        TOO_LARGE,
        scale_too_large,
        "the amax of {operand} leaves {value:.0%} of the binades of {format} unused",
    ),
    Rule("dead_scale", 0.0, all_flushed, "all of {operand} becomes zero in {format}"),
    Rule("dead_scale", ZERO_SAMPLES - 1, zeros_in_a_row, "all of {operand} is zero"),
    Rule("dead_scale", 0.0, no_scale, "the scale of {operand} is zero or not finite"),
)
