"""The memory of one GPU in a training step, by part.

Two moments can be the peak. At the start of the backward pass all activations are there; at its end, all gradients are.
(With an accumulation the gradients of earlier micro-batches are there throughout.) Each is the sum of

    states        weights, FP8 copies, gradients, moments (`octavo.plan.setup`)
    activations   what all blocks save
    block         the temporary tensors of one block's backward pass, and what it computes again; or, when these are
                  gone, its gradients before FSDP2 reduces them
    head          the logits, or those of a chunk
    buffers       the weights that FSDP2 has gathered, and the gradients that it reduces

The context of CUDA is not counted. It takes about as much as a GPU has beyond the memory of its data sheet.
"""

from dataclasses import dataclass

from octavo.numerics.qtensor import ROW, TENSOR
from octavo.ops.dispatch import COLUMNS
from octavo.plan.model_shape import Block, Layer
from octavo.plan.setup import BF16, FP8, Setup
from octavo.recipe import Recipe
from octavo.train.processes import unit_size


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU by part, at the moment of the peak, "start of backward" or "end of backward". The CPU's memory
    has the bytes `offloaded`."""

    parts: dict[str, float]
    offloaded: float
    moment: str

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


def plan_memory(setup: Setup) -> Memory:
    """The memory of a training step."""
    return max((_moment(setup, start=start) for start in (True, False)), key=lambda memory: memory.peak)


def _moment(setup: Setup, *, start: bool) -> Memory:
    model, states = setup.model, setup.states
    ways = setup.degrees.dp_shard * setup.degrees.tp
    own = model.parameters / ways
    on_gpu = 0.0 if states.offloaded else own
    saved = sum(block.count * saved_bytes(setup, block) for block in model.blocks)
    largest = max(model.blocks, key=lambda block: saved_bytes(setup, block, mode="none"))
    first = max(saved_bytes(setup, block) for block in model.blocks)
    loss, passing = head_bytes(setup), _again_bytes(setup, largest) + passing_bytes(setup, largest)
    in_head = start and loss > passing
    # The gradients of a unit of FSDP2, before they are copied into the buffer of the reduction.
    unreduced = setup.gathered_bytes[1] * largest.parameters * unit_size(largest.parameters) / setup.degrees.tp
    unreduced = unreduced if setup.sharded else 0.0
    w = setup.recipe.w  # FSDP2 gathers the bytes of weights by row or tensor anew for the backward pass
    gathered = setup.degrees.dp_shard > 1 and w is not None and w.granularity in (ROW, TENSOR)
    held = states.resident or not (states.offloaded or gathered)
    parts = {
        "weights": (own - model.block_weights / ways if states.resident else on_gpu) * states.weight,
        "fp8_copies": states.copies * model.block_weights / ways if held else 0.0,
        "gradients": on_gpu / model.parameters * states.gradient * _with_gradients(setup, largest, start=start),
        "optimizer": on_gpu * states.moments,
        "activations": saved if start else first,
        "block": 0.0 if in_head else passing if start else max(passing, unreduced),
        "head": loss if in_head else 0.0,
        "buffers": buffer_bytes(setup, largest, start=start),
    }
    offloaded = own * (states.total - states.copies) if states.offloaded else 0.0
    return Memory(parts, offloaded, f"{'start' if start else 'end'} of backward")


def _with_gradients(setup: Setup, block: Block, *, start: bool) -> int:
    """Parameters that have a gradient. At the end the first block and the embedding have none yet."""
    model = setup.model
    if setup.config.accumulate > 1:
        return model.parameters
    head = (model.embeddings if model.tied else model.head) if setup.chunked or not start else 0
    return head if start else model.block_parameters - block.parameters + head


def saved_bytes(setup: Setup, block: Block, mode: str | None = None) -> float:
    """Bytes that one block saves on one GPU; `mode` of activation checkpointing is by default that of the settings."""
    mode, again = mode or setup.config.activation_checkpointing.mode, 0.0
    if mode == "selective" and setup.recomputes_hidden(block):
        again = 2.0 * block.activated - (0 if block.has_experts else setup.model.width)  # the bytes of n are saved
    elif mode != "none":
        return checkpointed_bytes(setup, block, mode) * setup.tokens / setup.degrees.tp
    # Weights whose BF16 copies are saved: of experts in BF16, and in compiled code of all layers in BF16.
    copied = 0 if setup.fp8_experts else sum(e.weights for e in block.layers if e.copies > 1)
    copied = block.weights if setup.config.compile.blocks and not setup.recipe.quantized else copied
    casts = BF16 * copied if setup.residual == 4 and not setup.states.resident else 0.0
    return ((block_bytes(setup, block) - again) * setup.tokens + casts + _filled_bytes(setup, block)) / setup.degrees.tp


def _filled_bytes(setup: Setup, block: Block) -> float:
    """The columns of zeros that fill up the saved inputs of each expert, where dw quantizes them along the tokens."""
    if setup.fused_experts or not setup.fp8_experts or setup.recipe.dw is None:
        return 0.0
    inputs = [layer.inputs * layer.copies for name in ("up", "down") for layer in block.group(name)[:1]]
    return sum(COLUMNS * element_bytes(each, setup.recipe) for each in inputs if block.has_experts)


def _again_bytes(setup: Setup, block: Block) -> float:
    """The tensors of one block that activation checkpointing computes again, beside those that the block has saved."""
    if setup.config.activation_checkpointing.mode == "none":
        return 0.0
    again = saved_bytes(setup, block, "none") - saved_bytes(setup, block)
    return again if setup.recomputes_hidden(block) else again + saved_bytes(setup, block, "full")


def passing_bytes(setup: Setup, block: Block) -> float:
    """Temporary tensors of a block's backward pass, in the MLP. A fused MLP is one function, which in eager mode frees
    its dh, du, h and transposed copies as it returns. Elsewhere du takes the place of saved tensors that are freed."""
    hidden, width, fused = block.hidden, setup.model.width, setup.fused
    u = block.activated
    if fused and setup.config.compile.blocks:
        features = 3 * hidden + u + 2 * width
    elif fused:
        features = 3 * hidden + 2 * u + 4 * width
    else:
        features = 2 * u + (hidden if setup.recipe.quantized else 0)
    stream = (setup.residual + 2) * width
    matrices = [layer.inputs * layer.outputs for name in ("up", "down") for layer in block.group(name)]
    weights = FP8 * sum(matrices) if fused else BF16 * max(matrices)
    if not (fused and setup.config.compile.blocks):
        weights += setup.states.gradient * max(matrices)
    return ((features + stream) * setup.tokens + weights) / setup.degrees.tp


def head_bytes(setup: Setup) -> float:
    """The largest sum of tensors in the head and the loss: inputs, logits, softmax and their gradients."""
    model, tokens = setup.model, setup.tokens
    vocabulary = model.vocabulary / setup.degrees.tp
    if not setup.chunked:  # log-probabilities and two gradients, FP32
        return (setup.residual + 2) * model.width * tokens / setup.degrees.tp + 12 * vocabulary * tokens
    chunk = min(setup.config.loss.chunk, tokens)
    stream = (2 * setup.residual + 4) * model.width * tokens / setup.degrees.tp
    return stream + BF16 * vocabulary * (chunk + model.width)  # the gradient takes the place of the logits


def buffer_bytes(setup: Setup, block: Block, *, start: bool) -> float:
    """The buffers of FSDP2: two gathered units, the gathered root, and the FP32 gradients that are being reduced."""
    if not setup.sharded:
        return 0.0
    narrow, wide = setup.gathered_bytes
    gathered = narrow * block.weights + wide * (block.parameters - block.weights)
    root = wide * setup.model.outside
    reduced = 0.0 if start else 4.0 * block.parameters  # of the unit before, until this unit's are reduced
    return (unit_size(block.parameters) * (2 * gathered + reduced) + root) / setup.degrees.tp


# ---- Bytes that the forward pass of a training step saves for the backward pass.
#
# For each token of a block of width K, with r bytes an element of the residual stream (4 under autocast):
#
#     inputs of the two norms     2 r K
#     attention                   2 bytes an element of q, k, v and its output; 4 a head (logarithms of sums)
#     norms of queries and keys   2 bytes an element that they read; 4 a head (Qwen3)
#     u, the MLP's hidden inputs  2 bytes an element (of gate and up both)
#     inputs of GEMMs             what dw reads: a byte an element and its scales, or 2 bytes in BF16
#
# Octavo's fused modules (`octavo.nn.fused`) compute the outputs of norms and activations again, and save none of the
# GEMMs' inputs. The input of the attention's output projection is the output of the attention, saved once, unless a
# recipe casts it for dw alone.
# Experts by row scales save u for each expert of a token, and the bytes of the token once, and compute h again. In BF16
# and with scales along the reduction eager mode saves silu(gate), and the outputs in FP32, which are multiplied by the
# weights of the routing; and dw reads the inputs of both GEMMs.
# Compiled code saves the input of several layers once, but not where each of them casts it by a history of its own.
# Attention in FP8 saves q, k, v and its output with one byte an element, beside the input of the output projection.


def block_bytes(setup: Setup, block: Block) -> float:
    """Bytes a token that one block saves without activation checkpointing."""
    model, a = setup.model, block.attention
    return (
        2 * setup.residual * model.width
        + 2 * 4 * (2 if model.layer_norm else 1)
        + (1 if setup.fp8_attention else 2) * (a.queries + a.keys + a.values + a.output)
        + 4 * a.heads
        + (2 * a.normed + 4 * (a.heads + a.key_heads) if a.normed else 0)
        + _hidden_bytes(setup, block)
        + sum(_input_bytes(setup, group) for group in block.groups)
    )


def _hidden_bytes(setup: Setup, block: Block) -> float:
    """The bytes that the activation and, in a block of experts that are not fused, the last layer save."""
    u, compiled = block.activated, setup.config.compile.blocks
    routed = max((layer.active for layer in block.layers if layer.copies > 1), default=0)  # experts of a token
    fused = setup.fused_experts if routed else setup.fused
    activated = block.hidden if block.gated and not compiled and not fused else 0  # silu(gate)
    outputs = 0.0 if fused or compiled else 4.0  # bytes of each expert's
    return 2.0 * (u + activated) + outputs * routed * setup.model.width


def _input_bytes(setup: Setup, group: tuple[Layer, ...]) -> float:
    """Bytes a token of the input of layers that read the same one."""
    recipe, fp8_attention = setup.recipe, setup.fp8_attention
    name, elements, experts = group[0].group, group[0].inputs * group[0].active, group[0].copies > 1
    if experts and setup.fused_experts:
        return element_bytes(group[0].inputs, recipe) if name == "up" else 0.0
    if experts:
        return element_bytes(elements, recipe) if setup.fp8_experts else 2.0 * elements
    converted = recipe.quantized and name != "router"
    if setup.fused:  # norm outputs and h: only their scales
        return element_bytes(elements, recipe) if name == "o" and fp8_attention else 4.0
    if name == "o" and (not converted or (recipe.dw is None and not recipe.exact_backward)):
        return 2.0 * elements if fp8_attention else 0.0
    dw_x = recipe.dw.b if recipe.dw is not None else None
    if name == "o" and not fp8_attention and recipe.quantizes_x_once and dw_x and dw_x.rounding == "nearest":
        return element_bytes(elements, recipe) - elements  # dw casts the saved input again: only the scales
    has_history = dw_x is not None and dw_x.history is not None  # each layer casts its input by a scale of its own
    times = 1 if setup.config.compile.blocks and not has_history else len(group)
    return times * (element_bytes(elements, recipe) if converted else 2.0 * elements)


def element_bytes(elements: int, recipe: Recipe) -> float:
    """Bytes of the input x [elements] of a token, as dw reads it, and of its scales."""
    cast = recipe.x if recipe.exact_backward else None if recipe.dw is None else recipe.dw.b
    if cast is None:
        return 2.0 * elements
    by = cast.granularity
    scales = 0.0 if by == TENSOR else 1.0 if by.cols is None else elements / by.cols  # of a row
    return elements + 4.0 * scales


def checkpointed_bytes(setup: Setup, block: Block, mode: str) -> float:
    """Bytes a token that a block saves with full or selective checkpointing. A block of Octavo's models has two inputs:
    the residual stream, and the output of the last MLP, which is not added yet."""
    inputs = (setup.residual + 2.0) * setup.model.width
    if mode == "full":
        return inputs
    gemms = block.groups if setup.fused else [(layer,) for layer in block.layers]
    if len(gemms) % 2:  # the last output is an input of the next block, which is counted
        gemms = gemms[:-1]
    outputs = sum(layer.outputs * layer.active for group in gemms[::2] for layer in group)
    bytes_of_output = 3.0 if setup.fp8_attention else 2.0  # in FP8 both for the layer and the gradient
    return inputs + bytes_of_output * block.attention.output + 4.0 * block.attention.heads + 2.0 * outputs
