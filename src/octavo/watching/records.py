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

from octavo.observation.operand_statistics import EXPONENTS, FIELD, HEAD
from octavo.watching.storage import BINADES, EXPERTS, FULL_SHARE, LAYER, OPERAND, RECOMPUTED, UNQUANTIZED, Array

# The statistics of a layer, in the same form: maxima, sums, exponents of the gradient. elements: sampled, of it.
LAYER_MAXIMA = ("gradient_amax", "weight_largest", "minus_weight_smallest")
LAYER_SUMS = (
    *("gradient_elements", "gradient_x2", "elements", "nonfinite", "weight_elements", "weight_x2"),
    *("update_x2", "updated_x2"),
)
LEAST_VARIANCE = 1e-6  # of the mean square, below which the kurtosis is rounding: NaN
LAYER_FIELD = {name: i for i, name in enumerate((*LAYER_MAXIMA, *LAYER_SUMS, "exponents"))}


def operand_records(step: int, layers: Array, operands: Array, stats: Array, *, about_zero: bool = False) -> Array:
    """The `OPERAND` records of a step. A row of `stats` without elements gives no record. Without exponents, as in a
    brief sample, all numbers that are not zero are in the last entry of the binades. A number that the sample lacks is
    NaN. `layers` and `operands` [n] are the numbers of the layer and the operand of each row of `stats`, [n, WIDTH] or
    [n, HEAD]. Moments `about_zero` are those that a brief sample has."""
    seen = stats[:, FIELD["elements"]] > 0
    stats, layers, operands = stats[seen], layers[seen], operands[seen]
    field = {name: stats[:, i] for name, i in FIELD.items()}
    n, quantized = field["elements"], field["scales"] > 0
    records = np.zeros(len(stats), OPERAND)
    records["step"], records["layer"], records["operand"] = step, layers, operands
    records["flags"] = RECOMPUTED * (field["recomputed"] > 0) + UNQUANTIZED * ~quantized
    records["amax"] = amax = np.maximum(field["amax"], field["all_amax"])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        m1, m2, m3, m4 = (field[f"x{k}"] / n for k in (1, 2, 3, 4))
        m1, m3 = (0 * n, 0 * n) if about_zero else (m1, m3)
        records["rms"] = rms = np.sqrt(m2)
        records["crest"] = amax / rms
        variance = np.where(m2 - m1**2 > LEAST_VARIANCE * m2, m2 - m1**2, np.nan)
        records["kurtosis"] = (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2
        records["scale"] = scale = _known(field["scale"])
        # Where all blocks are zero, no scale is left out.
        smallest = -field["minus_smallest_scale"]
        records["smallest_scale"] = np.where(np.isinf(smallest), scale, smallest)
        records["saturated"] = np.where(quantized, field["saturated"] / n, np.nan)
        records["flushed"] = np.where(quantized, (field["nonzero"] - field["codes"]) / n, np.nan)
        records["sqnr"] = np.where(quantized & (m2 > 0), 10 * np.log10(field["x2"] / field["noise"]), np.nan)
        records["zero_rows"] = field["zero_rows"] / field["rows"]
        records["nonfinite"] = np.fmax(field["nonfinite"] / n, field["bad_scales"] / field["scales"])
        records["shift_lost"] = np.where(field["codes"] > 0, field["lost"] / field["codes"], 0)
        records["gap"] = -_known(field["minus_gap"])
        records["binades"] = binades(stats[:, HEAD:], amax, n, field["nonzero"])
    return records


def expert_record(step: int, layer: int, experts: Array) -> Array:
    """The `EXPERTS` record of a stack, from the statistics of each expert's x, w and dy [E, 3, HEAD]."""
    record = np.zeros((), EXPERTS)
    rows, squares, errors = (experts[..., FIELD[name]] for name in ("scales", "x2", "noise"))
    rows = rows[:, 0]  # an x of a row scale each
    record["step"], record["layer"], record["experts"] = step, layer, len(experts)
    record["fullest"], record["idle"] = rows.argmax(), (rows == 0).sum()
    record["load"] = rows.max() / rows.mean() if rows.any() else np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        db = np.where((squares > 0) & np.isfinite(errors), 10 * np.log10(squares / errors), np.inf)  # [E, 3]
    record["worst"], least = db.argmin(0), db.min(0)
    record["sqnr"] = np.where(np.isfinite(least), least, np.nan)
    return record


def layer_records(step: int, sizes: Array, stats: Array, alignment: Array) -> Array:
    """The `LAYER` records of a step, of the layers whose weight has a gradient. `sizes` [layers] are the elements of
    the whole weights, `alignment` [layers] of the gates and ups. `stats` [layers, n] has the fields and then EXPONENTS
    counts. If several ranks hold a weight whole, each has counted all its elements."""
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
    records["alignment"] = alignment[seen]
    counts = stats[:, LAYER_FIELD["exponents"] :]
    records["gradient_binades"] = binades(counts, field["gradient_amax"], field["elements"], counts[:, 1:].sum(1))
    return records


def alignment_records(step: int, alignment: Array) -> Array:
    """The `LAYER` records of a brief sample: the `alignment` [n] of gates and ups where it is known, and NaN else."""
    known = np.flatnonzero(~np.isnan(alignment))
    records = np.zeros(len(known), LAYER)
    for name in LAYER.names or ():
        if LAYER[name] == np.float32:
            records[name] = np.nan
    records["step"], records["layer"], records["alignment"] = step, known, alignment[known]
    return records


def binades(counts: Array, amax: Array, elements: Array, nonzero: Array) -> Array:
    """Counts [n, EXPONENTS] by exponent as shares [n, BINADES] below the binade of amax [n], in units of FULL_SHARE.
    The last one has those of the `nonzero` elements [n] too that are not counted: all without counts, [n, 0]."""
    finite = np.where(np.isfinite(amax), amax, 0).astype(np.float32)
    top = (finite.view(np.int32) >> 23) & 0xFF  # the biased exponent
    below = np.clip(top[:, None] - np.arange(EXPONENTS)[: counts.shape[1]], 0, BINADES - 1)
    shares = np.zeros((len(counts), BINADES))
    rows = np.broadcast_to(np.arange(len(counts))[:, None], below.shape)
    np.add.at(shares, (rows[:, 1:], below[:, 1:]), counts[:, 1:])  # the first is that of zeros
    shares[:, -1] += np.nan_to_num(nonzero - shares.sum(1))
    return np.rint(shares / np.maximum(elements, 1)[:, None] * FULL_SHARE).astype(np.uint16)


def _known(maxima: Array) -> Array:
    return np.where(np.isneginf(maxima), np.nan, maxima)


Table = tuple[Tensor, int]  # float64 [rows, maxima and sums], and the number of its columns that are maxima


def transfer(tables: Sequence[Table], interval: int) -> Callable[[], tuple[list[Array], int]]:
    """Combine the tables of all ranks, and begin to copy them to the host, with the largest `interval` of the ranks.
    Every rank must call it at the same step. The result waits for the copy, and gives the tables and the interval."""
    shapes = [(len(table), n, table.shape[1] - n) for table, n in tables]
    number = tables[0][0].new_full((1,), interval)
    maxima = torch.cat([*(table[:, :n].reshape(-1) for table, n in tables), number])
    sums = torch.cat([table[:, n:].reshape(-1) for table, n in tables])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(sums)
    copies = [each.to("cpu", non_blocking=True) for each in (maxima, sums)]  # pinned, where they come from a GPU
    copied = torch.cuda.current_stream(maxima.device).record_event() if maxima.is_cuda else None

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
