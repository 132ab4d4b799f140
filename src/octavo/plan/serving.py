"""The memory and the speed of a served model: weights, keys and values, the prompt, and each new token.

A decoding step reads every weight once (of experts those that the batch's tokens are sent to), and all keys and values:

    step = (bytes of weights + bytes of keys and values) / rate of a copy  +  blocks * LAUNCHES

LAUNCHES is what the short kernels of a block cost beside their bytes, in one CUDA graph. It was fitted to the four
decoding steps of bench/results/gpu_serve.json; all else is measured elsewhere or from the data sheet.
"""

from dataclasses import asdict, dataclass
from typing import Any

from octavo.plan.architecture import Architecture, Block, Layer
from octavo.plan.communication import Links
from octavo.plan.gemms import find_gemms
from octavo.plan.hardware import Gpu
from octavo.plan.rates import linear_seconds
from octavo.recipe import Recipe

LAUNCHES = 40e-6  # seconds a block
CACHE_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class ServingPlan:
    """Memory of one GPU in bytes, and speed.

    Attributes:
        gemm: the backend of the linear layers, "bf16", or "weight-only" for weights in eight bits on a GPU without the
            GEMM of the recipe.
        prefill_seconds: of the prompts of the whole batch.
        step_seconds: of one new token of each sequence, at the full context.
        largest_batch: sequences of the context that fit.
    """

    model: str
    gemm: str
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_serving(
    model: Architecture, recipe: Recipe, gpu: Gpu, *, gpus: int = 1, batch: int, context: int, cache: str = "bf16"
) -> ServingPlan:
    """Plan to serve `model` on `gpus` GPUs that share each layer (tensor parallel).

    Args:
        recipe: bf16, or a recipe in eight bits: then the linear layers of the blocks are packed. On a GPU without its
            GEMM they run weight-only, the prompt at the speed of BF16.
        batch: sequences that are generated at once.
        context: tokens of each, prompt and new ones.
        cache: dtype of keys and values, bf16 or fp8.

    Raises:
        ValueError: a model without a vocabulary, or a size that is not possible.
    """
    _check(model, gpu, recipe, gpus, batch, context)
    weights = weight_bytes(model, recipe) / gpus
    each = cache_bytes(model, cache) / gpus
    kept = batch * context * each
    working = 4.0 * model.width * context + 6.0 * batch * model.vocabulary
    free = gpu.memory - weights - working
    gemm = find_gemms(recipe, gpu)["y"].name
    prefill_gemms = Recipe("bf16") if gemm == "none" else recipe
    prefill = _prefill_seconds(model, prefill_gemms, gpu, gpus, batch, context)
    step = _step_seconds(model, recipe, gpu, gpus, batch, batch * context * each)
    return ServingPlan(
        model=model.name,
        gemm="weight-only" if gemm == "none" else gemm,
        weights=weights,
        cache=kept,
        cache_a_token=each * gpus,
        peak=weights + kept + working,
        fits=kept <= free,
        prefill_seconds=prefill,
        step_seconds=step,
        prefill_tokens_per_second=batch * context / prefill,
        decode_tokens_per_second=batch / step,
        largest_batch=max(int(free // (context * each)), 0),
        largest_context=max(min(int(free // (batch * each)), model.context), 0),
    )


def weight_bytes(model: Architecture, recipe: Recipe) -> float:
    """Bytes of the weights: the blocks' matrices in eight bits with an FP32 scale an output, all else in BF16."""
    if not recipe.quantized:
        return 2.0 * model.parameters
    scales = sum(block.count * layer.copies * layer.outputs for block in model.blocks for layer in block.layers)
    routers = sum(block.count * layer.weights for block in model.blocks for layer in block.group("router"))
    return 2.0 * model.parameters - (model.block_weights - routers) + 4.0 * scales


def cache_bytes(model: Architecture, cache: str) -> float:
    """Bytes of the keys and values of one token."""
    return sum(block.count * block.attention.cache_features for block in model.blocks) * float(CACHE_BYTES[cache])


def _check(model: Architecture, gpu: Gpu, recipe: Recipe, gpus: int, batch: int, context: int) -> None:
    if not model.vocabulary:
        raise ValueError(f"--serve is for language models, and {model.name} has no vocabulary: leave it out")
    if min(gpus, batch, context) < 1:
        raise ValueError(f"--gpus, --batch and --context must be at least 1; got {gpus}, {batch} and {context}")
    if context > model.context:
        raise ValueError(f"--context must be at most the {model.context} tokens of {model.name}; got {context}")
    heads = model.blocks[0].attention.heads
    if heads % gpus:
        raise ValueError(f"--gpus must divide the {heads} heads of {model.name}; got {gpus}")


def _prefill_seconds(model: Architecture, recipe: Recipe, gpu: Gpu, gpus: int, batch: int, context: int) -> float:
    """The forward pass of all prompts: a third of the linear layers' time, two sevenths of the attention's."""
    rows = batch * context
    seconds = 0.0
    for block in model.blocks:
        linear = sum(_forward_seconds(group, recipe, gpu, gpus, rows) for group in block.groups)
        a = block.attention
        attention = 7 * rows * context * (a.queries + a.output) / 2 / gpu.attention_rate * 2 / 7 / gpus
        memory = rows * _traffic(model, block) / gpu.copy_rate / gpus
        seconds += block.count * (linear + attention + memory + _exchange_seconds(model, gpu, gpus, rows))
    return seconds + 2.0 * model.width * model.vocabulary / gpu.copy_rate / gpus


def _forward_seconds(group: tuple[Layer, ...], recipe: Recipe, gpu: Gpu, gpus: int, rows: int) -> float:
    """The layers that read the same input, as one GEMM. A packed weight is not cast, as the measured ones were."""
    first, outputs = group[0], sum(layer.outputs for layer in group)
    used = Recipe("bf16") if first.group == "router" else recipe
    each = max(rows * first.active // first.copies, 1)
    cast = 5.0 * first.inputs * outputs / gpu.copy_rate if used.quantized else 0.0
    seconds = linear_seconds(gpu, used, (each, first.inputs, outputs)) - cast
    return first.copies * max(seconds, 0.0) / 3 / gpus


def _traffic(model: Architecture, block: Block) -> float:
    """Bytes a token of norms, rotary positions and the activation in BF16."""
    u = sum(layer.outputs * layer.active for layer in block.group("up"))
    return 16.0 * model.width + 4.0 * (block.attention.queries + block.attention.keys) + 2.0 * (u + block.hidden)


def _step_seconds(model: Architecture, recipe: Recipe, gpu: Gpu, gpus: int, batch: int, cache: float) -> float:
    """One new token of each sequence; `cache` is the bytes of keys and values on one GPU."""
    width = 1.0 if recipe.quantized else 2.0
    read = sum(block.count * width * _touched(layer, batch) for block in model.blocks for layer in block.layers)
    read += 2.0 * model.width * model.vocabulary
    exchanged = model.depth * _exchange_seconds(model, gpu, gpus, batch)
    return (read / gpus + cache) / gpu.copy_rate + model.depth * LAUNCHES + exchanged


def _touched(layer: Layer, batch: int) -> float:
    """Elements of a layer that `batch` tokens read: of experts those that one of them is sent to, drawn evenly."""
    if layer.copies == 1:
        return float(layer.weights)
    return layer.weights * (1 - (1 - layer.active / layer.copies) ** batch)


def _exchange_seconds(model: Architecture, gpu: Gpu, gpus: int, rows: int) -> float:
    """Two sums of the residual stream in BF16 over the GPUs of one block, each a reduction and a gather."""
    return 4 * Links(gpu.link).gather(2.0 * rows * model.width, gpus) if gpus > 1 else 0.0
