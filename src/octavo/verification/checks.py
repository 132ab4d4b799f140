"""Checks of a packed folder's settings and tensors by themselves.

The folder must have every tensor of its model, with the shape, the dtype and the name that its quantization_config
requires. All numbers must be finite and all scales positive. `octavo.verification.weights` compares the weights with
MODEL's.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from octavo.progress import Progress, no_progress
from octavo.verification.files import CheckpointFiles
from octavo.verification.layer_spec import LayerSpec, SpecError, read_specs
from octavo.verification.numbers import decode_exponents

Shape = tuple[int, ...]

_FLOATS, _EXPONENTS = ("F32", "BF16", "F16"), ("U8", "F8_E8M0")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")
_LAYER_SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
_UNUSED = ("output_scale", "prob_scale", "weight_zero_point", "input_zero_point")  # no layer reads these
_HEADS = ("lm_head", "embed_out", "score", "classifier")


class Required(NamedTuple):
    """The tensors that a model needs.

    Attributes:
        shapes: of each tensor.
        linears: the names of the linear layers.
        tied: for each parameter, all names of it.
    """

    shapes: Mapping[str, Shape]
    linears: list[str]
    tied: Mapping[str, list[str]]


def check_folder(files: CheckpointFiles, required: Required, progress: Progress = no_progress) -> dict[str, LayerSpec]:
    """Add the errors in the settings and tensors to `files.findings`; returns the specs of the packed layers."""
    try:
        specs, unused = read_specs(files.settings, required.linears)
    except SpecError as error:
        files.add_finding("config", "config.json", f"quantization_config: {error}")
        return {}
    _check_ignored(files, unused, required)
    layers: dict[str, LayerSpec] = {}
    for name, spec in specs.items():
        if _is_tied_copy(files, f"{name}.weight", required):
            continue
        if spec is None:
            _check_ignored_layer(files, name)
        elif _is_packed(files, name):
            layers[name] = _with_stored_names(files, name, spec)
    known = set(required.shapes)
    for name, spec in layers.items():
        known |= _check_layer(files, name, spec, required.shapes[f"{name}.weight"])
    _check_names(files, known, required)
    _add_remarks(files, layers, required)
    for done, name in enumerate(files.shapes, start=1):
        _check_numbers(files, name)
        progress(done, len(files.shapes), "reading tensors")
    return layers


def _check_ignored(files: CheckpointFiles, unused: list[str], required: Required) -> None:
    """Check that the list of ignored modules names modules of the model."""
    for entry in unused:
        is_pattern = "*" in entry or entry.startswith("re:")
        if not is_pattern and not any(name.startswith(f"{entry}.") for name in required.shapes):
            message = f"the list of ignored modules has {entry!r}, which is not a linear layer"
            files.add_finding("config", "config.json", message)


def _is_tied_copy(files: CheckpointFiles, name: str, required: Required) -> bool:
    """Whether the tensor is not stored and a tensor that it is tied to is."""
    return name not in files.shapes and any(other in files.shapes for other in required.tied.get(name, []))


def _check_ignored_layer(files: CheckpointFiles, name: str) -> None:
    """Check that a layer that the settings ignore is not packed."""
    if (dtype := files.dtypes.get(f"{name}.weight")) in _EIGHT_BITS:
        message = f"is packed ({dtype}), and the list of ignored modules has {name}"
        files.add_finding("config", f"{name}.weight", message)


def _is_packed(files: CheckpointFiles, name: str) -> bool:
    """Whether a layer that the settings do not ignore is packed, as it must be unless it is an output head."""
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


def _with_stored_names(files: CheckpointFiles, name: str, spec: LayerSpec) -> LayerSpec:
    """The spec with the names that transformers gives the scales of whole tensors, if the folder has those."""
    if spec.flat and files.settings.get("quant_method") == "fp8" and f"{name}.weight_scale_inv" in files.shapes:
        return replace(spec, scale="weight_scale_inv", input_scale="activation_scale")
    return spec


def _check_layer(files: CheckpointFiles, name: str, spec: LayerSpec, shape: Shape) -> set[str]:
    """Check the tensors of a packed layer; returns the names of its scales."""
    weight = f"{name}.weight"
    if files.dtypes.get(weight, spec.dtype) != spec.dtype:
        files.add_finding("tensor", weight, f"must be {spec.dtype}, it is {files.dtypes[weight]}")
    if misfit := spec.misfit(*shape):
        files.add_finding("tensor", weight, misfit)
    names = _check_weight_scale(files, name, spec, shape)
    if spec.inputs == "static":
        stored = f"{name}.{spec.input_scale}"
        names.add(stored)
        found = files.shapes.get(stored)
        if found is None or math.prod(found) != 1:
            message = "is missing" if found is None else f"must be one number, it has shape {list(found)}"
            files.add_finding("scale", stored, message)
    return names


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
    """Check that no tensor is missing, left over, or of another shape."""
    settings = files.settings if isinstance(files.settings, dict) else {}
    declared = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    autofp8 = settings.get("quant_method") == "fp8" and not settings.get("weight_block_size")
    # AutoFP8 stores scales of a KV cache without declaring them.
    cache: tuple[str, ...] = _CACHE_SCALES if declared or autofp8 else ()
    for name in sorted(required.shapes.keys() - files.shapes.keys()):
        if not _is_tied_copy(files, name, required):
            files.add_finding("tensor", name, "is missing, and the model needs it")
    for name in sorted(files.shapes.keys() - known):
        if not name.endswith(tuple(f".{leaf}" for leaf in (*cache, *_UNUSED))):
            files.add_finding("tensor", name, "has no place in the model that config.json describes")
    for name in sorted(required.shapes.keys() & files.shapes.keys()):
        expected, actual = required.shapes[name], files.shapes[name]
        if actual != expected:
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
        actual = files.shapes.get(f"{name}.{spec.scale}", usual)
        if compressed and actual in others:
            files.remarks.append(
                f"{name}.{spec.scale} has shape {list(actual)}: transformers accepts only {list(usual)}"
            )
            break


def _check_numbers(files: CheckpointFiles, name: str) -> None:
    """Check that the numbers of a tensor are finite, and those of a scale positive."""
    tensor = files.get(name)
    is_scale = name.rpartition(".")[2] in (*_LAYER_SCALES, "output_scale", *_CACHE_SCALES)
    if is_scale and files.dtypes[name] in _EXPONENTS:
        zeros = decode_exponents(tensor) == 0
        wrong = {"NaN (255)": int((tensor.view(torch.uint8) == 255).sum()), "zero": int(zeros.sum())}
    elif files.dtypes[name] == "F8_E4M3":  # e4m3 has no inf, and one NaN of each sign
        wrong = {"NaN": int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())}
    elif not tensor.is_floating_point():
        return
    else:
        wide = tensor.float()
        wrong = {"NaN": int(wide.isnan().sum()), "inf": int(wide.isinf().sum())}
        if is_scale:
            wrong |= {"zero": int((wide == 0).sum()), "negative": int((wide < 0).sum())}
    kind, must = ("scale", "positive and finite") if is_scale else ("tensor", "finite")
    for error, count in wrong.items():
        if count:
            files.add_finding(kind, name, f"must be {must}: {count} of {tensor.numel()} are {error}")


def belongs_to_packing(name: str, layers: Mapping[str, LayerSpec]) -> bool:
    """Whether a tensor is a scale, and so is not in MODEL."""
    module, _, leaf = name.rpartition(".")
    scales = (layers[module].input_scale, layers[module].scale) if module in layers else ()
    return leaf in (*_UNUSED, *_CACHE_SCALES, *scales)
