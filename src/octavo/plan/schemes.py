"""The packing schemes of a served model: the bytes of packed weights, and the speed of their GEMMs over that of BF16.

The speed was measured by the number of tokens, of the linear layers of Llama-3-8B together on an H200, with the
quantization of their inputs (`octavo.runtime.scheme_speeds`). Experts have the speed of the measured layer of experts
whose matrices are the most alike in size. Between two numbers of tokens it is interpolated; beyond
them it is that of the nearest. Two schemes stand in for one that was not measured, or that has another GEMM on the GPU
of the plan:

    channel   if the GEMM takes eight-bit inputs
    weight    if it takes inputs in BF16
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.artifact.packed.scheme import CHANNEL, INT8, SCHEMES, WEIGHT, Scheme, get_scheme
from octavo.nn.speedup.table import interpolate_along
from octavo.ops.gpu_architecture import ARCHITECTURES
from octavo.plan.architecture import Architecture, Layer
from octavo.plan.hardware import Gpu
from octavo.runtime.fnuz import scheme_on
from octavo.runtime.gemm_path import find_gemm
from octavo.runtime.scheme_speeds import measured_experts_like, measured_speeds

BF16 = "bf16"
NAMES = (BF16, *SCHEMES)
MEASURED = "hopper"  # the architecture of the GPU that the speeds were measured on
# A weight that is widened in memory for each call is read in one byte, written in two and read in two.
WIDENED = 2 / 5


@dataclass(frozen=True)
class SchemeSpeeds:
    """The speed of a scheme on a GPU, as a multiple of that of BF16.

    Attributes:
        gemm: the backend of the linear layers; "weight-only" if it takes inputs in BF16.
        points: the speed by the number of tokens.
        least: the fewest tokens that were measured; None if the scheme was not measured.
        instead: the scheme whose speed it has for fewer tokens.
    """

    gemm: str
    points: Mapping[int, float]
    least: int | None
    instead: str

    def at(self, tokens: int) -> float:
        return interpolate_along(self.points, tokens)

    def is_measured(self, tokens: int) -> bool:
        return self.least is not None and tokens >= self.least


def find_scheme(name: str) -> Scheme | None:
    """The scheme of that name, None for bf16; a ValueError names the choices."""
    if name not in NAMES:
        raise ValueError(f"--scheme must be one of {', '.join(NAMES)}; got {name!r}")
    return None if name == BF16 else get_scheme(name)


def find_speeds(scheme: Scheme | None, gpu: Gpu, experts: Layer | None = None) -> SchemeSpeeds:
    """The speeds of `scheme` on `gpu`, of dense layers or of `experts`; the scheme None is BF16."""
    if scheme is None:
        return SchemeSpeeds(BF16, {1: 1.0}, 1, BF16)
    cast, gemm = _gemm_on(scheme, gpu.architecture)
    if not cast and gemm == "dequantized":
        wide = {m: speed for m, speed in _points(WEIGHT.name, None).items() if m >= 512}
        return SchemeSpeeds("dequantized", {1: WIDENED, **wide}, None, WEIGHT.name)
    instead = CHANNEL if cast else WEIGHT
    own = _points(scheme.name, experts) if (cast, gemm) == _gemm_on(scheme, MEASURED) else {}
    others = _points(instead.name, experts) or _points(instead.name, None)
    return SchemeSpeeds(gemm if cast else "weight-only", others | own, min(own, default=None), instead.name)


def _gemm_on(scheme: Scheme, architecture: str) -> tuple[bool, str]:
    """Whether the GEMM of `scheme` takes eight-bit inputs, and its backend."""
    place = ARCHITECTURES[architecture]
    cast, backend = find_gemm(scheme_on(scheme, place), place)
    return cast is not None, backend.name


def _points(scheme: str, experts: Layer | None) -> dict[int, float]:
    """The measured speeds of a scheme by the number of tokens."""
    table = measured_speeds() if experts is None else measured_experts_like(experts.inputs * experts.outputs)[1]
    return {m: found[scheme] for m, found in table.items() if scheme in found}


def weight_bytes(model: Architecture, scheme: Scheme | None) -> float:
    """Bytes of the weights: the blocks' matrices packed, routers and all else in BF16."""
    if scheme is None:
        return 2.0 * model.parameters
    packed = [(block.count * layer.copies, layer) for block in model.blocks for layer in packed_layers(block.layers)]
    whole = 2.0 * (model.parameters - sum(count * layer.inputs * layer.outputs for count, layer in packed))
    return whole + sum(count * _packed_bytes(layer, scheme) for count, layer in packed)


def packed_layers(layers: tuple[Layer, ...]) -> list[Layer]:
    return [layer for layer in layers if layer.group != "router"]


def _packed_bytes(layer: Layer, scheme: Scheme) -> float:
    """Bytes of one matrix with its scales."""
    shape = layer.outputs, layer.inputs
    scales = math.prod(scheme.weight.granularity.scale_shape(shape)) + scheme.static
    return float(math.prod(shape) + scales * (1 if scheme.weight.scale == "e8m0" else 4))


def refusal(model: Architecture, scheme: Scheme | None, gpu: Gpu) -> str:
    """Why `scheme` cannot pack a layer of `model`, or has no kernel on `gpu`; "" if it can be served."""
    if scheme is None:
        return ""
    if _gemm_on(scheme, gpu.architecture)[1] == "emulated":
        return f"{gpu.name} has no kernel for the scheme {scheme.name}: give --scheme channel"
    if scheme is INT8 and model.has_experts:
        return f"the experts of {model.name} can be packed in FP8, not int8: give --scheme channel"
    for layer in (each for block in model.blocks for each in packed_layers(block.layers)):
        if reason := scheme.misfit(layer.outputs, layer.inputs):
            return f"{model.name} has a layer that the scheme {scheme.name} cannot pack: {reason}"
    return ""
