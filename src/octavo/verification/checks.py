"""What is wrong with the tensors of a packed folder: by themselves, and against the model that it was packed from.

By itself a folder must have every tensor of its model, each of the shape, the dtype and the name that its
quantization_config asks for, numbers that are finite and scales that are positive. Against MODEL it must hold MODEL's
weights, which tells scales that are wrong from bytes that are: for each block that shares a scale s, the s' of least
squares is <w, data> / <data, data>, and s' / s is 1 but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.artifact.packed.plausible import reciprocal_warning, suspected
from octavo.evaluation.metrics import energies, sqnr
from octavo.progress import Progress, no_progress
from octavo.verification.files import Bytes
from octavo.verification.layer_spec import Words, WordsError, read_words
from octavo.verification.numbers import scale_values, spread, widen

Shape = tuple[int, ...]

_FLOATS, _EXPONENTS = ("F32", "BF16", "F16"), ("U8", "F8_E8M0")
_SAME_DB = 12.0  # bytes of e4m3 give 28 dB and more; another model's weights give 0
_FACTOR = 1.25  # what clipping and rounding leave of s' / s
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")
_LAYER_SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
_UNUSED = ("output_scale", "prob_scale", "weight_zero_point", "input_zero_point")  # what no layer reads
_HEADS = ("lm_head", "embed_out", "score", "classifier")


class Required(NamedTuple):
    """What a model needs: the shape of each tensor, its linear layers, and the names that stand for one tensor."""

    shapes: Mapping[str, Shape]
    linears: list[str]
    tied: Mapping[str, list[str]]


def check_folder(read: Bytes, required: Required, progress: Progress = no_progress) -> dict[str, Words]:
    """Note in `read` what is wrong with its settings and tensors; returns the layers that are packed."""
    stored = [name for name in required.linears if not _stands_elsewhere(read, f"{name}.weight", required)]
    try:
        words, unused = read_words(read.settings, required.linears)
    except WordsError as error:
        read.found("config", "config.json", f"quantization_config: {error}")
        return {}
    for entry in unused:
        if "*" in entry or entry.startswith("re:") or any(name.startswith(f"{entry}.") for name in required.shapes):
            continue  # a pattern, or a module that is no linear layer: nobody would have packed it
        read.found("config", "config.json", f"the list of ignored modules has {entry!r}, which is no linear layer")
    packed = {name: words[name] for name in stored if _is_packed(read, name, words[name])}
    layers = {name: _as_named(read, name, how) for name, how in packed.items() if how is not None}
    known = set(required.shapes)
    for name, how in layers.items():
        known |= _check_layer(read, name, how, required.shapes[f"{name}.weight"])
    _check_names(read, known, layers, required)
    _remark(read, layers, required)
    for done, name in enumerate(read.shapes, start=1):
        _check_numbers(read, name)
        progress(done, len(read.shapes), "reading tensors")
    return layers


def _stands_elsewhere(read: Bytes, name: str, required: Required) -> bool:
    """Whether it is not stored, and a tensor that it is tied to is."""
    return name not in read.shapes and any(other in read.shapes for other in required.tied.get(name, []))


def _is_packed(read: Bytes, name: str, words: Words | None) -> bool:
    """Whether a layer is packed, of which the settings say `words`, and the bytes something that must fit them."""
    dtype = read.dtypes.get(f"{name}.weight")
    eight_bits = dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8")
    if words is None and eight_bits:
        read.found("config", f"{name}.weight", f"is packed ({dtype}), and the list of ignored modules has {name}")
    if words is not None and dtype is not None and not eight_bits and name.rpartition(".")[2] in _HEADS:
        if read.settings.get("quant_method") == "compressed-tensors":
            read.remarks.append(f"the list of ignored modules lacks {name}, which is in {dtype}: transformers needs it")
        return False  # which readers of the other layouts never take for packed
    if words is not None and dtype is not None and not eight_bits:
        read.found(
            "config", f"{name}.weight",
            f"is stored in {dtype}, and the list of ignored modules lacks {name}: readers take it for packed, and "
            "compute nonsense",
        )  # fmt: skip
        return False
    return words is not None


def _as_named(read: Bytes, name: str, words: Words) -> Words:
    """`words` with the names that transformers gives the scales of whole tensors, where the folder has those."""
    if words.flat and read.settings.get("quant_method") == "fp8" and f"{name}.weight_scale_inv" in read.shapes:
        return replace(words, scale="weight_scale_inv", input_scale="activation_scale")
    return words


def _remark(read: Bytes, layers: Mapping[str, Words], required: Required) -> None:
    """Note what one reader takes and another does not."""
    if read.settings.get("quant_method") == "compressed-tensors" and read.settings.get("quantization_status") is None:
        read.remarks.append(
            "config.json states no quantization_status: transformers takes the weights for such as were never packed"
        )
    unused = [name for name in read.shapes if name.endswith(tuple(f".{leaf}" for leaf in _UNUSED))]
    unused = [name for name in unused if not name.endswith(("k_proj.output_scale", "v_proj.output_scale"))]
    if unused:
        read.remarks.append(f"{unused[0]} ({len(unused)} such tensors) is read by no layer here")
    for name, words in layers.items():
        usual, *others = words.scale_shapes(*required.shapes[f"{name}.weight"])
        found = read.shapes.get(f"{name}.{words.scale}", usual)
        if found in others and read.settings.get("quant_method") == "compressed-tensors":
            read.remarks.append(f"{name}.{words.scale} has shape {list(found)}: transformers takes only {list(usual)}")
            break


def _check_layer(read: Bytes, name: str, words: Words, shape: Shape) -> set[str]:
    """Check the specs of a packed layer; returns the names of its scales."""
    weight, scale = f"{name}.weight", f"{name}.{words.scale}"
    n, k = shape
    if read.dtypes.get(weight, words.dtype) != words.dtype:
        read.found("tensor", weight, f"must be {words.dtype}, it is {read.dtypes[weight]}")
    if misfit := words.misfit(n, k):
        read.found("tensor", weight, misfit)
    names = {scale}
    if scale not in read.shapes:
        near = [other for other in ("weight_scale", "weight_scale_inv") if f"{name}.{other}" in read.shapes]
        names |= {f"{name}.{other}" for other in near}
        read.found(
            "scale", scale, "is missing" + (f": there is a {near[0]}, the name of another layout" if near else "")
        )
    else:
        shapes = words.scale_shapes(n, k)
        if read.shapes[scale] not in shapes:
            read.found(
                "scale", scale,
                f"must have shape {list(shapes[0])}, for a weight [{n}, {k}] with a scale for each "
                f"{words}; it has {list(read.shapes[scale])}",
            )  # fmt: skip
        wanted = _EXPONENTS if words.exponents else (*_FLOATS, *_EXPONENTS) if words.pow2_inputs else _FLOATS
        if read.dtypes[scale] not in wanted:
            read.found("scale", scale, f"must be {' or '.join(wanted)}, it is {read.dtypes[scale]}")
    if words.inputs == "static":
        stored = f"{name}.{words.input_scale}"
        names.add(stored)
        found = read.shapes.get(stored)
        if found is None or math.prod(found) != 1:
            read.found("scale", stored, "is missing" if found is None else f"must be one number, it is {found}")
    return names


def _check_names(read: Bytes, known: set[str], layers: Mapping[str, Words], required: Required) -> None:
    settings = read.settings if isinstance(read.settings, dict) else {}
    declared = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    of_autofp8 = settings.get("quant_method") == "fp8" and not settings.get("weight_block_size")
    cache: tuple[str, ...] = _CACHE_SCALES if declared or of_autofp8 else ()  # AutoFP8 has them without a word
    for name in sorted(required.shapes.keys() - read.shapes.keys()):
        if not _stands_elsewhere(read, name, required):
            read.found("tensor", name, "is missing, and the model needs it")
    for name in sorted(read.shapes.keys() - known):
        if not name.endswith(tuple(f".{leaf}" for leaf in (*cache, *_UNUSED))):
            read.found("tensor", name, "has no place in the model that config.json describes")
    for name in sorted(required.shapes.keys() & read.shapes.keys()):
        if read.shapes[name] != required.shapes[name]:
            wanted, found = list(required.shapes[name]), list(read.shapes[name])
            read.found("tensor", name, f"must have shape {wanted}, the file has {found}")


def _check_numbers(read: Bytes, name: str) -> None:
    """Numbers that are not finite, and scales that are not positive."""
    tensor = read.get(name)
    leaf = name.rpartition(".")[2]
    scale = leaf in (*_LAYER_SCALES, "output_scale", *_CACHE_SCALES)
    if scale and read.dtypes[name] in _EXPONENTS:
        values = scale_values(tensor, Words(1, 1, "none", exponents=True))
        wrong = {"NaN (255)": int((tensor.view(torch.uint8) == 255).sum()), "zero": int((values == 0).sum())}
    elif read.dtypes[name] == "F8_E4M3":  # which has no inf, and one NaN of either sign
        wrong = {"NaN": int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())}
    elif not tensor.is_floating_point():
        return
    else:
        wide = tensor.float()
        wrong = {"NaN": int(wide.isnan().sum()), "inf": int(wide.isinf().sum())}
        if scale:
            wrong |= {"zero": int((wide == 0).sum()), "negative": int((wide < 0).sum())}
    for what, count in wrong.items():
        if count:
            must = "positive and finite" if scale else "finite"
            read.found("scale" if scale else "tensor", name, f"must be {must}: {count} of {tensor.numel()} are {what}")


# --- Against MODEL ---------------------------------------------------------------------------------------------------


def check_weights(
    read: Bytes,
    layers: Mapping[str, Words],
    shapes: Mapping[str, Shape],
    truth: Callable[[str], Tensor],
    progress: Progress = no_progress,
) -> dict[str, float]:
    """Note in `read` what is not MODEL's, whose tensors have `shapes` and are got by `truth`.

    Returns:
        The SQNR of each packed weight in dB, where nothing was folded into the weights.
    """
    if read.folded:
        _check_plausible(read, layers)
        return {}
    found: dict[str, float] = {}
    mine = {name for name in read.shapes if not _belongs_to_packing(name, layers)}
    for name in sorted(mine - shapes.keys()):
        read.found("weights", name, "MODEL has no such tensor: the folder is of another model")
    common = sorted(mine & shapes.keys())
    for done, name in enumerate(common, start=1):
        progress(done, len(common), "comparing weights")
        if shapes[name] != read.shapes[name]:
            wanted, is_here = list(shapes[name]), list(read.shapes[name])
            read.found("weights", name, f"MODEL has shape {wanted}, the folder {is_here}: it is of another model")
            continue
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in layers:
            scale = read.get(f"{module}.{layers[module].scale}")
            found[module], wrong = diagnose(read.get(name), scale, layers[module], truth(name))
        else:
            wrong = _difference(read.get(name), truth(name))
        if wrong:
            read.found("weights", name, wrong)
    return found


def _check_plausible(read: Bytes, layers: Mapping[str, Words]) -> None:
    """Note scales that look reciprocal by their size, for folded weights, which cannot be compared with MODEL's."""
    suspects = suspected(_scales_and_weight(read, *layer) for layer in layers.items() if not layer[1].integers)
    if suspects:
        read.found("scale", f"{suspects[0]}.{layers[suspects[0]].scale}", reciprocal_warning(suspects, len(layers)))


def _scales_and_weight(read: Bytes, name: str, words: Words) -> tuple[str, Tensor, Callable[[], Tensor]]:
    data, scale = read.get(f"{name}.weight"), read.get(f"{name}.{words.scale}")
    return name, scale_values(scale, words), partial(widen, data, scale, words)


def _belongs_to_packing(name: str, layers: Mapping[str, Words]) -> bool:
    module, _, leaf = name.rpartition(".")
    scales = (layers[module].input_scale, layers[module].scale) if module in layers else ()
    return leaf in (*_UNUSED, *_CACHE_SCALES, *scales)


def _difference(stored: Tensor, truth: Tensor) -> str:
    """How a tensor that is not packed differs from MODEL's, rounded as it is stored; or nothing."""
    wanted = truth.to(stored.dtype)
    if torch.equal(stored, wanted):
        return ""
    return f"is not MODEL's, rounded to {stored.dtype}: {sqnr(*energies(wanted, stored)):.1f} dB"


def diagnose(data: Tensor, scale: Tensor, words: Words, truth: Tensor) -> tuple[float, str]:
    """The SQNR in dB of a packed weight [N, K] against MODEL's, and what is wrong with it, or nothing."""
    data, truth, values = data.float(), truth.float(), scale_values(scale, words)
    full = spread(values, words, data.shape)
    db = sqnr(*energies(truth, data * full))
    if sqnr(*energies(truth, data / full)) > max(db, _SAME_DB):
        return db, "the scale is reciprocal: data / scale is MODEL's weight, and a scale must multiply"
    fitted = _fit(data, words, truth)
    if sqnr(*energies(truth, data * spread(fitted, words, data.shape))) < _SAME_DB:
        return db, f"the bytes are not MODEL's weight ({db:.1f} dB, whatever the scale): the folder is of another model"
    factor = torch.maximum(fitted / values, values / fitted)
    factor = torch.where(_blocks(data, words).abs().amax((1, 3)) >= 1, factor, 1.0)  # else too few bits to say
    wrong = ~(factor <= _FACTOR)
    if not wrong.any():
        return db, ""
    row, column = divmod(int(factor.nan_to_num(torch.inf).argmax()), factor.shape[1])
    return db, (
        f"the bytes are MODEL's and {int(wrong.sum())} of {factor.numel()} scales are not: [{row}, {column}] is "
        f"{values[row, column]:.4g} and should be about {fitted[row, column]:.4g}"
    )


def _blocks(matrix: Tensor, words: Words) -> Tensor:
    """[N, K] as [blocks, rows, blocks, columns], padded with zeros."""
    n, k = matrix.shape
    rows, columns = words.rows or n, words.columns or k
    padded = pad(matrix, (0, -k % columns, 0, -n % rows))
    return padded.view(padded.shape[0] // rows, rows, -1, columns)


def _fit(data: Tensor, words: Words, truth: Tensor) -> Tensor:
    """The scale of each block that brings data nearest to the truth."""
    d, w = _blocks(data, words), _blocks(truth, words)
    return (d * w).sum((1, 3)) / d.square().sum((1, 3)).clamp(min=1e-30)
