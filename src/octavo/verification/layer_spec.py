"""The quantization of each linear layer, read from a quantization_config; `octavo.verification.numbers` applies it.

This module follows docs/format.md and the documentation of compressed-tensors, transformers and ModelOpt, and uses no
code of Octavo that packs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

_E4M3, _INT8 = 448.0, 127.0
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized", "mixed-precision")
_METHODS = ("compressed-tensors", "fp8", "modelopt")


# The names of docs/packing.md, by the description of the weight's and the input's scales.
_SCHEMES = {
    "channel, input token": "channel", "tensor, input token": "tensor", "tensor, input static": "static",
    "128x128, input token of 128": "block", "1x32 (powers of two), input token of 32": "mx",
    "int8 channel, input token": "int8", "channel, input none": "weight", "tensor, input none": "weight, tensor",
    "128x128, input none": "weight, block",
} | {f"1x{size}, input token of {size}": f"group{size}" for size in (32, 64, 128)}  # fmt: skip


class SpecError(ValueError):
    """A quantization_config that cannot be read. The message names the setting."""


@dataclass(frozen=True)
class LayerSpec:
    """The quantization of one layer. `per_tensor` and `per_channel` make the common ones.

    Attributes:
        rows, columns: the block of the weight [N, K] that shares a scale; 0 stands for all rows or columns.
        inputs: "none" (not rounded), "static" (input_scale is stored), "tensor" (one dynamic scale), or "token" (one
            dynamic scale a token).
        group: for "token", the number of neighbours in a token that share a scale; 0 stands for all.
        exponents: scales are powers of two, stored as bytes e + 127.
        integers: the numbers are int8, not e4m3.
        flat: scales have ModelOpt's shapes: a scalar for a tensor, [N] for channels, [N, 1, K, 1] for blocks.
        scale, input_scale: the last parts of the scales' names.
        pow2_inputs: the scales of inputs are powers of two. They are with `exponents`, too.
    """

    rows: int
    columns: int
    inputs: str
    group: int = 0
    exponents: bool = False
    integers: bool = False
    flat: bool = False
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    pow2_inputs: bool = False

    @classmethod
    def per_tensor(cls, inputs: str, **settings: Any) -> Self:
        return cls(0, 0, inputs, **settings)

    @classmethod
    def per_channel(cls, inputs: str, **settings: Any) -> Self:
        """One scale for each row of the weight."""
        return cls(1, 0, inputs, **settings)

    @property
    def dtype(self) -> str:
        """The dtype of the weight, as safetensors spells it."""
        return "I8" if self.integers else "F8_E4M3"

    @property
    def largest(self) -> float:
        return _INT8 if self.integers else _E4M3

    def scale_shapes(self, n: int, k: int) -> list[tuple[int, ...]]:
        """The shapes that the scale of a weight [N, K] may have, the usual one first."""
        if not self.rows and not self.columns:
            return [(), (1,), (1, 1)] if self.flat else [(1,), (), (1, 1)]
        shape = (-(-n // (self.rows or n)), -(-k // (self.columns or k)))
        other = (shape[0], 1, shape[1], 1) if self.columns else (n,)
        return [other, shape] if self.flat else [shape, other]

    def misfit(self, n: int, k: int) -> str:
        """Why a weight [N, K] does not divide into these blocks, or "". The last square block may be smaller."""
        if self.rows <= 1 and k % (self.columns or k):
            return f"has shape [{n}, {k}], which is not a multiple of its blocks of {self.rows} x {self.columns}"
        return ""

    def __str__(self) -> str:
        """The name of the scheme (docs/packing.md), or a description of a quantization that has none."""
        if not self.rows and not self.columns:
            weight = "tensor"
        elif not self.columns:
            weight = "channel"
        else:
            weight = f"{self.rows}x{self.columns}" + (" (powers of two)" if self.exponents else "")
        inputs = f"{self.inputs} of {self.group}" if self.group else self.inputs
        described = f"{'int8 ' if self.integers else ''}{weight}, input {inputs}"
        return _SCHEMES.get(described, described) + (", pow2 inputs" if self.pow2_inputs else "")


_MODELOPT = {
    "FP8": LayerSpec.per_tensor("static", flat=True),
    "FP8_PER_CHANNEL_PER_TOKEN": LayerSpec.per_channel("token", flat=True),
    "FP8_PB_WO": LayerSpec(128, 128, "token", 128, flat=True),  # "weight only", but vLLM rounds the inputs like this
}


def read_specs(settings: Any, linears: Sequence[str]) -> tuple[dict[str, LayerSpec | None], list[str]]:
    """Read how each linear layer is quantized.

    Args:
        settings: the quantization_config.
        linears: the names of the model's linear layers.

    Returns:
        The spec of each layer (None: the settings ignore it), and the entries of the list of ignored modules that match
        no layer.

    Raises:
        SpecError: the settings cannot be read.
    """
    if not isinstance(settings, Mapping):
        raise SpecError(f"config.json must have a quantization_config, it has {settings!r}")
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise SpecError(f"quant_method must be one of {', '.join(_METHODS)}, it is {method!r}")
    exact = method == "compressed-tensors"
    ignored = _ignored(settings)
    groups = _groups(settings) if exact else [(["Linear"], _spec_of_all(settings, method))]
    specs: dict[str, LayerSpec | None] = {}
    used: set[str] = set()
    for name in linears:
        entries = [entry for entry in ignored if _ignores(entry, name, exact)]
        used.update(entries)
        specs[name] = None if entries else _spec_of(name, groups)
    return specs, [entry for entry in ignored if entry not in used]


def _ignored(settings: Mapping[str, Any]) -> list[str]:
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        if (names := settings.get(key)) is not None:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise SpecError(f"{key} must be a list of names of modules, it is {names!r}")
            return list(names)
    return []


def _ignores(entry: str, name: str, exact: bool) -> bool:
    """Whether an entry of the list of ignored modules matches a layer; `exact` is compressed-tensors' rule."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if exact:
        return entry in (name, "Linear")
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}") or fnmatchcase(name, entry)


def _spec_of(name: str, groups: Sequence[tuple[list[str], LayerSpec]]) -> LayerSpec:
    """The spec of the group that targets a layer: by its name, else by a pattern, else by its class."""
    for matches in (
        lambda target: target == name,
        lambda target: target.startswith("re:") and re.match(target.removeprefix("re:"), name),
        lambda target: target == "Linear",
    ):
        for targets, spec in groups:
            if any(map(matches, targets)):
                return spec
    raise SpecError(f"neither config_groups nor ignore has {name}")


def _groups(settings: Mapping[str, Any]) -> list[tuple[list[str], LayerSpec]]:
    if (status := settings.get("quantization_status")) not in ("compressed", None):  # other writers may not state it
        raise SpecError(
            f'quantization_status must be "compressed", it is {status!r}: transformers would quantize the bytes again'
        )
    if (form := settings.get("format")) not in _FORMATS:
        raise SpecError(f"format must be one of {', '.join(_FORMATS)}, it is {form!r}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SpecError(f"config_groups must hold groups, it is {groups!r}")
    return [_group(f"config_groups.{name}", group) for name, group in groups.items()]


def _group(where: str, group: Any) -> tuple[list[str], LayerSpec]:
    targets: Any = group.get("targets") if isinstance(group, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    has_names = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not has_names or not isinstance(weights, Mapping):
        raise SpecError(f"{where} must have targets (names) and weights, it is {group!r}")
    integers = _are_integers(weights, f"{where}.weights")
    rows, columns = _block(weights, f"{where}.weights")
    inputs, size = _inputs(group.get("input_activations"), f"{where}.input_activations")
    exponents = weights.get("scale_dtype") == "torch.uint8"
    return list(targets), LayerSpec(rows, columns, inputs, size, exponents, integers)


def _are_integers(arguments: Mapping[str, Any], where: str) -> bool:
    """Whether the numbers are integers; a SpecError unless they are symmetric and have eight bits."""
    kind, bits, symmetric = arguments.get("type"), arguments.get("num_bits"), arguments.get("symmetric", True)
    if bits != 8 or kind not in ("float", "int") or symmetric is not True:
        raise SpecError(
            f"{where} must have num_bits 8, type float or int, and symmetric true; it has {bits!r}, {kind!r}, "
            f"{symmetric!r}"
        )
    return bool(kind == "int")


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    """The rows and columns of a weight that share a scale; 0 stands for all."""
    strategy, size, shape = weights.get("strategy"), weights.get("group_size"), weights.get("block_structure")
    if isinstance(shape, str):  # such as "128x128"
        shape = [int(part) for part in shape.split("x") if part.isdigit()]
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group" and isinstance(size, int) and size > 0:
        return 1, size
    if strategy == "block" and _is_shape(shape):
        return int(shape[0]), int(shape[1])  # type: ignore[index]
    raise SpecError(
        f"{where}.strategy must be tensor, channel, group (with group_size) or block (with block_structure), it is "
        f"{strategy!r} ({size!r}, {shape!r})"
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)


def _inputs(arguments: Any, where: str) -> tuple[str, int]:
    """The attributes `inputs` and `group` of a spec."""
    if arguments is None:
        return "none", 0
    if not isinstance(arguments, Mapping):
        raise SpecError(f"{where} must be an object or null, it is {arguments!r}")
    _are_integers(arguments, where)
    strategy, dynamic, size = arguments.get("strategy"), arguments.get("dynamic"), arguments.get("group_size")
    if strategy == "tensor":
        return ("tensor" if dynamic else "static"), 0
    if strategy == "token" and dynamic:
        return "token", 0
    if strategy == "group" and dynamic and isinstance(size, int) and size > 0:
        return "token", size
    raise SpecError(
        f"{where}.strategy must be tensor, or dynamic and token or group; it is {strategy!r}, dynamic {dynamic!r}"
    )


def _spec_of_all(settings: Mapping[str, Any], method: str) -> LayerSpec:
    """The one spec of layouts that quantize all layers alike: ModelOpt's and transformers' fp8."""
    if method == "modelopt":
        algorithm = str(settings.get("quant_algo")).upper()
        if algorithm not in _MODELOPT:
            raise SpecError(f"quant_algo must be one of {', '.join(_MODELOPT)}, it is {settings.get('quant_algo')!r}")
        return _MODELOPT[algorithm]
    scheme, block = settings.get("activation_scheme"), settings.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise SpecError(f"activation_scheme must be dynamic or static, it is {scheme!r}")
    if block is None:
        return LayerSpec.per_tensor("static" if scheme == "static" else "token", flat=True)
    if not _is_shape(block) or scheme == "static":
        raise SpecError(f"weight_block_size must be two sizes, with dynamic activations; it is {block!r}, {scheme}")
    if (scale_fmt := settings.get("scale_fmt", "float")) not in ("float", "ue8m0"):
        raise SpecError(f"scale_fmt must be float or ue8m0, it is {scale_fmt!r}")
    pow2 = scale_fmt == "ue8m0"
    exponents = pow2 and block == [1, 32]  # this block makes it MX, whose scales are stored as bytes
    return LayerSpec(
        block[0], block[1], "token", block[1], exponents,
        scale="weight_scale_inv", pow2_inputs=pow2 and not exponents,
    )  # fmt: skip
