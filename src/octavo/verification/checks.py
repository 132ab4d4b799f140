"""Checks of a packed folder's settings and tensors by themselves.

The folder must have every tensor of its model, with the shape, the dtype and the name that its quantization_config
requires. All numbers must be finite and all scales positive. Then the weights are compared with MODEL's.
"""

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.evaluation.metrics import energies, sqnr
from octavo.util import Progress, no_progress
from octavo.verification import layer_spec
from octavo.verification.layer_spec import LayerSpec, nearest, numbers_of, scale_values, spread
from octavo.verification.stored_files import CheckpointFiles

Shape = tuple[int, ...]

_FLOATS, _EXPONENTS = ("F32", "BF16", "F16"), ("U8", "F8_E8M0")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")
_LAYER_SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
_UNUSED = ("output_scale", "prob_scale", "weight_zero_point", "input_zero_point")  # no layer reads these
_SMALLEST, _TINY = 2.0**-127, "below 2^-127, and 1 / scale overflows"
_HEADS = ("lm_head", "embed_out", "score", "classifier")


class Required(NamedTuple):
    """The tensors that a model needs, by their names in files: their shapes, the names of its linear layers, and for
    each parameter all names of it. `modules` has the linear layers by their names in the model."""

    shapes: Mapping[str, Shape]
    linears: list[str]
    tied: Mapping[str, list[str]]
    modules: Collection[str]


def check_folder(files: CheckpointFiles, required: Required, progress: Progress = no_progress) -> dict[str, LayerSpec]:
    """Add the errors in the settings and tensors to `files.findings`; returns the specs of the packed layers."""
    try:
        specs, unused = layer_spec.read_specs(files.settings, required.linears)
    except (layer_spec.SpecError, re.error) as error:
        pattern = f"{error.pattern!r} is not a regular expression: " if isinstance(error, re.error) else ""
        files.add_finding("config", "config.json", f"quantization_config: {pattern}{error}")
        return {}
    for entry in unused:
        is_known = "*" in entry or entry.startswith("re:") or entry in required.modules
        if not is_known and not any(name.startswith(f"{entry}.") for name in required.shapes):
            message = f"the list of ignored modules has {entry!r}, which no module of the model has"
            files.add_finding("config", "config.json", message)
    layers: dict[str, LayerSpec] = {}
    for name, spec in specs.items():
        if _is_tied_copy(files, f"{name}.weight", required):
            continue
        if spec is not None and _is_packed(files, name):
            layers[name] = spec
        elif spec is None and (dtype := files.dtypes.get(f"{name}.weight")) in _EIGHT_BITS:
            message = f"is packed ({dtype}), and the list of ignored modules has {name}"
            files.add_finding("config", f"{name}.weight", message)
    known = set(required.shapes)
    for name, spec in layers.items():
        known |= _check_layer(files, name, spec, required.shapes[f"{name}.weight"])
    _check_names(files, known, required)
    _add_remarks(files, layers, required)
    for done, name in enumerate(files.shapes, start=1):
        _check_numbers(files, name)
        progress(done, len(files.shapes), "reading tensors")
    if files.changed:
        what = f"{files.changed[0]} ({len(files.changed)} such tensors) is not what Octavo wrote, by its checksum"
        files.remarks.append(f"{what}: another program has written the file since")
    return layers


def _is_tied_copy(files: CheckpointFiles, name: str, required: Required) -> bool:
    return name not in files.shapes and any(other in files.shapes for other in required.tied.get(name, []))


def _is_packed(files: CheckpointFiles, name: str) -> bool:
    """True if a layer that the settings do not ignore is packed, as it must be unless it is an output head."""
    dtype = files.dtypes.get(f"{name}.weight")
    if dtype is None or dtype in _EIGHT_BITS:
        return True
    if name.rpartition(".")[2] in _HEADS:  # readers of the other layouts leave heads unpacked
        if files.settings.get("quant_method") == "compressed-tensors":
            remark = f"the list of ignored modules lacks {name}, which is in {dtype}: transformers needs it"
            files.remarks.append(remark)
        return False
    files.add_finding(
        "config", f"{name}.weight",
        f"is stored in {dtype}, and the list of ignored modules lacks {name}: readers would open it as packed and "
        "compute nonsense",
    )  # fmt: skip
    return False


def _check_layer(files: CheckpointFiles, name: str, spec: LayerSpec, shape: Shape) -> set[str]:
    """Check the tensors of a packed layer; returns the names of its scales."""
    weight = f"{name}.weight"
    if files.dtypes.get(weight, spec.dtype) != spec.dtype:
        files.add_finding("tensor", weight, f"must be {spec.dtype}, it is {files.dtypes[weight]}")
    if misfit := spec.misfit(*shape):
        files.add_finding("tensor", weight, misfit)
    names = _check_weight_scale(files, name, spec, shape)
    if spec.inputs != "static":
        return names
    stored = f"{name}.{spec.input_scale}"
    found = files.shapes.get(stored)
    if found is None or math.prod(found) != 1:
        message = "is missing" if found is None else f"must be one number, it has shape {list(found)}"
        files.add_finding("scale", stored, message)
    return names | {stored}


def _check_weight_scale(files: CheckpointFiles, name: str, spec: LayerSpec, shape: Shape) -> set[str]:
    """Check the scale of a packed weight; returns its name, and the wrong names that it has instead."""
    scale = f"{name}.{spec.scale}"
    if scale not in files.shapes:
        others = [leaf for leaf in ("weight_scale", "weight_scale_inv") if f"{name}.{leaf}" in files.shapes]
        hint = f": there is a {others[0]}, the name of another layout" if others else ""
        files.add_finding("scale", scale, f"is missing{hint}")
        return {scale} | {f"{name}.{leaf}" for leaf in others}
    shapes = spec.scale_shapes(*shape)
    if files.shapes[scale] not in shapes:
        files.add_finding(
            "scale", scale,
            f"must have shape {list(shapes[0])}, for a weight {list(shape)} with a scale for each {spec}; it has "
            f"{list(files.shapes[scale])}",
        )  # fmt: skip
    dtypes = _EXPONENTS if spec.exponents else (*_FLOATS, *_EXPONENTS) if spec.pow2_inputs else _FLOATS
    if files.dtypes[scale] not in dtypes:
        files.add_finding("scale", scale, f"must be {' or '.join(dtypes)}, it is {files.dtypes[scale]}")
    return {scale}


def _check_names(files: CheckpointFiles, known: set[str], required: Required) -> None:
    declared = files.settings.get("kv_cache_scheme") or files.settings.get("kv_cache_quant_algo")
    cache: tuple[str, ...] = _CACHE_SCALES if declared else ()
    stored = files.shapes
    for name in sorted(required.shapes.keys() - stored.keys()):
        if not _is_tied_copy(files, name, required):
            files.add_finding("tensor", name, "is missing, and the model needs it")
    for name in sorted(stored.keys() - known):
        if not name.endswith(tuple(f".{leaf}" for leaf in (*cache, *_UNUSED))):
            files.add_finding("tensor", name, "has no place in the model that config.json describes")
    for name in sorted(required.shapes.keys() & stored.keys()):
        if (actual := stored[name]) != (expected := required.shapes[name]):
            files.add_finding("tensor", name, f"must have shape {list(expected)}, the file has {list(actual)}")


def _add_remarks(files: CheckpointFiles, layers: Mapping[str, LayerSpec], required: Required) -> None:
    """Add remarks on settings and tensors that some readers accept and others reject."""
    compressed = files.settings.get("quant_method") == "compressed-tensors"
    if compressed and files.settings.get("quantization_status") is None:
        files.remarks.append("config.json states no quantization_status: transformers opens the weights as unpacked")
    unused = [name for name in files.shapes if name.endswith(tuple(f".{leaf}" for leaf in _UNUSED))]
    unused = [name for name in unused if not name.endswith(("k_proj.output_scale", "v_proj.output_scale"))]
    if unused:
        files.remarks.append(f"{unused[0]} ({len(unused)} such tensors) is read by no layer here")
    for name, spec in layers.items():
        usual, *others = spec.scale_shapes(*required.shapes[f"{name}.weight"])
        scale = f"{name}.{spec.scale}"
        actual = files.shapes.get(scale, usual)
        if compressed and actual in others:
            files.remarks.append(f"{scale} has shape {list(actual)}: transformers accepts only {list(usual)}")
            break


def _check_numbers(files: CheckpointFiles, name: str) -> None:
    """Check that the bytes of a tensor are as Octavo wrote them, its numbers finite, and those of a scale positive."""
    tensor, written = files.get(name), files.recorded("checksums").get(name)
    if written is not None:
        found = f"{zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data):08x}"
        if found != written and name in files.by_octavo:
            message = f"is damaged: its bytes have the CRC-32 {found}, and {written} was written"
            files.add_finding("file", name, message)
        elif found != written:
            files.changed.append(name)
    is_scale = name.rpartition(".")[2] in (*_LAYER_SCALES, "output_scale", *_CACHE_SCALES)
    if is_scale and files.dtypes[name] in _EXPONENTS:
        zeros = layer_spec.decode_exponents(tensor) == 0
        wrong = {"NaN (255)": int((tensor.view(torch.uint8) == 255).sum()), "zero": int(zeros.sum())}
    elif files.dtypes[name] == "F8_E4M3":  # e4m3 has no inf, and one NaN of each sign
        wrong = {"NaN": int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())}
    elif not tensor.is_floating_point():
        return
    else:
        wide = tensor.float()
        wrong = {"NaN": int(wide.isnan().sum()), "inf": int(wide.isinf().sum())}
        if is_scale:
            tiny = ((wide > 0) & (wide < _SMALLEST)).sum()
            wrong |= {"zero": int((wide == 0).sum()), "negative": int((wide < 0).sum()), _TINY: int(tiny)}
    kind, must = ("scale", "positive and finite") if is_scale else ("tensor", "finite")
    for error, count in wrong.items():
        if count:
            files.add_finding(kind, name, f"must be {must}: {count} of {tensor.numel()} are {error}")


# ---- The scales of a packed weight beside its bytes, without MODEL.
#
#     s = amax / 448, so the largest byte of a block is 448, or 127 of integers
#     a row of e4m3 has no scale below 2^-8 of the largest, all others none below 2^-126: there, bytes may be smaller
#
# Powers of two are rounded up, and the rule mse takes up to 1.94 of that scale: the largest byte is then half, or more.


def judge_alone(data: Tensor, scale: Tensor, spec: LayerSpec, exact: bool) -> str:
    """What shows, without MODEL, that `octavo pack` did not write the data [N, K] or the scale of a weight; "" if
    nothing does. The scales are `exact` if they are amax / 448. One scale may be that of several weights."""
    if not spec.rows and not spec.columns:
        return ""
    exact = exact and not spec.exponents
    values, largest, slack = scale_values(scale, spec), spec.largest / (1 if exact else 2), 1.001 if exact else 4.0
    least = max(2.0**-126, 0.0 if spec.columns or spec.integers else float(values.max()) * 2.0**-8)
    reached = _blocks(numbers_of(data), spec).abs().amax((1, 3))
    wrong = (values < least / slack) | ((reached < largest) & (values > least * slack))
    if not wrong.any():
        return ""
    row, column = divmod(int(wrong.int().argmax()), wrong.shape[1])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} scales do not fit their bytes: [{row}, {column}] is "
        f"{values[row, column]:.4g} (the largest {values.max():.4g}), and the largest byte of its block "
        f"{reached[row, column]:g}, where octavo pack writes {largest:g}{'' if exact else ' or more'}"
    )


# ---- The weights of a packed folder against those of the model that it was packed from, MODEL.
#
# Rounding to nearest moves w / s by at most half a step of the numbers that bytes stand for, so each byte is judged by
# itself. A byte at the largest number may stand for any larger w / s. Where bytes are too far away, the scale s' that
# fits the weight of its block best, <w, data> / <data, data>, tells wrong scales from wrong bytes.


_SAME_DB = 12.0  # e4m3 bytes of a weight have 28 dB and more, those of another model's weight about 0
_SAME = 10 ** (_SAME_DB / 10)
_FACTOR = 1.25  # the most that clipping and rounding move s' / s from 1, however a program rounds
_CHUNK = 1 << 17  # elements, whose numbers in float32 stay in a core's cache
_FAR_DB = 6.0  # below its neighbours: twice the step of their bytes


class Judgement(NamedTuple):
    """A packed weight beside MODEL's: the SQNR in dB, the number of bytes beyond half a step, and the error or ""."""

    sqnr: float
    beyond: int
    error: str = ""


def check_weights(
    files: CheckpointFiles,
    layers: Mapping[str, LayerSpec],
    tensors: Mapping[str, Tensor],
    get: Callable[[str], Tensor],
    rounded: Collection[str],
    progress: Progress,
) -> dict[str, float]:
    """Add the tensors that differ from MODEL's (`tensors` without data, read by `get`) to `files.findings`, and return
    the SQNR of each packed weight in dB. Bytes of the layers `rounded` must be MODEL's weight, rounded to nearest;
    bytes of others that are not are a remark."""
    found: dict[str, Judgement] = {}
    scales = {f"{name}.{leaf}" for name, spec in layers.items() for leaf in (spec.scale, spec.input_scale)}
    names = {name for name in files.shapes if name.rpartition(".")[2] not in (*_UNUSED, *_CACHE_SCALES)} - scales
    for name in sorted(names - tensors.keys()):
        files.add_finding("weights", name, "MODEL has no such tensor: the folder is of another model")
    common = sorted(names & tensors.keys())
    for done, name in enumerate(common, start=1):
        progress(done, len(common), "comparing weights")
        expected, actual = list(tensors[name].shape), list(files.shapes[name])
        module = name.removesuffix(".weight")
        if expected != actual:
            error = f"MODEL has shape {expected}, the folder {actual}: it is of another model"
        elif name.endswith(".weight") and module in layers:
            scale = files.get(f"{module}.{layers[module].scale}")
            found[module] = judge(files.get(name), scale, layers[module], get(name), module in rounded)
            error = found[module].error
        else:
            stored = files.get(name)
            truth, dtype = get(name).to(stored.dtype), str(stored.dtype).removeprefix("torch.")
            same = torch.equal(stored, truth)
            error = "" if same else f"is not MODEL's, rounded to {dtype}: {sqnr(*energies(truth, stored)):.1f} dB"
        if error:
            files.add_finding("weights", name, error)
    ratios = {name: each.sqnr for name, each in found.items()}
    files.remarks += [
        f"{name}.weight has {db:.1f} dB, although each byte is rounded as its scale says: the scale is far too small, "
        "and clips, or far too large"
        for name, (db, _, error) in found.items()
        if db < _SAME_DB and not error
    ]
    beyond = {name: each.beyond for name, each in found.items() if name not in rounded}
    if any(beyond.values()):  # another program cast them, or they were cast twice
        most = max(beyond, key=lambda name: beyond[name])
        size = sum(files.nbytes(f"{name}.weight") for name in beyond)
        files.remarks.append(
            f"{sum(beyond.values())} of {size} bytes are not MODEL's weight / scale rounded to nearest, most in "
            f"{most}.weight ({beyond[most]}): the files do not say that octavo pack cast them, and another program may "
            "round in another way"
        )
    files.remarks += [
        f"{name}.weight has {ratios[name]:.1f} dB, and layers like it have {usual:.1f}: an outlier, or a wrong scale"
        for name, usual in far_below(ratios, layers).items()
    ]
    return ratios


def far_below(ratios: Mapping[str, float], layers: Mapping[str, LayerSpec]) -> dict[str, float]:
    """The layers whose SQNR is far below that of the layers of their place in other blocks, with these layers' median.

    Far is 6 dB, or four times the median distance from the median where the SQNR of such layers varies more.
    """
    groups: dict[tuple[str, LayerSpec], dict[str, float]] = defaultdict(dict)
    for name, db in ratios.items():
        groups[re.sub(r"\d+", "*", name), layers[name]][name] = db
    found: dict[str, float] = {}
    for group in groups.values():
        usual = median(group.values())
        far = max(_FAR_DB, 4 * median(abs(db - usual) for db in group.values()))
        found |= {name: usual for name, db in group.items() if len(group) > 2 and db < usual - far}
    return found


def judge(data: Tensor, scale: Tensor, spec: LayerSpec, truth: Tensor, rounded: bool) -> Judgement:
    """Compare the stored data [N, K] and scale of a packed weight with MODEL's weight `truth` [N, K]. If it is
    `rounded`, each byte must be the weight / scale rounded to nearest."""
    values = scale_values(scale, spec)
    db, beyond = _compare(data, values, spec, truth, scale.dtype, rounded and spec.exponents)
    count = int(beyond.sum())
    if not count and (rounded or db >= _SAME_DB):
        return Judgement(db, count)
    data, truth, each = numbers_of(data), truth.float(), spread(values, spec, data.shape)
    exact = sqnr(*energies(truth, data * each))
    if sqnr(*energies(truth, data / each)) > max(exact, _SAME_DB):
        error = "the scale is reciprocal: data / scale is MODEL's weight, and a scale must multiply"
        return Judgement(db, count, error)
    fitted = _sums(data * truth, spec) / _sums(data.square(), spec).clamp(min=1e-30)
    fits, still_beyond = _compare(data, fitted, spec, truth, scale.dtype)
    if fits < _SAME_DB:
        error = f"the bytes are not MODEL's weight ({exact:.1f} dB, whatever the scale): the folder is of another model"
    else:
        error = _name_scale_or_byte(data, values, spec, truth, fitted, beyond, still_beyond if rounded else None)
    return Judgement(db, count, error)


def _name_scale_or_byte(
    data: Tensor, values: Tensor, spec: LayerSpec, truth: Tensor, fitted: Tensor, beyond: Tensor, still: Tensor | None
) -> str:
    """The error of a weight, data and truth float32 [N, K], that the scales `fitted` make MODEL's; "" if it has none.
    `still` has the bytes that are `beyond` half a step by the scales `fitted` too; None if rounding is not judged."""
    quotients = truth / spread(values, spec, data.shape)
    factor = torch.maximum(fitted / values, values / fitted)
    wrong = ~(factor <= _FACTOR)  # counts NaN
    if still is not None and not spec.exponents:  # a wrong exponent is off by a factor of two
        wrong |= 2 * _sums(still, spec) < _sums(beyond, spec)
    wrong &= _blocks(data, spec).abs().amax((1, 3)) >= 1  # smaller bytes have too few bits to judge their scale
    errors, signals = (_sums(t.square(), spec) for t in (data * spread(fitted, spec, data.shape) - truth, truth))
    scales = wrong & (errors < signals / _SAME)
    if scales.any():
        row, column = divmod(int(torch.where(scales, factor, 0).nan_to_num(torch.inf).argmax()), factor.shape[1])
        return (
            f"the bytes are MODEL's and {int(scales.sum())} of {factor.numel()} scales are not: [{row}, {column}] is "
            f"{values[row, column]:.4g} and should be about {fitted[row, column]:.4g}"
        )
    if not wrong.any() and not (still is not None and beyond.any()):
        return ""
    row, column = divmod(int((beyond * (quotients - data).abs()).argmax()), data.shape[1])
    should = nearest(quotients[row, column], spec)
    return (
        f"{int(beyond.sum())} of {data.numel()} bytes are not MODEL's weight / scale rounded to nearest: "
        f"[{row}, {column}] is {data[row, column]:g} and should be {should:g}"
    )


def _compare(
    data: Tensor, values: Tensor, spec: LayerSpec, truth: Tensor, scale_dtype: torch.dtype, exact: bool = False
) -> tuple[float, Tensor]:
    """The SQNR in dB, and for each byte [N, K] whether it lies beyond half a step from the weight / scale. With `exact`
    scales, powers of two, weight / scale is not rounded, and so an odd byte at half a step is wrong."""
    signal = noise = 0.0
    beyond = torch.empty(data.shape, dtype=torch.bool)
    blocks = max(_CHUNK // (data.shape[1] * max(spec.rows, 1)), 1)  # of rows, in a chunk
    step = blocks * max(spec.rows, 1)
    for i, start in enumerate(range(0, len(data), step)):
        d, w = numbers_of(data[start : start + step]), truth[start : start + step].float()
        s = spread(values[i * blocks : (i + 1) * blocks] if spec.rows else values, spec, d.shape)
        signal += float(w.square().sum())
        noise += float((d * s).sub_(w).square_().sum())
        x = (w / s).clamp_(-spec.largest, spec.largest)
        far = (x - d.clamp_(min=-spec.largest)).abs_()  # other programs have the integer -128
        part = torch.gt(far, layer_spec.half_step(x, spec, scale_dtype), out=beyond[start : start + step])
        if exact:
            odd = data[start : start + step].view(torch.uint8).bitwise_and(1).bool()
            part |= odd & (far == layer_spec.half_step(x, spec, scale_dtype, tie=0.0))
    return sqnr(signal, noise), beyond


def _blocks(matrix: Tensor, spec: LayerSpec) -> Tensor:
    """[N, K] as [blocks, rows, blocks, columns], padded with zeros."""
    n, k = matrix.shape
    rows, columns = spec.rows or n, spec.columns or k
    padded = pad(matrix, (0, -k % columns, 0, -n % rows))
    return padded.view(padded.shape[0] // rows, rows, -1, columns)


def _sums(matrix: Tensor, spec: LayerSpec) -> Tensor:
    return _blocks(matrix.float(), spec).sum((1, 3))
