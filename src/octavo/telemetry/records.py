"""The records of a sample, computed from the statistics that were added up for it.

The statistics are float64 [n, WIDTH] (`octavo.observation.statistics`), already combined over micro-batches and ranks.
With the moments M_k = sum(x^k) / n and the mean M_1:

    rms = sqrt(M_2)          crest = amax / rms          sqnr = 10 log10(sum(x^2) / sum((x - x_q * scale)^2))
    kurtosis = (M_4 - 4 M_1 M_3 + 6 M_1^2 M_2 - 3 M_1^4) / (M_2 - M_1^2)^2
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.observation.statistics import BRIEF_MAXIMA, BRIEF_SUMS, EXPONENTS, FIELD
from octavo.telemetry.schema import BINADES, FULL_SHARE, LAYER, OPERAND, RECOMPUTED, UNQUANTIZED, Array

# The statistics of a layer, in the same form: maxima, sums, exponents of the gradient.
LAYER_MAXIMA = ("gradient_amax", "weight_largest", "minus_weight_smallest")
LAYER_SUMS = (
    *("gradient_elements", "gradient_x2", "sampled", "nonfinite", "weight_elements", "weight_x2"),
    *("update_x2", "updated_x2", "alignment", "aligned_rows"),
)
LAYER_FIELD = {name: i for i, name in enumerate((*LAYER_MAXIMA, *LAYER_SUMS, "exponents"))}


def operand_records(step: int, layers: Array, operands: Array, stats: Array) -> Array:
    """The `OPERAND` records of a step.

    Args:
        layers, operands: [n], the numbers of the layer and the operand of each row of `stats`.
        stats: [n, WIDTH]; a row without elements gives no record.
    """
    seen = stats[:, FIELD["elements"]] > 0
    stats, layers, operands = stats[seen], layers[seen], operands[seen]
    field = {name: stats[:, i] for name, i in FIELD.items()}
    n = field["elements"]
    records = np.zeros(len(stats), OPERAND)
    records["step"], records["layer"], records["operand"] = step, layers, operands
    quantized = field["scales"] > 0
    records["flags"] = RECOMPUTED * (field["recomputed"] > 0) + UNQUANTIZED * ~quantized
    amax = np.maximum(field["amax"], field["all_amax"])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        m1, m2, m3, m4 = (field[f"x{k}"] / n for k in (1, 2, 3, 4))
        rms = np.sqrt(m2)
        variance = m2 - m1**2
        records["amax"], records["rms"] = amax, rms
        records["crest"] = amax / rms
        records["kurtosis"] = (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2
        records["scale"] = _known(field["scale"])
        smallest = -field["minus_smallest_scale"]
        records["smallest_scale"] = np.where(np.isfinite(smallest), smallest, _known(field["scale"]))
        for share in ("saturated", "flushed"):
            records[share] = np.where(quantized, field[share] / n, np.nan)
        records["sqnr"] = np.where(quantized & (m2 > 0), 10 * np.log10(field["x2"] / field["noise"]), np.nan)
        records["zero_rows"] = field["zero_rows"] / field["rows"]
        records["nonfinite"] = np.fmax(field["nonfinite"] / n, field["nan_scales"] / field["scales"])
        records["shift_lost"] = np.where(field["codes"] > 0, field["lost"] / field["codes"], 0)
        records["gap"] = -_known(field["minus_gap"])
    records["binades"] = binades(stats[:, FIELD["exponents"] :], amax, n)
    return records


def brief_operand_records(step: int, layers: Array, operands: Array, stats: Array) -> Array:
    """The `OPERAND` records of a brief sample: NaN for the numbers that it lacks.

    All numbers that are not zero are in the last entry of the binades. The moments are those about zero.

    Args:
        layers, operands: as in `operand_records`.
        stats: [n, BRIEF_WIDTH]; a row without elements gives no record.
    """
    names = {name: i for i, name in enumerate((*BRIEF_MAXIMA, *BRIEF_SUMS))}
    seen = stats[:, names["elements"]] > 0
    stats, layers, operands = stats[seen], layers[seen], operands[seen]
    field = {name: stats[:, i] for name, i in names.items()}
    n, quantized = field["elements"], field["quantized"] > 0
    records = _unknown(len(stats), OPERAND)
    records["step"], records["layer"], records["operand"] = step, layers, operands
    records["flags"] = UNQUANTIZED * ~quantized
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        records["amax"] = np.maximum(field["amax"], field["all_amax"])
        records["rms"] = np.sqrt(field["x2"] / n)
        records["crest"] = records["amax"] / records["rms"]
        records["kurtosis"] = n * field["x4"] / field["x2"] ** 2
        records["scale"] = _known(field["scale"])
        records["saturated"] = np.where(quantized, field["saturated"] / n, np.nan)
        records["flushed"] = np.where(quantized, (field["nonzero"] - field["codes"]) / n, np.nan)
        records["nonfinite"] = np.isnan(field["bad"]) / n  # at least one
        records["shift_lost"] = np.where(field["codes"] > 0, field["lost"] / field["codes"], 0)
        records["gap"] = -_known(field["minus_gap"])
        records["binades"][:, -1] = np.rint(np.nan_to_num(field["nonzero"] / n) * FULL_SHARE)
    return records


def layer_records(step: int, sizes: Array, stats: Array) -> Array:
    """The `LAYER` records of a step, of the layers whose weight has a gradient.

    Args:
        sizes: [layers], the number of elements of the whole weight.
        stats: [layers, n], the fields and then EXPONENTS counts. Of a weight that several ranks hold whole, each has
            counted all elements.
    """
    seen = np.flatnonzero(stats[:, LAYER_FIELD["gradient_elements"]] > 0)
    stats, sizes = stats[seen], sizes[seen]
    field = {name: stats[:, i] for name, i in LAYER_FIELD.items()}
    records = np.zeros(len(seen), LAYER)
    records["step"], records["layer"] = step, seen
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        records["gradient_norm"] = np.sqrt(field["gradient_x2"] / field["gradient_elements"] * sizes)
        records["weight_norm"] = np.sqrt(field["weight_x2"] / field["weight_elements"] * sizes)
        records["gradient_amax"] = field["gradient_amax"]
        unseen = ~np.isfinite(field["gradient_amax"]) / field["gradient_elements"]  # at least one, if not in the sample
        records["gradient_nonfinite"] = np.maximum(field["nonfinite"] / field["sampled"], unseen)
        records["weight_smallest"] = -field["minus_weight_smallest"]
        records["weight_largest"] = field["weight_largest"]
        records["update_ratio"] = np.sqrt(field["update_x2"] / field["updated_x2"])
        records["alignment"] = field["alignment"] / field["aligned_rows"]
    records["gradient_binades"] = binades(
        stats[:, LAYER_FIELD["exponents"] :], field["gradient_amax"], field["sampled"]
    )
    return records


def alignment_records(step: int, numbers: Sequence[Sequence[int]], stats: Array) -> Array:
    """The `LAYER` records of a brief sample: the alignment of gates and ups, and NaN for all else.

    Args:
        numbers: [n], those of a gate and an up layer, or that of an expert.
        stats: [n, 2], the sum of |cosine|, and the number of rows.
    """
    records = _unknown(sum(map(len, numbers)), LAYER)
    records["step"], records["layer"] = step, [number for each in numbers for number in each]
    with np.errstate(invalid="ignore"):
        records["alignment"] = np.repeat(stats[:, 0] / stats[:, 1], list(map(len, numbers)))
    return records


def binades(counts: Array, amax: Array, elements: Array) -> Array:
    """Counts [n, EXPONENTS] by exponent as shares [n, BINADES] below the binade of amax [n], in units of FULL_SHARE."""
    finite = np.where(np.isfinite(amax), amax, 0).astype(np.float32)
    top = (finite.view(np.int32) >> 23) & 0xFF  # the biased exponent
    below = np.clip(top[:, None] - np.arange(EXPONENTS), 0, BINADES - 1)
    shares = np.zeros((len(counts), BINADES))
    rows = np.broadcast_to(np.arange(len(counts))[:, None], below.shape)
    np.add.at(shares, (rows[:, 1:], below[:, 1:]), counts[:, 1:])  # the first is that of zeros
    return np.rint(shares / np.maximum(elements, 1)[:, None] * FULL_SHARE).astype(np.uint16)


def combined(stats: Array, places: Array, maxima: int) -> Array:
    """Statistics of several places as one.

    Args:
        stats: [n, fields], of which the first are `maxima`.
        places: [m, p], the rows of `stats` that are those of one operand; -1 for none.
    """
    nothing = np.zeros((1, stats.shape[1]))
    nothing[:, :maxima] = -np.inf
    parts = np.concatenate([stats, nothing])[places]  # -1 takes the last row
    return np.concatenate([parts[:, :, :maxima].max(1), parts[:, :, maxima:].sum(1)], axis=1)


def _unknown(count: int, dtype: np.dtype[Any]) -> Array:
    """Records whose numbers are NaN."""
    records = np.zeros(count, dtype)
    for name in dtype.names or ():
        if dtype[name] == np.float32:
            records[name] = np.nan
    return records


def _known(maxima: Array) -> Array:
    return np.where(np.isneginf(maxima), np.nan, maxima)
