"""The memory and the speed of a served model: weights, keys and values, the prompt, and each new token.

The prompt takes the forward pass of a BF16 model, with the linear layers at the speed of the scheme. That speed has a
pass in it that casts the inputs; where norms and activations cast them, there is no such pass (`_traffic`). A decoding
step reads every weight once (of experts those that the batch's tokens are sent to), and all keys and values:

    step = bytes of weights in BF16 / (READ_SHARE * rate of a copy) / speed of the scheme
         + bytes of keys and values / rate of a copy  +  blocks * launches

The launches are what the short kernels of a block cost beside their bytes, in one CUDA graph. The two figures were
fitted to the decoding steps of bench/results/gpu_serve.json and gpu_weight_only.json; all else is measured elsewhere or
from the data sheet.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from octavo.checkpoint.scheme import CHANNEL, FUSED, INT8, MX, SCHEMES, WEIGHT, Scheme, find_gemm, get_scheme, scheme_on
from octavo.ops.dispatch import SHORTEST_PROMPT
from octavo.ops.launching import ARCHITECTURES
from octavo.plan.model_shape import Architecture, Block, Layer
from octavo.plan.setup import attention_seconds, find_origins, fp8_limit
from octavo.plan.step_time import NODE, Links
from octavo.rates.measured import Gpu, experts_like, forward_seconds, fp8_speed, interpolate_along, measured_speeds
from octavo.recipe import Recipe

# ---- The packing schemes of a served model: the bytes of packed weights, and the speed of their GEMMs over that of
# BF16.
#
# The speed was measured by the number of tokens, of the linear layers of Llama-3-8B together on an H200, with the
# quantization of their inputs (`octavo.rates.measured`). Experts have the speed of the measured layer of experts whose
# matrices are the most alike in size. Between two numbers of tokens it is interpolated; beyond them it is that of the
# nearest. Three schemes stand in for one that was not measured, or that has another GEMM on the GPU of the plan:
#
#     channel   if the GEMM takes eight-bit inputs
#     mx        if it casts the inputs to eight bits, and widens both operands
#     weight    if it takes inputs in BF16


BF16 = "bf16"
NAMES = (BF16, *SCHEMES)
MEASURED = "hopper"  # the architecture of the GPU that the speeds were measured on
# A weight that is widened in memory for each call is read in one byte, written in two and read in two.
WIDENED = 2 / 5
DENSE = Layer("dense", 1, 1)  # the linear layers together, whatever their size


@dataclass(frozen=True)
class SchemeSpeeds:
    """The speed of a scheme as a multiple of that of BF16, by the number of tokens (`points`); `gemm` is the backend of
    the linear layers. For fewer than the `least` tokens that were measured for the scheme (None: it was not measured)
    it is that of the scheme `instead`."""

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


@cache
def find_speeds(scheme: Scheme | None, gpu: Gpu, layer: Layer) -> SchemeSpeeds:
    """The speeds of `layer` in `scheme` on `gpu`; the scheme None is BF16, in which routers stay."""
    if scheme is None or layer.group == "router":
        return SchemeSpeeds(BF16, {1: 1.0}, 1, BF16)
    cast, gemm = _gemm_on(scheme, gpu.architecture)
    if not cast and gemm == "dequantized":
        wide = {m: speed for m, speed in _points(WEIGHT.name, DENSE).items() if m >= 512}
        return SchemeSpeeds("dequantized", {1: WIDENED, **wide}, None, WEIGHT.name)
    instead = (MX if gemm == "dequantized" else CHANNEL if cast else WEIGHT).name
    own = _points(scheme.name, layer) if (cast, gemm) == _gemm_on(scheme, MEASURED) else {}
    least = min(own, default=None)
    others = _points(instead, layer) or _points(instead, DENSE)
    below = {tokens: speed for tokens, speed in others.items() if least is None or tokens < least}
    return SchemeSpeeds(gemm if cast else "weight-only", below | own, least, instead)


def _gemm_on(scheme: Scheme, architecture: str) -> tuple[bool, str]:
    """True if the GEMM of `scheme` takes eight-bit inputs, and its backend."""
    place = ARCHITECTURES[architecture]
    cast, backend = find_gemm(scheme_on(scheme, place), place)
    return cast is not None, backend.name


def _points(scheme: str, layer: Layer) -> dict[int, float]:
    table = measured_speeds() if layer.copies == 1 else experts_like(layer.inputs * layer.outputs)[1]
    return {m: found[scheme] for m, found in table.items() if scheme in found}


def weight_bytes(model: Architecture, scheme: Scheme | None) -> float:
    """Bytes of the weights: the blocks' matrices packed, routers and all else in BF16."""
    if scheme is None:
        return 2.0 * model.parameters
    packed = [(b.count * layer.copies, layer) for b in model.blocks for layer in b.layers if layer.group != "router"]
    whole = 2.0 * (model.parameters - sum(count * layer.inputs * layer.outputs for count, layer in packed))
    for count, layer in packed:
        shape = layer.outputs, layer.inputs
        scales = math.prod(scheme.weight.granularity.scale_shape(shape)) + scheme.static
        whole += count * float(math.prod(shape) + scales * (1 if scheme.weight.scale == "e8m0" else 4))
    return whole


def refusal(model: Architecture, scheme: Scheme | None, gpu: Gpu) -> str:
    """Why `scheme` cannot pack a layer of `model`, or has no kernel on `gpu`; "" if it can be served."""
    if scheme is None:
        return ""
    if _gemm_on(scheme, gpu.architecture)[1] == "emulated":
        return f"{gpu.name} has no kernel for the scheme {scheme.name}: give --scheme channel"
    if scheme is INT8 and model.has_experts:
        return f"the experts of {model.name} can be packed in FP8, not int8: give --scheme channel"
    for layer in (each for block in model.blocks for each in block.layers):
        if layer.group != "router" and (reason := scheme.misfit(layer.outputs, layer.inputs)):
            return f"{model.name} has a layer that the scheme {scheme.name} cannot pack: {reason}"
    return ""


# ---- A model as it is served.


CACHE_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Server:
    """A model as it is served: the scheme of its packed layers (None: BF16), and GPUs that share each layer; `batch`
    texts of `context` tokens at once. Dtypes (bf16, fp8) are of keys and values and of the attention of prompts."""

    model: Architecture
    scheme: Scheme | None
    gpu: Gpu
    gpus: int
    batch: int
    context: int
    cache: str
    attention: str
    network: float = 50e9  # bytes a second of a GPU's network card, beyond one node

    @property
    def speeds(self) -> SchemeSpeeds:
        return find_speeds(self.scheme, self.gpu, DENSE)

    def speed(self, layer: Layer, tokens: int) -> float:
        """The speed of a layer as a multiple of that in BF16, for so many tokens, routed ones counted once."""
        return find_speeds(self.scheme, self.gpu, layer).at(tokens)

    @property
    def unmeasured(self) -> list[str]:
        """The parts of the speeds that were not measured for this scheme."""
        tokens = {"prompts": self.prompt_tokens, "new tokens": self.batch}
        found = [name for name, count in tokens.items() if not self.speeds.is_measured(count)]
        layers = [layer for block in self.model.blocks for layer in block.layers if layer.copies > 1]
        experts = [
            find_speeds(self.scheme, self.gpu, layer).is_measured(n) for layer in layers for n in tokens.values()
        ]
        return found if all(experts) else [*found, "experts"]

    @property
    def scheme_name(self) -> str:
        return BF16 if self.scheme is None else self.scheme.name

    @property
    def attention_limit(self) -> str | None:
        """Why prompts do not attend in FP8; "" if they do, and None if they are not to."""
        if self.attention != "fp8":
            return None
        if self.context < SHORTEST_PROMPT:
            return f"prompts of {self.context:,} tokens are shorter than {SHORTEST_PROMPT:,}"
        return fp8_limit(self.model, self.gpu)

    @property
    def prompt_tokens(self) -> int:
        return self.batch * self.context

    @property
    def cache_bytes(self) -> float:
        """Bytes of the keys and values of one token on one GPU."""
        features = sum(block.count * block.attention.cache_features(self.gpus) for block in self.model.blocks)
        return features * float(CACHE_BYTES[self.cache])


def check_server(server: Server) -> None:
    """Raise a ValueError for a model without vocabulary, an impossible size, or a scheme that does not fit."""
    model, gpus, context = server.model, server.gpus, server.context
    if not model.vocabulary:
        raise ValueError(f"--serve is for language models, and {model.name} has no vocabulary: leave it out")
    for option, value, known in (("kv-cache", server.cache, CACHE_BYTES), ("attention", server.attention, CACHE_BYTES)):
        if value not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}; got {value!r}")
    if context > model.context:
        raise ValueError(f"--context must be at most the {model.context} tokens of {model.name}; got {context}")
    heads = model.blocks[0].attention.heads
    if gpus < 1 or heads % gpus:
        raise ValueError(f"--gpus must divide the {heads} heads of {model.name}; got {gpus}")
    if reason := refusal(model, server.scheme, server.gpu):
        raise ValueError(reason)


# ---- Its memory and its speed.


# Of the rate of a copy, that the GEMMs of one token reach in BF16 (the kernels of bench/results/gpu_serve.json).
READ_SHARE = 0.887
LAUNCHES, FUSED_LAUNCHES = 40e-6, 15e-6  # seconds a block


@dataclass(frozen=True)
class ServingPlan:
    """Memory of one GPU in bytes, and speed: `prefill_seconds` of the prompts of the whole batch, `step_seconds` of one
    new token of each text at the full context. `measured` says whether the speed of the packed layers was measured on
    such a GPU; `origins` say it of each kind of figure."""

    model: str
    gpu: str
    scheme: str
    gemm: str
    attention: str
    weights: float
    cache: float
    cache_a_token: float
    peak: float
    fits: bool
    prefill_seconds: float
    step_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    largest_batch: int
    largest_context: int
    measured: bool
    origins: dict[str, str]


def plan_serving(server: Server) -> ServingPlan:
    check_server(server)
    model, gpu, batch, context = server.model, server.gpu, server.batch, server.context
    weights = weight_bytes(model, server.scheme) / server.gpus
    each = server.cache_bytes
    cache = batch * context * each
    working = 4.0 * model.width * context + 6.0 * batch * model.vocabulary
    free = gpu.memory - weights - working
    prefill, step = _prefill_seconds(server), _step_seconds(server)
    return ServingPlan(
        model=model.name,
        gpu=gpu.name,
        scheme=server.scheme_name,
        gemm=server.speeds.gemm,
        attention="fp8" if server.attention_limit == "" else "bf16",
        weights=weights,
        cache=cache,
        cache_a_token=replace(server, gpus=1).cache_bytes,
        peak=weights + cache + working,
        fits=cache <= free,
        prefill_seconds=prefill,
        step_seconds=step,
        prefill_tokens_per_second=server.prompt_tokens / prefill,
        decode_tokens_per_second=batch / step,
        largest_batch=max(int(free // (context * each)), 0),
        largest_context=max(min(int(free // (batch * each)), model.context), 0),
        measured=gpu.architecture == MEASURED and not server.unmeasured,
        origins=_origins(server),
    )


def _prefill_seconds(server: Server) -> float:
    model, rate, gpus, rows = server.model, server.gpu.copy_rate, server.gpus, server.prompt_tokens
    seconds = 0.0
    for block in model.blocks:
        linear = sum(_forward_seconds(server, group) for group in block.groups)
        memory = rows * _traffic(server, block) / rate
        alone = (linear + _attention_seconds(server, block) + memory) / gpus
        seconds += block.count * (alone + _exchange_seconds(server, rows))
    return seconds + 2.0 * model.width * model.vocabulary / rate / gpus


def _forward_seconds(server: Server, group: tuple[Layer, ...]) -> float:
    """The layers that read the same input, as one GEMM: its time in BF16 over the scheme's speed."""
    first, outputs = group[0], sum(layer.outputs for layer in group)
    rows = max(server.prompt_tokens * first.active // first.copies, 1)
    seconds = forward_seconds(server.gpu, Recipe("bf16"), (rows, first.inputs, outputs), first.copies)
    return seconds / server.speed(first, server.prompt_tokens)


def _attention_seconds(server: Server, block: Block) -> float:
    context = server.context
    _, seconds = attention_seconds(block, server.gpu, server.prompt_tokens, context)
    if server.attention_limit != "":
        return seconds
    return seconds / fp8_speed("forward from an FP8 KV cache" if server.cache == "fp8" else "forward", context)


def _traffic(server: Server, block: Block) -> float:
    """Bytes a token of norms, rotary positions and the activation in BF16. If they write eight bits, they write a byte
    an element less, and the speed of the linear layers has a pass too many, of three bytes an element."""
    u = block.activated
    wide = 16.0 * server.model.width + 4.0 * (block.attention.queries + block.attention.keys) + 2.0 * (u + block.hidden)
    cast = [first.inputs for first, *_ in block.groups if first.group in ("qkv", "up", "down") and first.copies == 1]
    fused = server.scheme in (CHANNEL, INT8) and server.speeds.gemm not in ("weight-only", "dequantized")
    return wide - 4.0 * sum(cast) if fused else wide


def _step_seconds(server: Server) -> float:
    model, rate = server.model, server.gpu.copy_rate
    linear = sum(block.count * _layer_step_seconds(server, layer) for block in model.blocks for layer in block.layers)
    head = 2.0 * model.width * model.vocabulary / rate
    cache = server.prompt_tokens * server.cache_bytes / rate
    launches = model.depth * (FUSED_LAUNCHES if server.scheme_name in FUSED else LAUNCHES)
    exchanged = model.depth * _exchange_seconds(server, server.batch)
    return (linear + head) / server.gpus + cache + launches + exchanged


def _layer_step_seconds(server: Server, layer: Layer) -> float:
    """Reading the weights in BF16, or multiplying them if that takes longer, over the scheme's speed. A batch
    reads the experts that its tokens are sent to, drawn evenly."""
    rows = max(server.batch * layer.active // layer.copies, 1)
    read = 1.0 if layer.copies == 1 else 1 - (1 - layer.active / layer.copies) ** server.batch
    reading = 2.0 * (layer.weights * read) / server.gpu.copy_rate / READ_SHARE
    alone = forward_seconds(server.gpu, Recipe("bf16"), (rows, layer.inputs, layer.outputs), copies=1)
    return max(reading, layer.copies * alone) / server.speed(layer, server.batch)


def _exchange_seconds(server: Server, rows: int) -> float:
    """Two sums of the residual stream in BF16 over the GPUs of one block, each a reduction and a gather; 0 for one."""
    return 4 * Links(server.gpu.link, NODE * server.network).gather(2.0 * rows * server.model.width, server.gpus)


def _origins(server: Server) -> dict[str, str]:
    rows = server.prompt_tokens
    layers = [layer for block in server.model.blocks for layer in block.layers]
    products = [((rows * each.active // each.copies, each.inputs, each.outputs), each.copies) for each in layers]
    found = find_origins(server.model, server.gpu, Recipe("bf16"), products, server.attention_limit)
    if server.scheme is None:
        return found
    pieces = ["the speed over BF16 that Llama-3-8B's layers have on an H200"]
    if server.model.has_experts:
        pieces.append("experts as the measured layer of the nearest size")
    if missing := server.unmeasured:
        unknown = f"since {server.scheme_name} was not measured there"
        pieces.append(f"for {' and '.join(missing)} that of {server.speeds.instead}, {unknown}")
    if server.gpu.architecture != MEASURED:
        pieces.append(f"not measured on {server.gpu.name}")
    return found | {"packed layers": "; ".join(pieces)}
