"""The time of the host in a training step: what a processor core takes to launch the work of its GPU.

    micro-batch   blocks * (both passes + recomputation + FSDP2's hooks + the gather in eight bits)
    step          accumulate * micro-batch + blocks * (clipping, AdamW and the casts of the weights)

The host runs ahead of a GPU whose work takes longer. Otherwise the GPU waits, and the step takes as long as the host.
This time depends on no size: a block of few tokens, or a narrow one, has it too. What is outside of the blocks takes
less than half of a block.

The constants are seconds of a block of a Llama with seven linear layers, by torch 2.11, on hosts of H200s. Of two
whole steps of 16 blocks on two GPUs the host took 104 ms (BF16) and 153 ms (`rowwise`, full activation checkpointing,
the gather in eight bits) at 73f4b6cd. All else is in proportion to steps of 8 and 16 blocks without a GPU: the parts of
these two steps, those on one GPU, and what the code takes less since (docs/log.md). Three machines of this kind took
123 to 165 ms for the second step. Nothing was measured for experts and for tensor parallelism, which launch more:
there the host takes longer than planned.
"""

from octavo.numerics.granularity import ROW, TENSOR
from octavo.plan.activations import is_fused
from octavo.plan.setup import Setup

# Forward and backward pass of a compiled block: in BF16; where norms and activations quantize; and for other recipes
# by their scales.
BF16, FUSED, ROWS, HISTORIES, BLOCKS = 1.6e-3, 1.9e-3, 2.4e-3, 4.0e-3, 6.0e-3
EAGER, EAGER_FP8 = 2.9e-3, 5.2e-3
# Recomputation, by the mode of activation checkpointing. In eager mode PyTorch decides operation by operation.
AGAIN = {"none": 0.0, "selective": 0.15e-3, "full": 0.3e-3}
EAGER_AGAIN = {"none": 0.0, "selective": 11e-3, "full": 4.7e-3}
SHARDED, SHARDED_FP8 = 4.1e-3, 4.5e-3  # FSDP2's hooks in both passes: two gathers, a reduction, and their copies
NARROW_GATHER = 1.5e-3  # gathers in eight bits have more tensors
UPDATE, UPDATE_FP8, UPDATE_SHARDED = 0.3e-3, 0.8e-3, 0.35e-3


def host_seconds(setup: Setup) -> float:
    """Seconds that the host takes for a step with all its micro-batches."""
    return setup.model.depth * (setup.config.accumulate * _micro_batch(setup) + _update(setup))


def _micro_batch(setup: Setup) -> float:
    """Seconds of a block in a micro-batch."""
    quantized, mode = setup.recipe.quantized, setup.config.activation_checkpointing.mode
    if setup.config.compile.blocks:
        seconds = _compiled(setup) + AGAIN[mode]
    else:
        seconds = (EAGER_FP8 if quantized else EAGER) + EAGER_AGAIN[mode]
    if setup.sharded:
        seconds += SHARDED_FP8 if quantized else SHARDED
        seconds += NARROW_GATHER if quantized and setup.config.parallel.fp8_all_gather else 0.0
    return seconds


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
