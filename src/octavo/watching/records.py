"""The records of a sample, computed from the statistics that were added up for it.

The statistics are float64 [n, WIDTH] (`octavo.observation.operand_statistics`), already combined over micro-batches and
ranks. With the moments M_k = sum(x^k) / n and the mean M_1:

    rms = sqrt(M_2)          crest = amax / rms          sqnr = 10 log10(sum(x^2) / sum((x - x_q * scale)^2))
    kurtosis = (M_4 - 4 M_1 M_3 + 6 M_1^2 M_2 - 3 M_1^4) / (M_2 - M_1^2)^2
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from octavo.observation.operand_statistics import BRIEF_FIELD, BRIEF_WIDTH, EXPONENTS, FIELD
from octavo.watching.storage import BINADES, FULL_SHARE, LAYER, OPERAND, RECOMPUTED, UNQUANTIZED, Array

# The statistics of a layer, in the same form: maxima, sums, exponents of the gradient. elements: sampled, of it.
LAYER_MAXIMA = ("gradient_amax", "weight_largest", "minus_weight_smallest")
LAYER_SUMS = (
    *("gradient_elements", "gradient_x2", "elements", "nonfinite", "weight_elements", "weight_x2"),
    *("update_x2", "updated_x2", "alignment", "aligned_rows"),
)
LAYER_FIELD = {name: i for i, name in enumerate((*LAYER_MAXIMA, *LAYER_SUMS, "exponents"))}


def operand_records(step: int, layers: Array, operands: Array, stats: Array) -> Array:
    """The `OPERAND` records of a step. A row of `stats` without elements gives no record.

    A brief sample [n, BRIEF_WIDTH] lacks numbers: they are NaN, its moments are those about zero, and all its numbers
    that are not zero are in the last entry of the binades.

    `layers` and `operands` [n] are the numbers of the layer and the operand of each row of `stats`, [n, WIDTH] or
    [n, BRIEF_WIDTH].
    """
    names = FIELD if stats.shape[1] > BRIEF_WIDTH else BRIEF_FIELD
    seen = stats[:, names["elements"]] > 0
    stats, layers, operands = stats[seen], layers[seen], operands[seen]
    unknown, zero = np.full(len(stats), np.nan), np.zeros(len(stats))
    field = dict.fromkeys(FIELD, unknown) | dict.fromkeys(("x1", "x3", "recomputed", "nan_scales"), zero)
    field |= {name: stats[:, i] for name, i in names.items()}
    n, quantized = field["elements"], field["scales"] > 0
    if names is BRIEF_FIELD:
        field["flushed"] = field["nonzero"] - field["codes"]
        field["nonfinite"] = np.isnan(field["nonfinite"]).astype(float)  # one element at least
    records = np.zeros(len(stats), OPERAND)
    records["step"], records["layer"], records["operand"] = step, layers, operands
    records["flags"] = RECOMPUTED * (field["recomputed"] > 0) + UNQUANTIZED * ~quantized
    records["amax"] = amax = np.maximum(field["amax"], field["all_amax"])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        m1, m2, m3, m4 = (field[f"x{k}"] / n for k in (1, 2, 3, 4))
        records["rms"] = rms = np.sqrt(m2)
        records["crest"] = amax / rms
        records["kurtosis"] = (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / (m2 - m1**2) ** 2
        records["scale"] = scale = _known(field["scale"])
        # Where all blocks are zero, no scale is left out.
        smallest = -field["minus_smallest_scale"]
        records["smallest_scale"] = np.where(np.isinf(smallest), scale, smallest)
        for share in ("saturated", "flushed"):
            records[share] = np.where(quantized, field[share] / n, np.nan)
        records["sqnr"] = np.where(quantized & (m2 > 0), 10 * np.log10(field["x2"] / field["noise"]), np.nan)
        records["zero_rows"] = field["zero_rows"] / field["rows"]
        records["nonfinite"] = np.fmax(field["nonfinite"] / n, field["nan_scales"] / field["scales"])
        records["shift_lost"] = np.where(field["codes"] > 0, field["lost"] / field["codes"], 0)
        records["gap"] = -_known(field["minus_gap"])
        if names is BRIEF_FIELD:
            records["binades"][:, -1] = np.rint(np.nan_to_num(field["nonzero"] / n) * FULL_SHARE)
        else:
            records["binades"] = binades(stats[:, FIELD["exponents"] :], amax, n)
    return records


def layer_records(step: int, sizes: Array, stats: Array) -> Array:
    """The `LAYER` records of a step, of the layers whose weight has a gradient.

    `sizes` [layers] are the elements of the whole weights. `stats` [layers, n] has the fields and then EXPONENTS
    counts. If several ranks hold a weight whole, each has counted all its elements.
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
        records["gradient_nonfinite"] = np.maximum(field["nonfinite"] / field["elements"], unseen)
        records["weight_smallest"] = -field["minus_weight_smallest"]
        records["weight_largest"] = field["weight_largest"]
        records["update_ratio"] = np.sqrt(field["update_x2"] / field["updated_x2"])
        records["alignment"] = field["alignment"] / field["aligned_rows"]
    records["gradient_binades"] = binades(
        stats[:, LAYER_FIELD["exponents"] :], field["gradient_amax"], field["elements"]
    )
    return records


def alignment_records(step: int, numbers: Sequence[Sequence[int]], stats: Array) -> Array:
    """The `LAYER` records of a brief sample: the alignment of gates and ups, and NaN for all else.

    `numbers` [n] are of a gate and an up layer, or of an expert; `stats` [n, 2] the sum of |cosine| and the rows.
    """
    records = np.zeros(sum(map(len, numbers)), LAYER)
    for name in LAYER.names or ():
        if LAYER[name] == np.float32:
            records[name] = np.nan
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
    """Statistics [n, fields] of several places as one, [m, fields]; the first fields are `maxima`.

    `places` [m, p] are the rows of `stats` that belong to one operand; -1 for none.
    """
    nothing = np.zeros((1, stats.shape[1]))
    nothing[:, :maxima] = -np.inf
    parts = np.concatenate([stats, nothing])[places]  # -1 takes the last row
    return np.concatenate([parts[:, :, :maxima].max(1), parts[:, :, maxima:].sum(1)], axis=1)


def _known(maxima: Array) -> Array:
    return np.where(np.isneginf(maxima), np.nan, maxima)


# ---- The way of the statistics of a step: combined over the ranks on their devices, then copied to the host.
#
# The copy does not wait for the device, and the training goes on. Whoever needs the numbers waits for them.


Table = tuple[Tensor, int]  # float64 [rows, maxima and sums], and the number of its columns that are maxima


def transfer(tables: Sequence[Table], interval: int) -> Callable[[], tuple[list[Array], int]]:
    """Combine the tables of all ranks, and begin to copy them to the host, with the largest `interval` of the ranks.

    Every rank must call it at the same step. The result waits for the copy, and gives the tables and the interval.
    """
    shapes = [(len(table), n, table.shape[1] - n) for table, n in tables]
    number = tables[0][0].new_full((1,), interval)
    maxima = torch.cat([*(table[:, :n].reshape(-1) for table, n in tables), number])
    sums = torch.cat([table[:, n:].reshape(-1) for table, n in tables])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(sums)
    copies, copied = (_host_copy(maxima), _host_copy(sums)), None
    if maxima.is_cuda:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

    def wait() -> tuple[list[Array], int]:
        if copied is not None:
            copied.synchronize()
        maxima, sums = (copy.numpy() for copy in copies)
        found, i, j = [], 0, 0
        for rows, n, m in shapes:
            parts = maxima[i : i + rows * n].reshape(rows, n), sums[j : j + rows * m].reshape(rows, m)
            found.append(np.concatenate(parts, 1))
            i, j = i + rows * n, j + rows * m
        return found, int(maxima[-1])

    return wait


def _host_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
