"""The time of a training step, by part: a roofline with measured ceilings.

linear layers   6 M K N FLOPs each at the measured rate of their shape (`octavo.rates.measured`)
attention       its FLOPs at the measured rate (`octavo.plan.setup`); in FP8 over the measured speed of FP8
head            6 T K V FLOPs at the rate of BF16; with chunks its forward and backward pass are one
memory          norms, rotary positions, activations, residual sums and the gradients of biases,
                and copies of FSDP2
recomputation   what activation checkpointing computes again: the forward pass, or the part of it that is not saved. The
                output of a block's last GEMM is no input of any gradient, and is not computed again
optimizer       bytes of weights, gradients and moments, read and written once; on the CPU its parameters a second
communication   what FSDP2, tensor parallelism and copies to the CPU and from it cannot hide
waiting         by how much the host's time exceeds all of these, which are the GPU's
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from octavo.numerics.qtensor import ROW, TENSOR
from octavo.plan.model_shape import Block
from octavo.plan.setup import FP32, Setup, attention_seconds
from octavo.rates.measured import Gpu, Shape, forward_seconds, fp8_speed, product_seconds
from octavo.recipe import Recipe
from octavo.train.processes import unit_size

ADAM_SHARE = 0.7  # of the rate of a copy, that fused AdamW reaches (bench/results/gpu_fsdp_16_layers_2_gpus.json)
REDUCTION_COPY_SHARE = 0.5  # of the same rate, that FSDP2's copy of gradients into the reduction reaches there
# How much longer computation takes for each second of NCCL's kernels beside it, which take multiprocessors, memory
# bandwidth and power; fitted to bench/results/gpu_fsdp_{16,32}_layers_2_gpus.json. With 32 layers the GEMMs of a block
# take 16.7 ms in BF16 (14.9 alone).
SLOWED_BF16, SLOWED_FP8 = 1.1, 0.45


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step (all its micro-batches) on one GPU, by the parts that add up to it; `host` is no part: what the
    host needs for it."""

    parts: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def plan_step(setup: Setup, network: float) -> StepTime:
    """The time of an optimizer step; `network`: bytes a second of a GPU's network card, beyond one node."""
    blocks = [(block.count, block_seconds(setup, block)) for block in setup.model.blocks]
    inside = {name: sum(count * each[name] for count, each in blocks) for name in blocks[0][1]}
    micro, head, host = setup.config.accumulate, head_seconds(setup), host_seconds(setup)
    alone = sum(inside.values())
    if setup.states.resident:
        whole, optimizer = _with_host(setup, alone + head)
    else:
        whole, optimizer = micro * _with_communication(setup, alone, head, network), optimizer_seconds(setup)
    in_order = {"linear_layers": 0.0, "attention": 0.0, "head": head} | inside
    parts = {name: micro * seconds for name, seconds in in_order.items()}
    parts |= {"optimizer": optimizer, "communication": whole - micro * (alone + head)}
    return StepTime(parts | {"waiting": max(0.0, host - whole - optimizer)}, host)


def block_seconds(setup: Setup, block: Block) -> dict[str, float]:
    """Seconds of the parts of one block, forward and backward, on one GPU of a tensor-parallel group."""
    tp, context = setup.degrees.tp, setup.config.context
    both = attention_seconds(block, setup.gpu, setup.tokens, context)
    attention, attention_forward = (seconds / tp for seconds in both)
    if setup.fp8_attention:
        attention /= fp8_speed("forward and backward", context)
        attention_forward /= fp8_speed("forward", context)
    forward, backward = (sum(each.seconds(setup.gpu) for each in found) for found in block_passes(setup, block))
    passes, passes_forward = (setup.tokens * each / tp for each in (forward + backward, forward))
    copies = copied_bytes(setup, block.weights, block.parameters) / tp / setup.gpu.copy_rate
    mode = setup.config.activation_checkpointing.mode
    again = 0.0 if mode == "none" else _products_again(setup, block)
    if mode != "none" and not setup.recomputes_hidden(block):
        again += passes_forward
    if mode == "full":
        again += attention_forward
    casts = _cast_seconds(setup, block) * (1 if setup.recipe.quantized else 2)  # dw comes in BF16, and is cast to FP32
    return {
        "linear_layers": _seconds_of(product_seconds, setup, block_products(setup, block)) + casts,
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
        stacked = setup.fused and first.copies == 1
        outputs = [sum(layer.outputs for layer in group)] if stacked else [layer.outputs for layer in group]
        by_rows = first.group in ("o", "down")  # tensor parallelism divides the inputs of these layers
        for n in outputs:
            rows = setup.tokens * first.active // first.copies if first.active else setup.tokens // config.context
            k, n = (first.inputs // tp, n) if by_rows else (first.inputs, max(n // tp, 1))
            fits = first.copies == 1 or setup.fp8_experts
            quantized = setup.recipe.quantized and first.group != "router" and fits
            found.append(Product(first.group, (max(rows, 1), k, n), first.copies, quantized))
    return found


def _seconds_of(passes: Callable[[Gpu, Recipe, Shape, int], float], setup: Setup, products: list[Product]) -> float:
    bf16 = Recipe("bf16")
    return sum(passes(setup.gpu, setup.recipe if p.quantized else bf16, p.shape, p.count) for p in products)


def _cast_seconds(setup: Setup, block: Block) -> float:
    """The casts of FP32 weights to BF16; the measured layers have BF16 weights, and read two bytes an element less."""
    if setup.residual == 2:
        return 0.0
    moved = 2.0 if setup.recipe.quantized else 6.0
    return moved * block.weights / setup.degrees.tp / setup.gpu.copy_rate


def _products_again(setup: Setup, block: Block) -> float:
    """The GEMMs that activation checkpointing computes again, and the casts to BF16 that they need. In eager mode the
    function of a converted layer computes its output too."""
    products = block_products(setup, block)
    if setup.recomputes_hidden(block):
        return _seconds_of(forward_seconds, setup, [each for each in products if each.layer == "up"])
    if setup.config.activation_checkpointing.mode == "selective":
        products = products[1::2]
    if setup.config.compile.blocks or not setup.recipe.quantized:
        products = [each for each in products if each.layer != "down" or each.count > 1]  # routing needs its experts'
    casts = 0.0 if setup.recipe.quantized else _cast_seconds(setup, block)
    return _seconds_of(forward_seconds, setup, products) + casts


def copied_bytes(setup: Setup, weights: int, parameters: int) -> float:
    """Bytes that FSDP2 copies out of the buffer of each gather, and into the FP32 buffer of the reduction. `weights` of
    the parameters belong to linear layers of a block."""
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
    products = product_seconds(setup.gpu, Recipe("bf16"), (tokens, model.width, vocabulary))
    traffic = (22.0 if setup.chunked else 30.0) * vocabulary * tokens
    return copies + products + traffic / setup.gpu.copy_rate


def optimizer_seconds(setup: Setup) -> float:
    """AdamW reads and writes weights and moments; with clipping, gradients are read twice and written once."""
    states, ways = setup.states, setup.degrees.dp_shard * setup.degrees.tp
    if states.offloaded:
        return setup.model.parameters / ways / setup.gpu.host_adam
    moved = 2 * states.weight + 3 * states.gradient + 2 * states.moments
    casts = states.copies * 5 * setup.model.block_weights
    return (moved * setup.model.parameters + casts) / ways / (setup.gpu.copy_rate * ADAM_SHARE)


def _with_host(setup: Setup, alone: float) -> tuple[float, float]:
    """Seconds of the passes of a step with masters on the host, whose micro-batches take `alone` each without copies,
    and of AdamW after them. FP32 weights come in the first forward pass. A backward pass sends FP32 gradients, and gets
    the sum of those before. Without clipping AdamW runs beside the last backward pass."""
    copied, more = FP32 * setup.model.parameters / setup.gpu.host_copy, setup.config.accumulate - 1
    forward, backward = alone / 3, alone * 2 / 3
    first, later = max(backward, copied), max(backward, 2 * copied)
    beside = 0.0 if setup.config.clip else later if more else first
    passes = max(forward, copied) + first + more * (forward + later)
    return passes, max(0.0, optimizer_seconds(setup) - beside)


def _with_communication(setup: Setup, blocks: float, head: float, network: float) -> float:
    """Seconds of a micro-batch, of which `blocks` and `head` are computation."""
    degrees, model, depth = setup.degrees, setup.model, setup.model.depth
    links = Links(setup.gpu.link, 8 * network)
    # Two gathers and two reductions of activations a block, in each direction, in BF16; with one GPU they take no time.
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
        return training.step(Links(setup.gpu.host_copy / 2), 2)  # a ring of two brings a rank half of the bytes
    beside = min(blocks, training.hidden(links, degrees.dp_shard))
    slowed = SLOWED_FP8 if setup.recipe.quantized else SLOWED_BF16
    return training.step(links, degrees.data, degrees.dp_shard) + slowed * beside


# ---- The passes over the tokens between the GEMMs of a block: norms, the activation, and what moves bytes.
#
# A pass takes as long as its bytes at the rate of a copy, or as its instructions at the rate of the multiprocessors,
# whichever is longer. SwiGLU of layers that are apart and RMS norm are bound by their bytes. GELU has an error
# function. LayerNorm has two sums over a row, and Triton's blocks a power of two of columns: 2,048 for 1,280. Gate and
# up of experts that are not fused are one tensor, and torch.compile computes both gradients for each of its columns.
#
# The instructions were counted by time: what an H200 took for such a pass alone, as compiled in BF16 by torch 2.11
# (bench/log.md). LayerNorm was measured at a width of 1,280 alone. Octavo's fused modules have kernels of their own, of
# which the instructions hide behind the bytes of their casts, and these are in the measured time of the layers.


# Instructions an element, forward and backward: of GELU, and of LayerNorm with its padding.
GELU, LAYER_NORM = (48.0, 66.0), (73.0, 52.0)
STACKED_GATE = 134.0  # of SwiGLU's gradient, an element of h, where gate and up are one tensor


@dataclass(frozen=True)
class Pass:
    """Bytes and instructions for each token. A multiplication with an addition is an instruction, and two FLOPs."""

    moved: float
    instructions: float = 0.0

    def seconds(self, gpu: Gpu) -> float:
        return max(self.moved / gpu.copy_rate, 2 * self.instructions / gpu.fp32)


def block_passes(setup: Setup, block: Block) -> tuple[list[Pass], list[Pass]]:
    """The passes of a block, forward and backward. The casts of a converted layer are in its measured time, although a
    fused module makes them in these passes."""
    r, width, u, hidden = setup.residual, setup.model.width, block.activated, block.hidden
    columns = 1 << (width - 1).bit_length() if setup.model.layer_norm and not setup.fused else 0
    activation = (0.0, 0.0)  # instructions an element
    if not block.gated and not setup.fused:
        activation = GELU
    elif block.has_experts and not setup.fused_experts:
        activation = 0.0, STACKED_GATE
    forward, backward = _moved(setup, block)
    activated = Pass(2 * (u + hidden), activation[0] * hidden), Pass(4 * (u + hidden), activation[1] * hidden)
    return (
        [Pass((2 * r + 4) * width, LAYER_NORM[0] * columns)] * 2 + [activated[0], Pass(forward)],
        [Pass((3 * r + 4) * width, LAYER_NORM[1] * columns)] * 2
        + [activated[1], Pass(backward + bias_bytes(setup, block))],
    )


def _moved(setup: Setup, block: Block) -> tuple[float, float]:
    """Bytes a token of rotary positions, of the parts of a projection to q, k and v, of norms of heads, and of the
    order of the rows of experts. Positions turn q and k as they part. Without them the parts are views, and their
    gradients are copied side by side. A norm of heads reads them once more. Its backward pass writes the gradient of
    its output, which the gradients of its weight and of its input both read, beside its input."""
    a, experts = block.attention, max(layer.active for layer in block.group("down"))
    features = a.queries + a.keys + a.values
    sorting = 8 * experts * setup.model.width if experts > 1 else 0  # rows to their experts and back
    if setup.model.layer_norm:  # such models add positions to the embedding
        return sorting, 4 * features + sorting
    both = 4 * (a.queries + a.keys) + features + sorting
    return both + 2 * a.normed, both + 10 * a.normed


def bias_bytes(setup: Setup, block: Block) -> float:
    """Bytes a token of the gradients of biases, which the measured layers do not have: sums that read dy. In a fused
    MLP the dy of the layers before the activation is in eight bits: the sum reads dh and u, and computes dy from them
    again."""
    biased = [layer for layer in block.layers if layer.bias]
    moved = 0
    if setup.fused and any(layer.group == "up" for layer in biased):
        moved = 2 * (block.activated + block.hidden)
        biased = [layer for layer in biased if layer.group != "up"]
    return moved + 2 * sum(layer.outputs * layer.active for layer in biased)


# ---- The time of the host in a training step: what a processor core takes to launch the work of its GPU.
#
#     micro-batch   blocks * (both passes + recomputation + FSDP2's hooks + the gather in eight bits)
#     step          accumulate * micro-batch + blocks * (clipping, AdamW and the casts of the weights)
#
# The host runs ahead of a GPU whose work takes longer. Otherwise the GPU waits, and the step takes as long as the host.
# This time depends on no size: a block of few tokens, or a narrow one, has it too. What is outside of the blocks takes
# less than half of a block.
#
# The constants are seconds of a block of a Llama with seven linear layers, by torch 2.11, on hosts of H200s. Steps
# without a GPU tell how the parts of a step compare (bench/log.md). Their scale is that of three whole steps of sharded
# blocks: 59 ms (BF16) and 106 ms (`rowwise`, full activation checkpointing, the gather in eight bits) of 16 blocks that
# are gathered in pairs, and 216 ms of 28 that are gathered one by one; and of the layer stack on one GPU (1.0 ms a
# block in BF16, 2.35 by `rowwise`). Machines of this kind differ by 15 %. Nothing was measured for experts and for
# tensor parallelism, which launch more: there the host takes longer than planned.


# Forward and backward pass of a compiled block: in BF16; where norms and activations quantize; and for other recipes
# by their scales.
BF16, FUSED, ROWS, HISTORIES, BLOCKS = 1.1e-3, 2.3e-3, 2.9e-3, 5.0e-3, 7.7e-3
EAGER, EAGER_FP8 = 2.0e-3, 6.6e-3
# Recomputation, by the mode of activation checkpointing. In eager mode PyTorch decides operation by operation.
AGAIN = {"none": 0.0, "selective": 0.15e-3, "full": 0.3e-3}
EAGER_AGAIN = {"none": 0.0, "selective": 11e-3, "full": 4.7e-3}
SHARDED, SHARDED_FP8 = 3.1e-3, 3.6e-3  # FSDP2's hooks in both passes: two gathers, a reduction, and their copies
NARROW_GATHER = 1.4e-3  # gathers in eight bits have more tensors
IN_PAIRS = 0.7  # of the time of FSDP2's hooks, where two blocks are one unit
UPDATE, UPDATE_FP8, UPDATE_SHARDED = 0.3e-3, 0.8e-3, 0.35e-3


def host_seconds(setup: Setup) -> float:
    """Seconds that the host takes for a step with all its micro-batches."""
    passes = sum(block.count * _micro_batch(setup, block) for block in setup.model.blocks)
    update = UPDATE_FP8 if setup.recipe.quantized else UPDATE
    if setup.sharded:  # a rank casts its parts of all weights in a few launches
        update = UPDATE_SHARDED
    return setup.config.accumulate * passes + setup.model.depth * update


def _micro_batch(setup: Setup, block: Block) -> float:
    """Seconds of a block in a micro-batch."""
    quantized, mode = setup.recipe.quantized, setup.config.activation_checkpointing.mode
    mode = "none" if setup.recomputes_hidden(block) else mode
    if setup.config.compile.blocks:
        seconds = _compiled(setup) + AGAIN[mode]
    else:
        seconds = (EAGER_FP8 if quantized else EAGER) + EAGER_AGAIN[mode]
    if not setup.sharded:
        return seconds
    hooks = SHARDED_FP8 if quantized else SHARDED
    if quantized and setup.config.parallel.fp8_all_gather:
        hooks += NARROW_GATHER
    return seconds + (hooks if unit_size(block.parameters) == 1 else IN_PAIRS * hooks)


def _compiled(setup: Setup) -> float:
    recipe = setup.recipe
    if not recipe.quantized:
        return BF16
    if setup.fused:
        return FUSED
    if recipe.scales_by_history:
        return HISTORIES
    granularities = {cast.granularity for cast in (recipe.x, recipe.w, recipe.dy) if cast is not None}
    return ROWS if granularities <= {ROW, TENSOR} else BLOCKS


# ---- The time of a training step under FSDP2 on many GPUs, from the time that its blocks take on a few.
#
# FSDP2 gathers the weights of block i + 1 while block i computes, forward and backward, and reduces the gradients of a
# block while the next one computes. So with a gather of g seconds, a reduction of s, and blocks of f and b = 2 f
# seconds
#
#     forward  = g + (L - 1) max(f, g) + f
#     backward = g + (L - 1) max(b, g + s) + b + s
#     step     = forward + backward + root + rest + optimizer / shards
#
# The root (embedding and head) is gathered before the first block and reduced after the last: nothing hides it. `rest`
# is the head's computation, which no mode speeds up. Copies in and out of the buffers of FSDP2 count as computation,
# and NCCL's use of multiprocessors is left out.
#
# Where not the link is slow but each collective alone, as with few channels of NCCL, a gather and a reduction run side
# by side: max(g, s) takes the place of g + s.
#
# A collective of B bytes over n GPUs takes B (n - 1) / (n rate) + latency seconds, as NCCL's ring does. The latencies
# of a hop are those of NCCL's own model (src/graph/tuning.cc, ring, simple protocol). In a hierarchy (HSDP) n GPUs
# share the weights. Their gradients are also summed over all groups of n: an all-reduce of B / n bytes by trees, in
# which each GPU uses its own network card.


NODE = 8  # GPUs of a node
HOP, NETWORK_HOP = 3.4e-6, 14e-6  # seconds, in a node and between nodes


@dataclass(frozen=True)
class Links:
    """Bytes a second that a ring brings each GPU: inside a node, and where it crosses nodes. `shared`: whether a gather
    and a reduction that run at the same time divide the rate. Otherwise each has all of it."""

    node: float
    network: float = math.inf
    shared: bool = True

    def gather(self, size: float, world: int) -> float:
        """Seconds of an all-gather to `size` bytes, or of a reduce-scatter from them."""
        nodes = -(-world // NODE)
        rate = self.node if nodes == 1 else min(self.node, self.network)
        latency = (nodes - 1) * NETWORK_HOP + (world - nodes) * HOP
        return size * (world - 1) / world / rate + latency

    def reduce(self, size: float, groups: int) -> float:
        """Seconds of an all-reduce of `size` bytes a GPU over so many groups, each GPU on its own network card."""
        rate = self.network / NODE
        return 2 * size * (groups - 1) / groups / rate + 2 * math.ceil(math.log2(groups)) * NETWORK_HOP


@dataclass(frozen=True)
class Training:
    """One mode's step on one GPU: seconds of a block (both passes), of the rest (head and loss), and of the
    optimizer for all parameters. Then the bytes of the collectives of a block and of the root, and the bytes of one
    gradient among these, which groups of GPUs sum in FP32."""

    layers: int
    block: float
    rest: float
    optimizer: float
    gathered: float
    reduced: float
    root_gathered: float
    root_reduced: float
    gradient: float = 4.0

    def step(self, links: Links, world: int, shards: int | None = None) -> float:
        """Seconds of a step on `world` GPUs, of which each `shards` (all, if None) share the weights."""
        shards = shards or world
        groups = world // shards

        def reduction(size: float) -> float:
            return links.gather(size, shards) + links.reduce(size * 4 / self.gradient / shards, groups)

        g, s = links.gather(self.gathered, shards), reduction(self.reduced)
        f, b = self.block / 3, self.block * 2 / 3
        forward = g + (self.layers - 1) * max(f, g) + f
        both = g + s if links.shared else max(g, s)
        backward = g + (self.layers - 1) * max(b, both) + b + s
        root = links.gather(self.root_gathered, shards) + reduction(self.root_reduced)
        return forward + backward + root + self.rest + self.optimizer / shards

    def hidden(self, links: Links, shards: int) -> float:
        """Seconds of the collectives that can run beside the computation: those of all blocks but one."""
        return (self.layers - 1) * (2 * links.gather(self.gathered, shards) + links.gather(self.reduced, shards))
