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

from dataclasses import asdict, dataclass
from typing import Any

from octavo.artifact.packed.scheme import FUSED
from octavo.plan.architecture import Block, Layer
from octavo.plan.attention import attention_seconds, fp8_speed
from octavo.plan.communication import Links
from octavo.plan.rates import forward_seconds
from octavo.plan.schemes import MEASURED, weight_bytes
from octavo.plan.server import Server, check_server
from octavo.recipe import Recipe

# Of the rate of a copy, that the GEMMs of one token reach in BF16 (the kernels of bench/results/gpu_serve.json).
READ_SHARE = 0.887
LAUNCHES, FUSED_LAUNCHES = 40e-6, 15e-6  # seconds a block


@dataclass(frozen=True)
class ServingPlan:
    """Memory of one GPU in bytes, and speed.

    Attributes:
        gpu: the name of each GPU.
        scheme: of the linear layers, or "bf16".
        gemm: the backend of the linear layers, "bf16", or "weight-only" for inputs in BF16.
        attention: of the prompts, bf16 or fp8.
        prefill_seconds: of the prompts of the whole batch.
        step_seconds: of one new token of each sequence, at the full context.
        largest_batch: sequences of the context that fit.
        measured: whether the speed of the packed layers was measured on such a GPU, for the prompts and new tokens.
        origins: for each kind of figure, whether it rests on measurements or on the data sheet.
    """

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_serving(server: Server) -> ServingPlan:
    """Plan to serve a model.

    Raises:
        ValueError: a model without a vocabulary, a size that is not possible, a scheme that cannot pack a layer of the
            model, or that the GPU has no kernel for.
    """
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
        attention="fp8" if server.is_fp8_attention else "bf16",
        weights=weights,
        cache=cache,
        cache_a_token=each * server.gpus,
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
    """The forward pass of all prompts."""
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
    if not server.is_fp8_attention:
        return seconds
    return seconds / fp8_speed("forward from an FP8 KV cache" if server.cache == "fp8" else "forward", context)


def _traffic(server: Server, block: Block) -> float:
    """Bytes a token of norms, rotary positions and the activation in BF16.

    If they write eight bits, they write a byte an element less, and the speed of the linear layers has a pass too many
    that reads two bytes an element and writes one.
    """
    u = block.activated
    wide = 16.0 * server.model.width + 4.0 * (block.attention.queries + block.attention.keys) + 2.0 * (u + block.hidden)
    cast = [
        group[0].inputs for group in block.groups if group[0].group in ("qkv", "up", "down") and group[0].copies == 1
    ]
    return wide - 4.0 * sum(cast) if server.is_cast_fused else wide


def _step_seconds(server: Server) -> float:
    """One new token of each sequence."""
    model, rate = server.model, server.gpu.copy_rate
    linear = sum(block.count * _layer_step_seconds(server, layer) for block in model.blocks for layer in block.layers)
    head = 2.0 * model.width * model.vocabulary / rate
    cache = server.prompt_tokens * server.cache_bytes / rate
    launches = model.depth * (FUSED_LAUNCHES if server.scheme_name in FUSED else LAUNCHES)
    exchanged = model.depth * _exchange_seconds(server, server.batch)
    return (linear + head) / server.gpus + cache + launches + exchanged


def _layer_step_seconds(server: Server, layer: Layer) -> float:
    """Reading the weights in BF16, or multiplying them if that takes longer, over the scheme's speed."""
    rows = max(server.batch * layer.active // layer.copies, 1)
    reading = 2.0 * _touched(layer, server.batch) / server.gpu.copy_rate / READ_SHARE
    alone = forward_seconds(server.gpu, Recipe("bf16"), (rows, layer.inputs, layer.outputs), copies=1)
    return max(reading, layer.copies * alone) / server.speed(layer, server.batch)


def _touched(layer: Layer, batch: int) -> float:
    """Elements of a layer that `batch` tokens read: of experts those that one of them is sent to, drawn evenly."""
    if layer.copies == 1:
        return float(layer.weights)
    return layer.weights * (1 - (1 - layer.active / layer.copies) ** batch)


def _exchange_seconds(server: Server, rows: int) -> float:
    """Two sums of the residual stream in BF16 over the GPUs of one block, each a reduction and a gather."""
    if server.gpus == 1:
        return 0.0
    return 4 * Links(server.gpu.link).gather(2.0 * rows * server.model.width, server.gpus)


def _origins(server: Server) -> dict[str, str]:
    found = dict(server.gpu.origins)
    if server.scheme is not None:
        found["packed layers"] = _speed_origin(server)
    if server.is_fp8_attention:
        found["attention"] += ", over the speed of FP8 that was measured on an H200"
    elif server.attention == "fp8":
        found["attention"] += f"; in BF16, since {server.attention_limit}"
    return found


def _speed_origin(server: Server) -> str:
    pieces = ["the speed over BF16 that Llama-3-8B's layers have on an H200"]
    if server.model.has_experts:
        pieces.append("experts as the measured layer of the nearest size")
    if missing := server.unmeasured:
        unknown = f"since {server.scheme_name} was not measured there"
        pieces.append(f"for {' and '.join(missing)} that of {server.speeds.instead}, {unknown}")
    if server.gpu.architecture != MEASURED:
        pieces.append(f"not measured on {server.gpu.name}")
    return "; ".join(pieces)
