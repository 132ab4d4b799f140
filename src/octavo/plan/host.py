"""The time of the host in a training step: what a processor core takes to launch the work of its GPU.

    micro-batch   blocks * (both passes + recomputation + FSDP2's hooks + the gather in eight bits)
    step          accumulate * micro-batch + blocks * (clipping, AdamW and the casts of the weights)

The host runs ahead of a GPU whose work takes longer. Otherwise the GPU waits, and the step takes as long as the host.
This time depends on no size: a block of few tokens, or a narrow one, has it too. What is outside of the blocks takes
less than half of a block.

The constants are seconds of a block of a Llama with seven linear layers, by torch 2.11, on hosts of H200s. Steps
without a GPU tell how the parts of a step compare (docs/log.md). Their scale is that of three whole steps of sharded
blocks: 59 ms (BF16) and 106 ms (`rowwise`, full activation checkpointing, the gather in eight bits) of 16 blocks that
are gathered in pairs, and 216 ms of 28 that are gathered one by one; and of the layer stack on one GPU (1.0 ms a block
in BF16, 2.35 by `rowwise`). Machines of this kind differ by 15 %. Nothing was measured for experts and for tensor
parallelism, which launch more: there the host takes longer than planned.
"""

from octavo.numerics.granularity import ROW, TENSOR
from octavo.plan.activations import is_fused
from octavo.plan.architecture import Block
from octavo.plan.setup import Setup
from octavo.train.blocks import unit_size

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
    return setup.config.accumulate * passes + setup.model.depth * _update(setup)


def _micro_batch(setup: Setup, block: Block) -> float:
    """Seconds of a block in a micro-batch."""
    quantized, mode = setup.recipe.quantized, setup.config.activation_checkpointing.mode
    if setup.config.compile.blocks:
        seconds = _compiled(setup) + AGAIN[mode]
    else:
        seconds = (EAGER_FP8 if quantized else EAGER) + EAGER_AGAIN[mode]
    return seconds + _hooks(setup, block)


def _hooks(setup: Setup, block: Block) -> float:
    """Seconds of FSDP2's hooks for a block."""
    if not setup.sharded:
        return 0.0
    quantized = setup.recipe.quantized
    seconds = SHARDED_FP8 if quantized else SHARDED
    if quantized and setup.config.parallel.fp8_all_gather:
        seconds += NARROW_GATHER
    return seconds if unit_size(block.parameters) == 1 else IN_PAIRS * seconds


def _compiled(setup: Setup) -> float:
    recipe = setup.recipe
    if not recipe.quantized:
        return BF16
    if is_fused(setup.model, recipe):
        return FUSED
    if recipe.scales_by_history:
        return HISTORIES
    granularities = {cast.granularity for cast in (recipe.x, recipe.w, recipe.dy) if cast is not None}
    return ROWS if granularities <= {ROW, TENSOR} else BLOCKS


def _update(setup: Setup) -> float:
    """Seconds of a block's weights after the last micro-batch."""
    if setup.sharded:  # a rank casts its parts of all weights in a few launches
        return UPDATE_SHARDED
    return UPDATE_FP8 if setup.recipe.quantized else UPDATE
