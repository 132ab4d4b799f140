"""The time of a training step, by part: a roofline with measured ceilings.

linear layers   6 M K N FLOPs each at the measured rate of their shape (`octavo.plan.rates`)
attention       its FLOPs at the measured rate (`octavo.plan.attention`); in FP8 over the measured speed of FP8
head            6 T K V FLOPs at the rate of BF16; with chunks its forward and backward pass are one
memory          norms, rotary positions, activations, residual sums and the gradients of biases (`octavo.plan.passes`),
                and copies of FSDP2
recomputation   what activation checkpointing computes again: the forward pass, or the part of it that is not saved. The
                output of a block's last GEMM is no input of any gradient, and is not computed again
optimizer       bytes of weights, gradients and moments, read and written once; over the link if they are offloaded
communication   what FSDP2 and tensor parallelism cannot hide (`octavo.plan.communication`)
waiting         by how much the host's time (`octavo.plan.host`) exceeds all of these, which are the GPU's
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from octavo.nn.speedup.table import Shape
from octavo.plan.activations import is_fused
from octavo.plan.architecture import Block
from octavo.plan.attention import attention_seconds, fp8_speed, is_fp8
from octavo.plan.communication import Links, Training
from octavo.plan.hardware import Gpu
from octavo.plan.host import host_seconds
from octavo.plan.passes import passes_seconds
from octavo.plan.rates import forward_seconds, linear_seconds, product_seconds
from octavo.plan.setup import Setup
from octavo.recipe import Recipe

PCIE = 32e9  # bytes a second and direction between CPU and GPU: 16 lanes of PCIe 4.0
ADAM_SHARE = 0.7  # of the rate of a copy, that fused AdamW reaches (bench/results/gpu_fsdp_16_layers_2_gpus.json)
# From bench/results/gpu_fsdp_16_layers_2_gpus.json: the share of the rate of a copy that FSDP2's copy of gradients into
# the reduction reaches.
REDUCTION_COPY_SHARE = 0.5
# How much longer computation takes for each second of NCCL's kernels beside it, which take multiprocessors, memory
# bandwidth and power; fitted to bench/results/gpu_fsdp_{16,32}_layers_2_gpus.json. With 32 layers the GEMMs of a block
# take 16.7 ms in BF16 (14.9 alone).
SLOWED_BF16, SLOWED_FP8 = 1.1, 0.45
CPU_RATE = 50e9  # bytes a second of AdamW on the CPU, of which a server has many cores: a guess


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step (all its micro-batches) on one GPU, by part; `host` is no part: what the host needs for it."""

    linear_layers: float
    attention: float
    head: float
    memory: float
    recomputation: float
    optimizer: float
    communication: float
    waiting: float
    host: float

    @property
    def parts(self) -> dict[str, float]:
        """What the step is the sum of."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "host"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def plan_step(setup: Setup, network: float) -> StepTime:
    """The time of an optimizer step.

    Args:
        network: bytes a second of a GPU's network card, for more GPUs than a node has.
    """
    blocks = [(block.count, block_seconds(setup, block)) for block in setup.model.blocks]
    parts = {name: sum(count * each[name] for count, each in blocks) for name in blocks[0][1]}
    micro = setup.config.accumulate
    head, optimizer = head_seconds(setup), optimizer_seconds(setup)
    alone = sum(parts.values()) + head
    whole, host = micro * _with_communication(setup, alone - head, head, network), host_seconds(setup)
    return StepTime(
        **{name: micro * seconds for name, seconds in parts.items()},
        head=micro * head,
        optimizer=optimizer,
        communication=whole - micro * alone,
        waiting=max(0.0, host - whole - optimizer),
        host=host,
    )


def block_seconds(setup: Setup, block: Block) -> dict[str, float]:
    """Seconds of the parts of one block, forward and backward, on one GPU of a tensor-parallel group."""
    attention, attention_forward = _attention_seconds(setup, block)
    tp = setup.degrees.tp
    passes, passes_forward = (setup.tokens * each / tp for each in passes_seconds(setup, block))
    copies = copied_bytes(setup, block.weights, block.parameters) / tp / setup.gpu.copy_rate
    mode = setup.config.activation_checkpointing.mode
    again = 0.0
    if mode != "none":
        again = _products_again(setup, block) + passes_forward
    if mode == "full":
        again += attention_forward
    return {
        "linear_layers": _linear_seconds(setup, block),
        "attention": attention,
        "memory": passes + copies,
        "recomputation": again,
    }


@dataclass(frozen=True)
class Product:
    """The GEMMs of a layer, or of several that run as one: (M, K, N) of y, and how many of them a block has."""

    layer: str
    shape: tuple[int, int, int]
    count: int
    quantized: bool


def block_products(setup: Setup, block: Block) -> list[Product]:
    """The GEMMs of one block on one GPU. Layers that read the same input run as one where they are fused."""
    found, tp, config = [], setup.degrees.tp, setup.config
    for group in block.groups:
        first = group[0]
        stacked = is_fused(setup.model, setup.recipe) and first.copies == 1
        outputs = [sum(layer.outputs for layer in group)] if stacked else [layer.outputs for layer in group]
        by_rows = first.group in ("o", "down")  # tensor parallelism divides the inputs of these layers
        for n in outputs:
            rows = setup.tokens * first.active // first.copies if first.active else setup.tokens // config.context
            k, n = (first.inputs // tp, n) if by_rows else (first.inputs, max(n // tp, 1))
            fits = first.copies == 1 or setup.fp8_experts
            quantized = setup.recipe.quantized and first.group != "router" and fits
            found.append(Product(first.group, (max(rows, 1), k, n), first.copies, quantized))
    return found


def _linear_seconds(setup: Setup, block: Block) -> float:
    gradients = 0.0 if setup.recipe.quantized else _cast_seconds(setup, block)  # dw comes in BF16, and is cast to FP32
    products = sum(_seconds_of(product_seconds, setup, each) for each in block_products(setup, block))
    return products + _cast_seconds(setup, block) + gradients


def _seconds_of(passes: Callable[[Gpu, Recipe, Shape, int], float], setup: Setup, product: Product) -> float:
    recipe = setup.recipe if product.quantized else Recipe("bf16")
    return passes(setup.gpu, recipe, product.shape, product.count)


def _cast_seconds(setup: Setup, block: Block) -> float:
    """The casts of FP32 weights to BF16; the measured layers have BF16 weights, and read two bytes an element less."""
    if setup.residual == 2:
        return 0.0
    moved = 2.0 if setup.recipe.quantized else 6.0
    return moved * block.weights / setup.degrees.tp / setup.gpu.copy_rate


def _products_again(setup: Setup, block: Block) -> float:
    """The GEMMs that activation checkpointing computes again, and the casts to BF16 that they need.

    In eager mode the function of a converted layer computes its output too.
    """
    products = block_products(setup, block)
    if setup.config.activation_checkpointing.mode == "selective":
        products = products[1::2]
    if setup.config.compile.blocks or not setup.recipe.quantized:
        products = [each for each in products if each.layer != "down" or each.count > 1]  # routing needs its experts'
    casts = 0.0 if setup.recipe.quantized else _cast_seconds(setup, block)
    return sum(_seconds_of(forward_seconds, setup, each) for each in products) + casts


def _attention_seconds(setup: Setup, block: Block) -> tuple[float, float]:
    """Seconds of both passes, and of the forward pass."""
    context = setup.config.context
    both, forward = (each / setup.degrees.tp for each in attention_seconds(block, setup.gpu, setup.tokens, context))
    if not is_fp8(setup):
        return both, forward
    return both / fp8_speed("forward and backward", context), forward / fp8_speed("forward", context)


def copied_bytes(setup: Setup, weights: int, parameters: int) -> float:
    """Bytes that FSDP2 copies out of the buffer of each gather, and into the FP32 buffer of the reduction.

    `weights` of the parameters belong to linear layers of a block.
    """
    if not setup.sharded:
        return 0.0
    narrow, wide = setup.gathered_bytes
    gathered = 2 * 2 * (narrow * weights + wide * (parameters - weights))
    return gathered + (wide + 4) * parameters / REDUCTION_COPY_SHARE


def head_seconds(setup: Setup) -> float:
    """The head's three GEMMs, the traffic of its logits, and FSDP2's copies of all that is in no block."""
    model, tokens = setup.model, setup.tokens
    copies = copied_bytes(setup, 0, model.outside) / setup.degrees.tp / setup.gpu.copy_rate
    if not model.vocabulary:
        return copies
    vocabulary = max(model.vocabulary // setup.degrees.tp, 1)
    products = linear_seconds(setup.gpu, Recipe("bf16"), (tokens, model.width, vocabulary))
    traffic = (22.0 if setup.chunked else 30.0) * vocabulary * tokens
    return copies + products + traffic / setup.gpu.copy_rate


def optimizer_seconds(setup: Setup) -> float:
    """AdamW reads and writes weights and moments; with clipping, gradients are read twice and written once."""
    states, ways = setup.states, setup.degrees.dp_shard * setup.degrees.tp
    moved = 2 * states.weight + 3 * states.gradient + 2 * states.moments
    rate = CPU_RATE if states.offloaded else setup.gpu.copy_rate * ADAM_SHARE
    casts = states.copies * 5 * setup.model.block_weights
    return (moved * setup.model.parameters + casts) / ways / rate


def _with_communication(setup: Setup, blocks: float, head: float, network: float) -> float:
    """Seconds of a micro-batch, of which `blocks` and `head` are computation."""
    degrees, model, depth = setup.degrees, setup.model, setup.model.depth
    links = Links(setup.gpu.link, 8 * network)
    exchanged = 0.0
    if degrees.tp > 1:  # two gathers and two reductions of activations a block, in each direction, in BF16
        exchanged = depth * 8 * links.gather(2.0 * setup.tokens * model.width, degrees.tp)
    if not setup.sharded:
        return blocks + head + exchanged
    narrow, wide = setup.gathered_bytes
    inside = model.block_weights / depth / degrees.tp
    rest = (model.block_parameters - model.block_weights) / depth / degrees.tp
    training = Training(
        layers=depth,
        block=(blocks + exchanged) / depth,
        rest=head,
        optimizer=0.0,
        gathered=narrow * inside + wide * rest,
        reduced=setup.sent_gradient * (inside + rest),
        root_gathered=wide * model.outside / degrees.tp,
        root_reduced=setup.sent_gradient * model.outside / degrees.tp,
        gradient=setup.sent_gradient,
    )
    if setup.states.offloaded and degrees.data == 1:
        return training.step(Links(PCIE), 2)
    beside = min(blocks, training.hidden(links, degrees.dp_shard))
    slowed = SLOWED_FP8 if setup.recipe.quantized else SLOWED_BF16
    return training.step(links, degrees.data, degrees.dp_shard) + slowed * beside
