"""The memory of one GPU in a training step, by part.

Two moments can be the peak. At the start of the backward pass all activations are there; at its end, all gradients are.
(With an accumulation the gradients of earlier micro-batches are there throughout.) Each is the sum of

    states        weights, FP8 copies, gradients, moments (`octavo.plan.states`)
    activations   what all blocks save (`octavo.plan.activations`)
    block         the temporary tensors of one block's backward pass, and what it computes again; or, when these are
                  gone, its gradients before FSDP2 reduces them
    head          the logits, or those of a chunk
    buffers       the weights that FSDP2 has gathered, and the gradients that it reduces

The context of CUDA is not counted. It takes about as much as a GPU has beyond the memory of its data sheet.
"""

from dataclasses import dataclass, fields

from octavo.numerics.granularity import ROW, TENSOR
from octavo.plan.activations import block_bytes, checkpointed_bytes, is_fused
from octavo.plan.architecture import Block
from octavo.plan.attention import is_fp8
from octavo.plan.setup import Setup
from octavo.plan.states import BF16, FP8
from octavo.train.blocks import unit_size


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU by part, at the moment of the peak; `offloaded` is in the CPU's memory.

    `moment` names it: "start of backward" or "end of backward".
    """

    weights: float
    fp8_copies: float
    gradients: float
    optimizer: float
    activations: float
    block: float
    head: float
    buffers: float
    offloaded: float
    moment: str

    @property
    def parts(self) -> dict[str, float]:
        """The parts on the GPU."""
        others = ("offloaded", "moment")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in others}

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


def plan_memory(setup: Setup) -> Memory:
    """The memory of a training step."""
    at_start, at_end = _moment(setup, start=True), _moment(setup, start=False)
    return max(at_start, at_end, key=lambda memory: memory.peak)


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
    return Memory(
        weights=on_gpu * states.weight,
        fp8_copies=states.copies * model.block_weights / ways if _holds_copies(setup) else 0.0,
        gradients=on_gpu / model.parameters * states.gradient * _with_gradients(setup, largest, start=start),
        optimizer=on_gpu * states.moments,
        activations=saved if start else first,
        block=0.0 if in_head else passing if start else max(passing, _unreduced_bytes(setup, largest)),
        head=loss if in_head else 0.0,
        buffers=buffer_bytes(setup, largest, start=start),
        offloaded=own * (states.total - states.copies) if states.offloaded else 0.0,
        moment=f"{'start' if start else 'end'} of backward",
    )


def _holds_copies(setup: Setup) -> bool:
    """Whether the bytes of weights are held in the backward pass. FSDP2 gathers those by row or tensor anew."""
    w = setup.recipe.w
    gathered = setup.degrees.dp_shard > 1 and w is not None and w.granularity in (ROW, TENSOR)
    return not setup.states.offloaded and not gathered


def _with_gradients(setup: Setup, block: Block, *, start: bool) -> int:
    """Parameters that have a gradient. At the end the first block and the embedding have none yet."""
    model = setup.model
    if setup.config.accumulate > 1:
        return model.parameters
    head = (model.embeddings if model.tied else model.head) if setup.chunked or not start else 0
    return head if start else model.block_parameters - block.parameters + head


def saved_bytes(setup: Setup, block: Block, mode: str | None = None) -> float:
    """Bytes that one block saves on one GPU; `mode` of activation checkpointing is by default that of the settings."""
    mode = mode or setup.config.activation_checkpointing.mode
    compiled, fp8 = setup.config.compile.blocks, is_fp8(setup)
    if mode != "none":
        each = checkpointed_bytes(block, setup.model, setup.recipe, mode, setup.residual, fp8_attention=fp8)
        return each * setup.tokens / setup.degrees.tp
    each = block_bytes(
        block, setup.model, setup.recipe,
        residual=setup.residual, compiled=compiled, fp8_attention=fp8, fp8_experts=setup.fp8_experts,
    )  # fmt: skip
    casts = BF16 * _cast_weights(setup, block) if setup.residual == 4 else 0.0
    return (each * setup.tokens + casts) / setup.degrees.tp


def _cast_weights(setup: Setup, block: Block) -> int:
    """Weights whose BF16 copies are saved: of experts in BF16, and in compiled code of all layers in BF16."""
    experts = 0 if setup.fp8_experts else sum(e.weights for e in block.layers if e.copies > 1)
    return block.weights if setup.config.compile.blocks and not setup.recipe.quantized else experts


def _again_bytes(setup: Setup, block: Block) -> float:
    """The tensors of one block that activation checkpointing computes again, beside those that the block has saved."""
    mode = setup.config.activation_checkpointing.mode
    if mode == "none":
        return 0.0
    return saved_bytes(setup, block, "none") - saved_bytes(setup, block) + saved_bytes(setup, block, "full")


def passing_bytes(setup: Setup, block: Block) -> float:
    """Temporary tensors of a block's backward pass: in the MLP, where they are largest.

    A fused MLP is one function. In eager mode its tensors are freed when it returns: dh, du and h, transposed copies.
    Elsewhere du takes the place of saved tensors that are freed.
    """
    hidden, width, fused = block.hidden, setup.model.width, is_fused(setup.model, setup.recipe)
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
    return stream + 10 * vocabulary * chunk + BF16 * vocabulary * model.width


def _unreduced_bytes(setup: Setup, block: Block) -> float:
    """The gradients of a unit of FSDP2, before they are copied into the buffer of the reduction."""
    parameters = block.parameters * unit_size(block.parameters)
    return setup.gathered_bytes[1] * parameters / setup.degrees.tp if setup.sharded else 0.0


def buffer_bytes(setup: Setup, block: Block, *, start: bool) -> float:
    """The buffers of FSDP2: two gathered units, the gathered root, and the FP32 gradients that are being reduced."""
    if not setup.sharded:
        return 0.0
    narrow, wide = setup.gathered_bytes
    gathered = narrow * block.weights + wide * (block.parameters - block.weights)
    root = wide * setup.model.outside
    reduced = 0.0 if start else 4.0 * block.parameters  # of the unit before, until this unit's are reduced
    return (unit_size(block.parameters) * (2 * gathered + reduced) + root) / setup.degrees.tp
