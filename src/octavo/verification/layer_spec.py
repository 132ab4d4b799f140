"""What a quantization_config says of each linear layer; `octavo.verification.numbers` has what its bytes then mean.

Written from docs/format.md and the pages of compressed-tensors, transformers and ModelOpt, and from no code of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_E4M3, _INT8 = 448.0, 127.0
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized", "mixed-precision")
_METHODS = ("compressed-tensors", "fp8", "modelopt")


class WordsError(ValueError):
    """A quantization_config that says what nobody here knows how to read; the message names the setting."""


@dataclass(frozen=True)
class Words:
    """One layer.

    Attributes:
        rows, columns: of a block of the weight that shares a scale; 0 stands for all.
        inputs: "none" (not rounded), "static" (input_scale is stored), "tensor" (one scale), or "token".
        group: for "token", the neighbours in a token that share a scale; 0 stands for all.
        exponents: scales are powers of two, stored as bytes e + 127.
        integers: int8 numbers, and not e4m3.
        flat: as ModelOpt shapes scales: one is a scalar, those of channels a vector, those of blocks [N, 1, K, 1].
        scale, input_scale: the last part of the names of the scales.
        pow2_inputs: the scales of inputs are powers of two; so they are where `exponents`.
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

    @property
    def dtype(self) -> str:
        """Of the weight, as safetensors spells it."""
        return "I8" if self.integers else "F8_E4M3"

    @property
    def largest(self) -> float:
        """The largest number of the format."""
        return _INT8 if self.integers else _E4M3

    def scale_shapes(self, n: int, k: int) -> list[tuple[int, ...]]:
        """The shapes that the scale of a weight [N, K] may have, the usual one first."""
        if not self.rows and not self.columns:
            return [(), (1,), (1, 1)] if self.flat else [(1,), (), (1, 1)]
        shape = (-(-n // (self.rows or n)), -(-k // (self.columns or k)))
        other = (shape[0], 1, shape[1], 1) if self.columns else (n,)
        return [other, shape] if self.flat else [shape, other]

    def misfit(self, n: int, k: int) -> str:
        """Why a weight [N, K] cannot be stored so, or nothing. The last of square blocks may be smaller."""
        if self.rows <= 1 and k % (self.columns or k):
            return f"has shape [{n}, {k}], no multiple of its blocks of {self.rows} x {self.columns}"
        return ""

    def __str__(self) -> str:
        if not self.rows and not self.columns:
            stored = "tensor"
        elif not self.columns:
            stored = "channel"
        else:
            stored = f"{self.rows}x{self.columns}" + (" (powers of two)" if self.exponents else "")
        rounded = f"{self.inputs} of {self.group}" if self.group else self.inputs
        return f"{'int8 ' if self.integers else ''}{stored}, input {rounded}"


def read_words(settings: Any, linears: Sequence[str]) -> tuple[dict[str, Words | None], list[str]]:
    """How each of `linears` is packed (None: it is ignored), and the entries of the list of ignored that fit nothing.

    Raises:
        WordsError: settings that cannot be read.
    """
    if not isinstance(settings, Mapping):
        raise WordsError(f"config.json must have a quantization_config, it has {settings!r}")
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise WordsError(f"quant_method must be one of {', '.join(_METHODS)}, it is {method!r}")
    ignored = _ignored(settings)
    groups = _groups(settings) if method == "compressed-tensors" else [(["Linear"], _whole(settings, method))]
    found: dict[str, Words | None] = {}
    used: set[str] = set()
    for name in linears:
        entries = [entry for entry in ignored if _matches(entry, name, exact=method == "compressed-tensors")]
        used.update(entries)
        found[name] = None if entries else _of(name, groups)
    return found, [entry for entry in ignored if entry not in used]


def _ignored(settings: Mapping[str, Any]) -> list[str]:
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        if (given := settings.get(key)) is not None:
            if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
                raise WordsError(f"{key} must be a list of names of modules, it is {given!r}")
            return list(given)
    return []


def _matches(entry: str, name: str, exact: bool) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if exact:
        return entry in (name, "Linear")
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}") or fnmatchcase(name, entry)


def _of(name: str, groups: Sequence[tuple[list[str], Words]]) -> Words:
    """By its name, else by a pattern, else by its class, in whatever group."""
    for kind in (_is_name, _is_pattern, _is_class):
        for targets, words in groups:
            if any(kind(target, name) for target in targets):
                return words
    raise WordsError(f"no group of config_groups has {name}, and neither has ignore")


def _is_name(target: str, name: str) -> bool:
    return target == name


def _is_pattern(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), name) is not None


def _is_class(target: str, name: str) -> bool:
    return target == "Linear"


def _groups(settings: Mapping[str, Any]) -> list[tuple[list[str], Words]]:
    if (status := settings.get("quantization_status")) not in ("compressed", None):  # other writers may not state it
        raise WordsError(
            f'quantization_status must be "compressed", it is {status!r}: transformers would quantize the bytes again'
        )
    if (form := settings.get("format")) not in _FORMATS:
        raise WordsError(f"format must be one of {', '.join(_FORMATS)}, it is {form!r}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise WordsError(f"config_groups must hold groups, it is {groups!r}")
    return [_group(name, group) for name, group in groups.items()]


def _group(name: str, group: Any) -> tuple[list[str], Words]:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if (
        not isinstance(targets, list)
        or not all(isinstance(t, str) for t in targets)
        or not isinstance(weights, Mapping)
    ):
        raise WordsError(f"config_groups.{name} must have targets (names) and weights, it is {group!r}")
    where = f"config_groups.{name}.weights"
    integers = _check_numbers(weights, where)
    rows, columns = _blocks(weights, where)
    exponents = weights.get("scale_dtype") == "torch.uint8"
    inputs, part = _inputs(group.get("input_activations"), f"config_groups.{name}.input_activations")
    return targets, Words(rows, columns, inputs, part, exponents, integers)


def _check_numbers(arguments: Mapping[str, Any], where: str) -> bool:
    """Whether they are integers; of eight bits and symmetric they must be."""
    kind, bits, symmetric = arguments.get("type"), arguments.get("num_bits"), arguments.get("symmetric", True)
    if bits != 8 or kind not in ("float", "int") or symmetric is not True:
        raise WordsError(
            f"{where} must be of 8 bits, float or int, symmetric; it is of {bits!r}, {kind!r}, {symmetric!r}"
        )
    return bool(kind == "int")


def _blocks(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    strategy, size, shape = weights.get("strategy"), weights.get("group_size"), weights.get("block_structure")
    if isinstance(shape, str):  # "128x128"
        shape = [int(part) for part in shape.split("x") if part.isdigit()]
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group" and isinstance(size, int) and size > 0:
        return 1, size
    if strategy == "block" and _is_shape(shape):
        return int(shape[0]), int(shape[1])  # type: ignore[index]
    raise WordsError(
        f"{where}.strategy must be tensor, channel, group (with group_size) or block (with block_structure), it is "
        f"{strategy!r} ({size!r}, {shape!r})"
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)


def _inputs(arguments: Any, where: str) -> tuple[str, int]:
    if arguments is None:
        return "none", 0
    if not isinstance(arguments, Mapping):
        raise WordsError(f"{where} must be an object or null, it is {arguments!r}")
    _check_numbers(arguments, where)
    strategy, dynamic, size = arguments.get("strategy"), arguments.get("dynamic"), arguments.get("group_size")
    if strategy == "tensor":
        return ("tensor" if dynamic else "static"), 0
    if strategy == "token" and dynamic:
        return "token", 0
    if strategy == "group" and dynamic and isinstance(size, int) and size > 0:
        return "token", size
    raise WordsError(f"{where}.strategy must be tensor, token or group, dynamic; it is {strategy!r}, {dynamic!r}")


def _whole(settings: Mapping[str, Any], method: str) -> Words:
    """Of layouts that have one way for all layers."""
    if method == "modelopt":
        algorithm = str(settings.get("quant_algo")).upper()
        if algorithm not in _MODELOPT:
            raise WordsError(f"quant_algo must be one of {', '.join(_MODELOPT)}, it is {settings.get('quant_algo')!r}")
        return _MODELOPT[algorithm]
    scheme, blocks = settings.get("activation_scheme"), settings.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise WordsError(f"activation_scheme must be dynamic or static, it is {scheme!r}")
    if blocks is None:
        return Words(0, 0, "static" if scheme == "static" else "token", flat=True)
    if not _is_shape(blocks) or scheme == "static":
        raise WordsError(f"weight_block_size must be two sizes, with dynamic activations; it is {blocks!r}, {scheme}")
    if (scales := settings.get("scale_fmt", "float")) not in ("float", "ue8m0"):
        raise WordsError(f"scale_fmt must be float or ue8m0, it is {scales!r}")
    pow2 = scales == "ue8m0"  # of 1 x 32 blocks that is MX, whose scales are bytes
    exponents = pow2 and blocks == [1, 32]
    return Words(
        blocks[0], blocks[1], "token", blocks[1], exponents,
        scale="weight_scale_inv", pow2_inputs=pow2 and not exponents,
    )  # fmt: skip


_MODELOPT = {
    "FP8": Words(0, 0, "static", flat=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Words(1, 0, "token", flat=True),
    "FP8_PB_WO": Words(128, 128, "token", 128, flat=True),  # vLLM rounds its inputs so
}
