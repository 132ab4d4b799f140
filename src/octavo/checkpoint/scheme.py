"""The schemes of packed linear layers, the scales that a packed folder stores, and what a layout of them is.

A scheme is the storage of the weight, and the cast of the input when the layer runs.

| scheme | weight | weight_scale | input, when the layer runs |
|---|---|---|---|
| channel | a scale for each output channel | float32 [N, 1] | a scale for each token |
| tensor | one scale | float32 [1] | a scale for each token |
| static | one scale | float32 [1] | one scale, stored beside it: input_scale, float32 [1] |
| block | 128 x 128 blocks | float32 [N / 128, K / 128] | 1 x 128 blocks |
| mx | 32 elements along K, powers of two | uint8 [N, K / 32], the exponent of E8M0 | 32 elements, E8M0 |
| group32, group64, group128 | so many elements along K | float32 [N, K / 32] and so on | as many elements |
| weight | a scale for each output channel | float32 [N, 1] | none: the input stays in BF16 |
| int8 | a scale for each output channel | float32 [N, 1] | a scale for each token |

Weights and inputs are e4m3, and in int8 integers of -127 to 127. Every scale multiplies: w ≈ weight * weight_scale.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.architectures import ARCHITECTURES
from octavo.checkpoint.files import ArtifactError, check_match, failing, is_finite
from octavo.numerics import ROW, TENSOR, Cast, QTensor, group
from octavo.ops.dispatch import Backend, find_int8_backend, find_weight_only_backend, product_backend, takes_fnuz
from octavo.ops.launching import Place
from octavo.recipe import BLOCK_W, BLOCK_X, MX_GROUPS, ROW_W, ROW_X


@dataclass(frozen=True)
class Scheme:
    """One way to pack a layer."""

    name: str  # on the command line
    weight: Cast
    inputs: Cast | None  # None for an input that stays in high precision
    static: bool = False  # the scale of the input is stored, and not computed when the layer runs

    @property
    def integers(self) -> bool:
        return self.weight.fmt.dtype == torch.int8

    @property
    def format(self) -> str:
        """The name of the file format in compressed-tensors."""
        if self.inputs is None:
            return "naive-quantized"
        if self.integers:
            return "int-quantized"
        return "mxfp8-quantized" if self.weight.scale == "e8m0" else "float-quantized"

    def group(self, targets: Sequence[str]) -> dict[str, Any]:
        """The entry of `config_groups` for the layers `targets`."""
        return {
            "targets": list(targets),
            "weights": _arguments(self.weight, "channel", dynamic=False),
            "input_activations": self.inputs and _arguments(self.inputs, "token", dynamic=not self.static),
            "output_activations": None,
            "format": self.format,
        }

    def misfit(self, n: int, k: int) -> str:
        """The reason why a weight [N, K] cannot be packed by this scheme, or ""."""
        rows, cols = self.weight.granularity.rows or 1, self.weight.granularity.cols or 1
        if n % rows or k % cols:
            return f"[{n}, {k}] is no multiple of {rows} x {cols}, the blocks of {self.name}"
        return ""

    def unreadable(self, n: int, k: int) -> str:
        """The reason why a weight [N, K] of this scheme cannot be read, or "". The last blocks of 128 x 128 may be
        smaller in the files of other programs."""
        return "" if (self.weight.granularity.rows or 1) > 1 else self.misfit(n, k)

    def stored_scale(self, q: QTensor) -> Tensor:
        """The scale of a packed weight in the form that files have."""
        if self.weight.granularity == TENSOR:
            return q.scale.reshape(1)
        return q.scale.view(torch.uint8) if self.weight.scale == "e8m0" else q.scale

    def packed_weight(self, data: Tensor, scale: Tensor) -> QTensor:
        """The weight [N, K] of what lies in a file; a tensor's scale by row, where the input's are by row."""
        if self.static:
            return QTensor(data, scale.unsqueeze(1), self.weight.fmt, TENSOR)
        if self.weight.granularity == TENSOR:
            return QTensor(data, scale.repeat_interleave(len(data)).unsqueeze(1), self.weight.fmt, ROW)
        scale = scale.view(torch.float8_e8m0fnu) if self.weight.scale == "e8m0" else scale
        return QTensor(data, scale, self.weight.fmt, self.weight.granularity)

    def empty_scale(self, n: int, k: int) -> Tensor:
        if self.weight.granularity == TENSOR:
            return torch.empty(1)
        shape = self.weight.granularity.scale_shape((n, k))
        return torch.empty(shape, dtype=torch.uint8 if self.weight.scale == "e8m0" else torch.float32)

    def tensors(self, n: int, k: int) -> dict[str, Tensor]:
        """The tensors of a packed weight [N, K], by the last parts of their names, on the meta device."""
        with torch.device("meta"):
            found = {"weight": torch.empty(n, k, dtype=self.weight.fmt.dtype), SCALE_NAME: self.empty_scale(n, k)}
            return found | ({INPUT_SCALE_NAME: torch.empty(1)} if self.static else {})


def _arguments(cast: Cast, by_row: str, *, dynamic: bool) -> dict[str, Any]:
    """A cast in the spelling of compressed-tensors (github.com/vllm-project/compressed-tensors,
    quantization/quant_args.py), which calls a scale for each row `by_row`."""
    rows, cols = cast.granularity.rows, cast.granularity.cols
    how: dict[str, Any] = {"strategy": by_row}
    if cast.granularity == TENSOR:
        how = {"strategy": "tensor"}
    elif cols is not None and rows == 1:
        how = {"strategy": "group", "group_size": cols}
    elif cols is not None:
        how = {"strategy": "block", "block_structure": [rows, cols]}
    if cast.scale == "e8m0":
        how |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    kind = "int" if cast.format == "int8" else "float"
    return {"num_bits": 8, "type": kind, "symmetric": True, **how, "dynamic": dynamic}


_TENSOR, _INT8 = Cast(granularity=TENSOR), Cast("int8", ROW)
STATIC_INPUTS = _TENSOR
CHANNEL = Scheme("channel", ROW_W, ROW_X)
TENSORWISE = Scheme("tensor", _TENSOR, ROW_X)
STATIC = Scheme("static", _TENSOR, STATIC_INPUTS, static=True)
BLOCK = Scheme("block", BLOCK_W, BLOCK_X)
# DeepSeek's scale_fmt "ue8m0": the scales of inputs are powers of two as well. It is read and not written.
BLOCK_POW2 = replace(BLOCK, name="block, pow2 inputs", inputs=replace(BLOCK_X, scale="pow2"))
MX = Scheme("mx", MX_GROUPS, MX_GROUPS)
_GROUPS = tuple(Cast(granularity=group(size)) for size in (32, 64, 128))
GROUPS = tuple(Scheme(f"group{cast.granularity.cols}", cast, cast) for cast in _GROUPS)
WEIGHT = Scheme("weight", ROW_W, None)
# Weights alone with the scales of `tensor` and `block`: read and not written by `pack`.
WEIGHT_ONLY = tuple(Scheme(f"weight, {each.name}", each.weight, None) for each in (TENSORWISE, BLOCK))
INT8 = Scheme("int8", _INT8, _INT8)

SCHEMES = {scheme.name: scheme for scheme in (CHANNEL, TENSORWISE, STATIC, BLOCK, MX, *GROUPS, WEIGHT, INT8)}
# Those that fused kernels take: inputs are cast by row or not at all, and no scale varies along the sum.
FUSED = (CHANNEL.name, INT8.name, WEIGHT.name)
# Recipe of a run -> the scheme whose forward pass repeats the run's bit for bit. For tensorwise the weights agree, and
# the inputs get a scale for each token.
SCHEME_OF = {
    "rowwise": "channel", "rowwise_dw_bf16": "channel", "rowwise_forward": "channel", "blockwise": "block",
    "mxfp8": "mx", "groupwise": "group64", "delayed": "static", "tensorwise": "tensor",
}  # fmt: skip
# The names of output heads, which readers leave unpacked even if a folder does not name them as ignored.
HEADS = ("lm_head", "embed_out", "score", "classifier")
# The dtypes of packed weights.
WEIGHT_DTYPES = tuple(dict.fromkeys(scheme.weight.fmt.dtype for scheme in SCHEMES.values()))


def get_scheme(name: str) -> Scheme:
    """The scheme of that name; a ValueError names the choices."""
    if name not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


# ---- The scales of packed layers: the forms that they have in files, and the one form in memory.
#
# In memory the scale of a weight is `<layer>.weight_scale` and the scale of a static input is `<layer>.input_scale`,
# with the shape and dtype that its scheme gives it. Programs write the same numbers in several forms, which
# docs/format.md lists ("Folders of other writers"). A tensor of another shape or dtype is kept unchanged, and the check
# of the folder names it.


SCALE_NAME, INPUT_SCALE_NAME = "weight_scale", "input_scale"
SCALE_ENDINGS = (f".{SCALE_NAME}", f".{INPUT_SCALE_NAME}")
OTHER_NAMES = {"weight_scale_inv": SCALE_NAME, "activation_scale": INPUT_SCALE_NAME}
_ZERO_POINTS = ("weight_zero_point", "input_zero_point")
ADVICE = "the folder is damaged or of another model: pack it again"
_UNUSED = ("output_scale", "q_scale", "prob_scale", *_ZERO_POINTS)


def _widened(scale: Tensor) -> Tensor:
    """A scale in float32, exactly. uint8 is read as exponents of E8M0. Any other dtype is left unchanged."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    known = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    return scale.float() if scale.dtype in known else scale


def read_number(scale: Tensor) -> Tensor:
    """A scale of one number as float32 [1]. More than one number keeps its shape."""
    scale = _widened(scale)
    return scale.reshape(1) if scale.numel() == 1 else scale


def read_scale(scale: Tensor, leaf: str, scheme: Scheme) -> Tensor:
    """The scale `leaf` (weight_scale or input_scale) of a layer, from a file, in the form that it has in memory."""
    if leaf == INPUT_SCALE_NAME or scheme.weight.granularity == TENSOR:
        return read_number(scale)
    if scheme.weight.scale != "e8m0":
        scale = _widened(scale)
    elif scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:
        return scale[:, 0, :, 0]
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    return scale.unsqueeze(1) if scale.ndim == 1 else scale


def unused_scales(names: Iterable[str], get: Callable[[str], Tensor], where: Path) -> list[str]:
    """The tensors among `names` that other programs write and no layer reads: the scales of outputs, queries and
    attention probabilities, and zero points. An ArtifactError if a zero point, which `get` reads, is not zero."""
    unused = [name for name in names if name.rpartition(".")[2] in _UNUSED]
    for name in unused:
        if name.endswith(_ZERO_POINTS) and bool((get(name).float() != 0).any()):
            raise ArtifactError(f"{where}: {name} is not zero, and octavo runs symmetric packings alone")
    return unused


def check_scale(name: str, scale: Tensor, where: Path) -> None:
    """Raise an ArtifactError, which names the scale (float32, or uint8: E8M0), unless it is finite and positive."""
    if bool(is_positive(scale)):
        return
    if scale.dtype == torch.uint8:
        raise ArtifactError(f"{where}: {name} holds 255, the NaN of E8M0; {ADVICE}")
    check_finite(name, scale, where)
    raise ArtifactError(f"{where}: {name} must be positive, its least is {scale.min():g}; {ADVICE}")


def check_finite(name: str, tensor: Tensor, where: Path) -> Tensor:
    """The tensor. An ArtifactError, which names it, if it holds inf or NaN."""
    if tensor.is_floating_point() and not bool(is_finite(tensor)):
        raise ArtifactError(f"{where}: {name} holds inf or NaN; {ADVICE}")
    return tensor


def is_positive(scale: Tensor) -> Tensor:
    """True if all values of a scale are finite and positive: bool, of no dimension, on the device of `scale`."""
    if scale.dtype == torch.uint8:
        return (scale != 255).all()
    least, largest = torch.aminmax(scale)
    return (least > 0) & (largest < torch.inf)


def check_tensors(found: Mapping[str, Tensor], required: Mapping[str, Tensor], where: Path) -> None:
    """Raise an ArtifactError unless `found` has the specs of `required`, is finite, and its scales are positive."""
    try:
        check_match(found, required, str(where))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {ADVICE}") from None
    for name, tensor in found.items():
        if tensor.dtype != (dtype := required[name].dtype):
            raise ArtifactError(f"{where}: {name} must be {dtype}, the file has {tensor.dtype}; {ADVICE}")
    scales = {name for name in found if name.endswith(SCALE_ENDINGS) or is_kv_scale(name)}
    right = {name: is_positive(t) if name in scales else is_finite(t) for name, t in found.items()}
    for name in failing(right):
        (check_scale if name in scales else check_finite)(name, found[name], where)


# ---- The scales of a KV cache: for each attention layer one for the keys, after the rotation, and one for the values.
#
# They multiply, as the scales of weights do: k ≈ k_q * k_scale. In memory they are <attention>.k_scale and
# <attention>.v_scale, float32 [1], as in compressed-tensors. Files may have another dtype and other names (`kv_names`).


K_SCALE, V_SCALE = "k_scale", "v_scale"
KvScales = dict[str, tuple[Tensor, Tensor]]


def kv_names(name: str) -> list[str]:
    """The names in memory of a tensor of a file, if it is a scale of a cache; else its own name. Files have
    <attention>.k_scale, <attention>.k_proj.k_scale (ModelOpt), <attention>.attn.k_scale (vLLM),
    <attention>.k_proj.output_scale (older writers), the same for values, and <attention>.kv_scale, which is both."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if leaf in (K_SCALE, V_SCALE) and (last == f"{leaf[0]}_proj" or (last == "attn" and parent.endswith("attn"))):
        return [f"{parent}.{leaf}"]
    if leaf == "kv_scale":
        return [f"{module}.{K_SCALE}", f"{module}.{V_SCALE}"]
    if leaf == "output_scale" and last in ("k_proj", "v_proj"):
        return [f"{parent}.{last[0]}_scale"]
    return [name]


def is_kv_scale(name: str) -> bool:
    """True if the tensor `name`, in memory, is the scale of a cache."""
    return name.endswith((f".{K_SCALE}", f".{V_SCALE}"))


def kv_tensors(linears: Iterable[str], declared: bool) -> dict[str, Tensor]:
    """The scales of keys and values that files must have, by their names in memory and without values: those of each
    attention layer, which is the parent of a k_proj in `linears`, if a cache is `declared`, else none."""
    names = [name.removesuffix(".k_proj") for name in linears if declared and name.endswith(".k_proj")]
    return {f"{name}.{leaf}": torch.empty(1) for name in names for leaf in (K_SCALE, V_SCALE)}


def kv_pairs(tensors: Mapping[str, Tensor], names: Iterable[str]) -> KvScales:
    """The scales among `tensors` that `kv_tensors` names, by the name of the attention layer."""
    found = [name.removesuffix(f".{K_SCALE}") for name in names if name.endswith(K_SCALE)]
    return {name: (tensors[f"{name}.{K_SCALE}"], tensors[f"{name}.{V_SCALE}"]) for name in found}


# ---- A check for scales of packed weights that look reciprocal.
#
# A scale multiplies: w = data * scale, and the data use e4m3 up to 448. So a scale is amax / 448, which is above 1 only
# if weights exceed 448. Weights of trained linear layers are about 1. A writer that stores 448 / amax instead has
# scales far above 1. A layer is suspect if the median of its scales is above 1 and its largest weight is above 448. A
# writer makes this error in every layer, so a folder is suspect if more than half of its layers are.


_LARGEST = 448.0


def suspected(scales: Iterable[tuple[str, Tensor]], weight: Callable[[str], Tensor]) -> list[str]:
    """The packed layers whose scales look reciprocal, if they are more than half of those with `scales`.

    `weight` gives a layer's weight, data * scale, by its name. It is called only if the scales are large, and one
    weight at a time is in memory. With small scales the host waits once for the device.
    """
    small = {name: _widened(scale).median() <= 1 for name, scale in scales}
    found = [name for name in failing(small) if float(weight(name).abs().max()) > _LARGEST]
    return found if 2 * len(found) > len(small) else []


def reciprocal_warning(names: list[str], layers: int) -> str:
    """The warning if the scales of `names`, of `layers` packed layers, look reciprocal."""
    return (
        f"the weight scales of {names[0]} ({len(names)} of {layers} packed layers) look reciprocal: multiplied by "
        f"them, weights exceed {_LARGEST:g}, and weights of trained layers are about 1. A scale must multiply. Run "
        "octavo verify against the model that the folder was packed from"
    )


# ---- The GEMM that computes with the packed weights of a scheme, on a device or on a GPU that need not be here.
#
# The scheme `weight` is weight-only on every device: the weight is widened in the kernel. So is every other FP8 scheme
# on a GPU without an FP8 GEMM for it, such as an Ampere: the result is then closer to the BF16 model's than the
# scheme's own. `int8` casts inputs on every device.


_BY_ROW = {name: Cast(name) for name in ("e4m3", "e4m3fnuz")}


def find_gemm(scheme: Scheme, device: Place) -> tuple[Cast | None, Backend]:
    """The cast of the input of a layer on `device`, None if its GEMM is weight-only; and the GEMM: for a large M, or
    weight-only for one row."""
    weight_only = find_weight_only_backend(device, torch.bfloat16, scheme.weight.granularity, 1)
    if scheme.inputs is None:
        return None, weight_only
    backend = eight_bit_gemm(scheme, scheme.inputs, device)
    if backend.name == "none":
        return None, Backend(weight_only.name, f"{backend.reason}: weight-only")
    return scheme.inputs, backend


def eight_bit_gemm(scheme: Scheme, x: Cast, device: Place) -> Backend:
    """The GEMM of quantized inputs. torch.compile traces this, and torch 2.11 refuses a cast that is made meanwhile."""
    if scheme.weight.format == "int8":
        return find_int8_backend(device)
    spread = scheme.weight.granularity == TENSOR and not scheme.static  # as `Scheme.packed_weight` does
    return product_backend(x, _BY_ROW[scheme.weight.format] if spread else scheme.weight, device)


def input_cast(scheme: Scheme, device: torch.device) -> Cast | None:
    """The cast of the input of a layer on `device`; None if its GEMM is weight-only."""
    find = _input_cast if torch.compiler.is_compiling() else _find_cached  # torch.compile warns of a cached function
    return find(scheme, device)


def _input_cast(scheme: Scheme, device: torch.device) -> Cast | None:
    if scheme.inputs is None or eight_bit_gemm(scheme, scheme.inputs, device).name == "none":
        return None
    return scheme.inputs


_find_cached = cache(_input_cast)


def scheme_on(scheme: Scheme, place: Place) -> Scheme:
    """`scheme` as a layer runs it on a device: on an MI300 in FNUZ if its scales are by row or tensor."""
    by_row_or_tensor = scheme.weight.granularity.outer and scheme.weight.format == "e4m3"
    return _in_fnuz(scheme) if scheme.inputs is not None and by_row_or_tensor and takes_fnuz(place) else scheme


@cache
def _in_fnuz(scheme: Scheme) -> Scheme:
    assert scheme.inputs is not None
    weight, inputs = (replace(cast, format="e4m3fnuz") for cast in (scheme.weight, scheme.inputs))
    return replace(scheme, weight=weight, inputs=inputs)


# ---- Linear layers that readers fuse into one GEMM: q, k and v; gate and up, which Mixtral calls w1 and w3.
#
# vLLM holds their weights as one tensor, which has one scheme. It refuses a folder in which one of them is packed and
# another is not, so the layers of a group are packed by one scheme, or all left in BF16.


def groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the layers `names`, in their order, by the GEMM that readers run them in; most are alone."""
    fused = []  # the last names of the layers of each such GEMM, of all architectures
    for each in ARCHITECTURES.values():
        layers = each.block.qkv, each.block.up, each.expert_up
        fused += [tuple(name.rpartition(".")[2] for name in together) for together in layers]
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        together = next((leaves for leaves in fused if leaf in leaves and len(leaves) > 1), (leaf,))
        found.setdefault((parent, together), []).append(name)
    return [tuple(layers) for layers in found.values()]


# ---- A layout: one way to write a packing down (`octavo.checkpoint.layouts`), and what the layouts share.


Groups = list[tuple[list[str], Scheme]]  # layers (names, patterns, or "Linear" for all); the first that fits counts


class Layout:
    """One way to write a packing down. A subclass has a name, `describe`, `read`, and what differs beside them."""

    name: ClassVar[str]  # on the command line, and the quant_method of its `quantization_config`
    schemes: ClassVar[tuple[str, ...]] = ()  # that it holds, one in a model; empty if it holds all, several in one
    ignore: ClassVar[tuple[str, ...]] = ("ignore",)  # the keys of the list of unpacked layers; the first is written
    exact: ClassVar[bool] = False  # an entry of that list is a whole name; else it may name a module above (`is_named`)
    written: ClassVar[bool] = True  # Octavo writes it; False: it is read alone
    cache: ClassVar[Mapping[str, Any] | None] = None  # the kv_cache_scheme of stored scales; None: it has no place
    smaller_blocks: ClassVar[bool] = True  # the last block along K may be smaller; False: transformers opens none such
    readers: ClassVar[str] = ""  # the programs that open it beside Octavo, if transformers does not
    needs: ClassVar[str] = ""  # the package without which transformers does not open it
    experts: ClassVar[str] = ""  # the entry of `ignore` for all experts of a mixture, if not the names of their modules
    in_parts: ClassVar[Mapping[str, Any]] = {}  # settings of one scheme for programs that call parts of a model

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        """The `quantization_config` of layers packed by `schemes`, with the layers `ignore` unpacked."""
        raise NotImplementedError

    def read(self, found: Mapping[str, Any], where: Path) -> Groups:
        """The schemes that a `quantization_config` states. An ArtifactError for a packing of another kind, with the
        values found and required."""
        raise NotImplementedError

    def renew(self, config: dict[str, Any], folder: Path) -> None:
        """Put the settings of an older writer into `quantization_config`, in today's spelling."""

    def side_files(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the JSON files that the layout has beside config.json."""
        return {}

    def check_experts(self, schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise a ValueError if transformers cannot open packed experts (by their names in the files, with the shapes
        [N, K] of their weights) where the layout puts them."""

    def rename(self, name: str) -> str:
        """The name that the layout gives to the tensor `name`, if that is a scale; else `name`."""
        return name

    def names_in_memory(self, name: str, kv_cache: bool) -> list[str]:
        """The names in memory of a tensor of a file: the inverse of `rename`, for every name that is read."""
        of_output = name.endswith(".output_scale") and not kv_cache  # outputs may have scales, too
        return [name] if of_output else kv_names(name)

    def reshape(self, scale: Tensor, name: str, scheme: Scheme | None) -> Tensor:
        """The tensor `name` of a layer packed by `scheme` (None: of no such layer) as files have it."""
        return scale
