"""The quantization of each linear layer, read from a quantization_config and applied.

This module follows docs/format.md and the documentation of compressed-tensors, transformers and ModelOpt, and uses no
code of Octavo that packs.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from octavo.verification.stored_files import CheckpointFiles

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized", "mixed-precision")
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
    """The quantization of one layer.

    `inputs` are "none" (not rounded), "static" (input_scale is stored), "tensor" (one dynamic scale), or "token" (one
    dynamic scale a token).
    """

    rows: int = 0  # of the block of the weight [N, K] that shares a scale; 0 stands for all
    columns: int = 0
    inputs: str = "none"
    group: int = 0  # for "token", the number of neighbours in a token that share a scale; 0 stands for all
    exponents: bool = False  # scales are powers of two, stored as bytes e + 127
    integers: bool = False  # the numbers are int8, not e4m3
    scale: str = "weight_scale"  # the last part of its name
    input_scale: str = "input_scale"
    pow2_inputs: bool = False  # the scales of inputs are powers of two. They are with `exponents`, too

    @property
    def dtype(self) -> str:
        """The dtype of the weight, as safetensors spells it."""
        return "I8" if self.integers else "F8_E4M3"

    @property
    def largest(self) -> float:
        return 127.0 if self.integers else 448.0

    def scale_shapes(self, n: int, k: int) -> list[tuple[int, ...]]:
        """The shapes that the scale of a weight [N, K] may have, that of compressed-tensors first, then ModelOpt's."""
        if not self.rows and not self.columns:
            return [(1,), (), (1, 1)]
        shape = (-(-n // (self.rows or n)), -(-k // (self.columns or k)))
        return [shape, (shape[0], 1, shape[1], 1) if self.columns else (n,)]

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


Groups = list[tuple[list[str], LayerSpec]]
"""what layers are named by (names, patterns, the class Linear), and their spec; the first fit counts"""
_MODELOPT = {
    "FP8": LayerSpec(inputs="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": LayerSpec(rows=1, inputs="token"),
    "FP8_PB_WO": LayerSpec(128, 128, "token", 128),  # "weight only", but vLLM rounds the inputs like this
}


def read_specs(settings: Any, linears: Sequence[str]) -> tuple[dict[str, LayerSpec | None], list[str]]:
    """The spec of each of `linears` by the quantization_config `settings` (None: it ignores the layer), and the entries
    of its list of ignored modules that match no layer. A SpecError if it cannot be read."""
    if not isinstance(settings, Mapping):
        raise SpecError(f"config.json must have a quantization_config, as octavo pack writes it, and has {settings!r}")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise SpecError(f"quant_method must be one of {', '.join(METHODS)}, it is {method!r}")
    exact = method == "compressed-tensors"
    ignored = _ignored(settings)
    found = METHODS[method](settings)
    groups = [(["Linear"], found)] if isinstance(found, LayerSpec) else found
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
    """True if an entry of the list of ignored modules matches a layer; `exact` is compressed-tensors' rule."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if exact:
        return entry in (name, "Linear")
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}") or fnmatchcase(name, entry)


def _spec_of(name: str, groups: Groups) -> LayerSpec:
    for matches in (
        lambda target: target == name,
        lambda target: target.startswith("re:") and re.match(target.removeprefix("re:"), name),
        lambda target: target == "Linear",
    ):
        for targets, spec in groups:
            if any(map(matches, targets)):
                return spec
    raise SpecError(f"neither config_groups nor ignore has {name}")


def _groups(settings: Mapping[str, Any]) -> Groups:
    if (status := settings.get("quantization_status")) not in ("compressed", None):  # other writers may not state it
        raise SpecError(
            f'quantization_status must be "compressed", it is {status!r}: transformers would quantize the bytes again'
        )
    if (form := settings.get("format")) not in _FORMATS:
        raise SpecError(f"format must be one of {', '.join(_FORMATS)}, it is {form!r}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SpecError(f"config_groups must hold groups, it is {groups!r}")
    found = [_group(f"config_groups.{name}", group) for name, group in groups.items()]
    kinds = {"int" if spec.integers else "float" for _, spec in found}
    if form in ("float-quantized", "int-quantized") and form.partition("-")[0] not in kinds:
        raise SpecError(f"format is {form!r}, and the weights of config_groups have the type {kinds.pop()}")
    return found


def _group(where: str, group: Any) -> tuple[list[str], LayerSpec]:
    targets: Any = group.get("targets") if isinstance(group, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    has_names = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not has_names or not isinstance(weights, Mapping):
        raise SpecError(f"{where} must have targets (names) and weights, it is {group!r}")
    integers = _are_integers(weights, f"{where}.weights")
    rows, columns = _block(weights, f"{where}.weights")
    inputs, size = _inputs(group.get("input_activations"), f"{where}.input_activations")
    return targets, LayerSpec(rows, columns, inputs, size, weights.get("scale_dtype") == "torch.uint8", integers)


def _are_integers(arguments: Mapping[str, Any], where: str) -> bool:
    kind, bits, symmetric = arguments.get("type"), arguments.get("num_bits"), arguments.get("symmetric", True)
    if bits != 8 or kind not in ("float", "int") or symmetric is not True:
        raise SpecError(
            f"{where} must have num_bits 8, type float or int, and symmetric true; it has {bits!r}, {kind!r}, "
            f"{symmetric!r}"
        )
    return bool(kind == "int")


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
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


def _modelopt(settings: Mapping[str, Any]) -> LayerSpec:
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        raise SpecError(f"quant_algo must be one of {', '.join(_MODELOPT)}, it is {settings.get('quant_algo')!r}")
    return _MODELOPT[algorithm]


def _fp8(settings: Mapping[str, Any]) -> LayerSpec:
    scheme, block = settings.get("activation_scheme"), settings.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise SpecError(f"activation_scheme must be dynamic or static, it is {scheme!r}")
    if "weight_block_size" not in settings:
        raise SpecError("quant_method fp8 must state a weight_block_size, or null: this is AutoFP8, which is not read")
    if not block:
        inputs = "static" if scheme == "static" else "token"
        return LayerSpec(inputs=inputs, scale="weight_scale_inv", input_scale="activation_scale")
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


def _torchao(settings: Mapping[str, Any]) -> LayerSpec:
    described = settings.get("quant_type")
    found = described.get("default") if isinstance(described, Mapping) and len(described) == 1 else None
    kind, data = (found.get("_type"), found.get("_data")) if isinstance(found, Mapping) else (None, None)
    inputs = {"Float8DynamicActivationFloat8WeightConfig": "token", "Float8WeightOnlyConfig": "none"}.get(str(kind))
    given = data.get("granularity") if isinstance(data, Mapping) else None
    sides = given if isinstance(given, list) else [given or {"_type": "PerRow" if inputs == "none" else "PerTensor"}]
    each = {str(side.get("_type") if isinstance(side, Mapping) else side) for side in sides}
    if inputs is None or each not in ({"PerRow"}, {"PerTensor"}):
        raise SpecError(
            "quant_type must be one Float8DynamicActivationFloat8WeightConfig or Float8WeightOnlyConfig, PerRow or "
            f"PerTensor; it is {described!r}"
        )
    if each == {"PerRow"}:
        return LayerSpec(rows=1, inputs=inputs)
    return LayerSpec(inputs="tensor" if inputs == "token" else inputs)


METHODS: dict[str, Callable[[Mapping[str, Any]], Groups | LayerSpec]] = {
    "compressed-tensors": _groups, "fp8": _fp8, "modelopt": _modelopt, "torchao": _torchao
}  # fmt: skip
"""quant_method -> the function that reads its settings: groups of layers, or the one spec of all layers"""


# ---- The numbers that the bytes of a packed layer stand for, in float32, and the rounding of its inputs.
#
#     w[N,K]  = data * scale, one scale a block          every scale multiplies
#     x_q     = e4m3(x / s) * s,  s = amax / 448         amax of the elements that share the scale; 127 for integers
#     s       = input_scale if it is stored; 2^ceil(log2(amax / 448)) if scales are powers of two


RoundInput = Callable[[Tensor, LayerSpec, Tensor | None], Tensor]
"""x [..., K], the spec of its layer, input_scale or None -> x [..., K] in float32"""


def decode_exponents(stored: Tensor) -> Tensor:
    """Decode E8M0: the byte e + 127 is the scale 2^e, in float32."""
    return torch.exp2(stored.view(torch.uint8).float() - 127)


def scale_values(scale: Tensor, spec: LayerSpec) -> Tensor:
    """The stored scale as float32 [blocks of N, blocks of K]."""
    if spec.exponents or scale.dtype == torch.uint8:
        return decode_exponents(scale)
    values = scale.float()
    if values.ndim == 4:
        return values[:, 0, :, 0]
    if values.numel() == 1:
        return values.reshape(1, 1)
    return values if values.ndim == 2 else values.unsqueeze(1)


def spread(values: Tensor, spec: LayerSpec, shape: Iterable[int]) -> Tensor:
    """The scale of each element of a weight [N, K], from one scale a block; it broadcasts to [N, K]."""
    n, k = shape
    down = values.repeat_interleave(spec.rows, 0)[:n] if spec.rows > 1 else values
    return down.repeat_interleave(spec.columns, 1)[:, :k] if spec.columns else down


def numbers_of(data: Tensor) -> Tensor:
    """The numbers that stored bytes [N, K] stand for, in float32, before their scale."""
    if data.dtype != torch.float8_e4m3fn or data.is_cuda:
        return data.float()
    # PyTorch's cast on the CPU is four times slower.
    table = torch.arange(256, dtype=torch.uint8).view(data.dtype).float()
    return table.index_select(0, data.reshape(-1).view(torch.uint8).int()).view(data.shape)


def widen(data: Tensor, scale: Tensor, spec: LayerSpec) -> Tensor:
    """The weight float32 [N, K] that stored data and scale stand for."""
    return numbers_of(data) * spread(scale_values(scale, spec), spec, data.shape)


def nearest(x: Tensor, spec: LayerSpec) -> Tensor:
    """Float32 numbers w / s, rounded to the nearest number that a byte stands for; larger ones saturate."""
    q = x.clamp(-spec.largest, spec.largest)
    return q.round() if spec.integers else q.to(torch.float8_e4m3fn).float()


def half_step(x: Tensor, spec: LayerSpec, scale_dtype: torch.dtype, tie: float = 2.0**-21) -> Tensor:
    """The most that rounding to nearest moves a float32 number x = w / s.

        2^e <= |x| < 2^(e+1):    e4m3 has steps of 2^(e-3), and of 2^-9 below 2^-6; integers have steps of 1

    The writer rounds 1 / s and w times it in float32, or w / s in the dtype of its scales, and here w / s is rounded
    once more. This moves x, and decides a tie, by less than 2^(e-21), or 2^(e-8) in BF16 and 2^(e-11) in float16.
    """
    tie += {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(scale_dtype, 0.0)
    power = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)  # 2^e: the bits of the exponent alone
    if spec.integers:
        return power.mul_(tie).add_(0.5)
    return power.clamp_(min=2.0**-6).mul_(2.0**-4 + tie)


def round_input(x: Tensor, spec: LayerSpec, input_scale: Tensor | None = None) -> Tensor:
    """The input [..., K] in float32, rounded as the layer rounds it."""
    x = x.float()
    if spec.inputs == "none":
        return x
    if spec.inputs != "token":
        assert (input_scale is None) == (spec.inputs == "tensor")
        scale = _dynamic_scale(x.abs().amax(), spec) if input_scale is None else input_scale.float().reshape(-1)[0]
        return nearest(x / scale, spec) * scale
    size = spec.group or x.shape[-1]
    padded = pad(x, (0, -x.shape[-1] % size))  # the last group may be smaller
    groups = padded.reshape(*x.shape[:-1], -1, size)
    scale = _dynamic_scale(groups.abs().amax(-1, keepdim=True), spec)
    return (nearest(groups / scale, spec) * scale).flatten(-2)[..., : x.shape[-1]]


def round_input_by_compressed_tensors(x: Tensor, spec: LayerSpec, input_scale: Tensor | None = None) -> Tensor:
    """The input [..., K] in float32, rounded as compressed-tensors emulates it.

    Its strategy `token` has a scale for each index of the first two dimensions of [B, T, K]. It takes the same two
    dimensions of [T, K], has no dimension left to reduce, and so uses one scale for the tensor. In [B, 1, T, K], as
    in DeepSeek-V3's attention, it reduces T too. Its scale of integers is amax / 127.5, for the range from -128 to 127.
    """
    if spec.inputs == "token" and not spec.group and x.ndim > 3:
        return round_input_by_compressed_tensors(x.flatten(2), spec, input_scale).view(x.shape)
    if spec.inputs == "token" and not spec.group and x.ndim < 3:
        spec = replace(spec, inputs="tensor")
    if not spec.integers or spec.inputs not in ("token", "tensor") or spec.group:
        return round_input(x, spec, input_scale)
    magnitude = x.float().abs()
    scale = (magnitude.amax() if spec.inputs == "tensor" else magnitude.amax(-1, keepdim=True)) / 127.5
    return (x.float() / scale).round().clamp(-128, 127).nan_to_num(0) * scale


def _dynamic_scale(amax: Tensor, spec: LayerSpec) -> Tensor:
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / spec.largest
    if not spec.exponents and not spec.pow2_inputs:
        return scale
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1, so 2^exponent is the next power of two
    return torch.exp2((exponent - (mantissa == 0.5).int()).float())


# ---- The rounding of keys and values by an e4m3 KV cache, for packed folders that have scales for one.
#
#     k_q = e4m3(k / k_scale) * k_scale      k after rotary embedding; v alike; one scale a tensor, saturating at 448


_CACHE_SPEC = LayerSpec(inputs="static")
# The names below that of an attention layer, as compressed-tensors, vLLM, ModelOpt and older writers (two) spell them.
_LEAVES = (
    ("k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale", "k_proj.output_scale"),
    ("v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale", "v_proj.output_scale"),
)


def cache_names(files: CheckpointFiles) -> dict[str, tuple[str, str]]:
    """The names of the scales (of keys, of values) by the name of their attention, in the order of the layers.

    Empty unless the folder has scales for every layer.
    """
    attentions = {name.removesuffix(".k_proj.weight") for name in files.shapes if name.endswith(".k_proj.weight")}
    names = {}
    for attention in sorted(attentions, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        k, v = ([name for leaf in leaves if (name := f"{attention}.{leaf}") in files.shapes] for leaves in _LEAVES)
        if not k or not v:
            return {}
        names[attention] = k[0], v[0]
    return names


def cache_scales(files: CheckpointFiles) -> dict[str, tuple[Tensor, Tensor]]:
    """The scales (of keys, of values) of `cache_names`."""
    return {attention: (files.get(k), files.get(v)) for attention, (k, v) in cache_names(files).items()}


def round_keys_and_values(scales: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values, rounded as a cache with these scales stores them."""
    return [round_input(x, _CACHE_SPEC, s.to(x.device)).to(x.dtype) for x, s in zip((k, v), scales, strict=True)]


# ---- The reference that readers are compared with: linear layers computed in float32 from the bytes alone.


@dataclass(frozen=True)
class PackedLayers:
    """The linear layers of a packed folder: y = round(x) @ w^T in float32. Layers without a spec are not packed, and
    their inputs are not rounded. Inputs of the layers `unrounded` are not rounded, whatever their specs say."""

    files: CheckpointFiles
    specs: Mapping[str, LayerSpec]
    device: str
    round_input: RoundInput = round_input
    unrounded: Collection[str] = ()

    def weight(self, name: str) -> Tensor:
        """The weight of a layer, float32 [N, K]."""
        data = self.files.get(f"{name}.weight").to(self.device)
        if (spec := self.specs.get(name)) is None:
            return data.float()
        return widen(data, self.files.get(f"{name}.{spec.scale}").to(self.device), spec)

    def get(self, name: str) -> Tensor:
        """A tensor of the folder, on the CPU. Weights of packed layers, such as experts, are widened to float32."""
        layer = name.removesuffix(".weight")
        return self.weight(layer).cpu() if name.endswith(".weight") and layer in self.specs else self.files.get(name)

    def input_scale(self, name: str) -> Tensor | None:
        """The stored scale of a layer's input, float32 without dimensions; None if it has none."""
        spec = self.specs.get(name)
        if spec is None or spec.inputs != "static":
            return None
        return self.files.get(f"{name}.{spec.input_scale}").to(self.device).float().reshape(-1)[0]

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The output [..., N] of a layer for its input [..., K], without bias."""
        spec = self.specs.get(name)
        rounded = x.float()
        if spec is not None and name not in self.unrounded:
            rounded = self.round_input(x, spec, self.input_scale(name))
        return linear(rounded, self.weight(name))  # [T,K] @ [N,K]^T


def distance(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| of logits [..., V], after subtracting each token's mean over V: adding a number
    to all logits of a token changes no probability."""
    a, b = (t.double().cpu() - t.double().cpu().mean(-1, keepdim=True) for t in (actual, expected))
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float((a - b).norm())
