"""The passes over the tokens between the GEMMs of a block: norms, the activation, and what moves bytes.

A pass takes as long as its bytes at the rate of a copy, or as its instructions at the rate of the multiprocessors,
whichever is longer. SwiGLU of layers that are apart and RMS norm are bound by their bytes. GELU has an error function.
LayerNorm has two sums over a row, and Triton's blocks a power of two of columns: 2,048 for 1,280. Gate and up of
experts in BF16 are one tensor, and torch.compile computes both gradients for each of its columns.

The instructions were counted by time: what an H200 took for such a pass alone, as compiled in BF16 by torch 2.11
(docs/log.md). LayerNorm was measured at a width of 1,280 alone. Octavo's fused modules have kernels of their own, whose
instructions hide behind the bytes of their casts, and these are in the measured time of the layers.
"""

from dataclasses import dataclass

from octavo.plan.activations import is_fused
from octavo.plan.architecture import Block
from octavo.plan.hardware import Gpu
from octavo.plan.setup import Setup

# Instructions an element, forward and backward: of GELU, and of LayerNorm with its padding.
GELU, LAYER_NORM = (48.0, 66.0), (73.0, 52.0)
STACKED_GATE = 134.0  # of SwiGLU's gradient, an element of h, where gate and up are one tensor


@dataclass(frozen=True)
class Pass:
    """Bytes and instructions for each token."""

    moved: float
    instructions: float = 0.0

    def seconds(self, gpu: Gpu) -> float:
        return max(self.moved / gpu.copy_rate, self.instructions / gpu.instruction_rate)


def passes_seconds(setup: Setup, block: Block) -> tuple[float, float]:
    """Seconds a token of both passes of a block, and of the forward pass."""
    forward, backward = (sum(each.seconds(setup.gpu) for each in found) for found in block_passes(setup, block))
    return forward + backward, forward


def block_passes(setup: Setup, block: Block) -> tuple[list[Pass], list[Pass]]:
    """The passes of a block, forward and backward.

    The casts of a converted layer are in its measured time, although a fused module makes them in these passes.
    """
    r, width = setup.residual, setup.model.width
    norm, activation, (forward, backward) = _norm(setup), _activation(setup, block), _moved(setup, block)
    return (
        [Pass((2 * r + 4) * width, norm[0])] * 2 + [activation[0], Pass(forward)],
        [Pass((3 * r + 4) * width, norm[1])] * 2 + [activation[1], Pass(backward + bias_bytes(setup, block))],
    )


def _norm(setup: Setup) -> tuple[float, float]:
    """Instructions a token of a norm, forward and backward."""
    if not setup.model.layer_norm or is_fused(setup.model, setup.recipe):
        return 0.0, 0.0
    columns = 1 << (setup.model.width - 1).bit_length()
    return LAYER_NORM[0] * columns, LAYER_NORM[1] * columns


def _activation(setup: Setup, block: Block) -> tuple[Pass, Pass]:
    u, hidden = block.activated, block.hidden
    instructions = (0.0, 0.0)
    if not block.gated and not is_fused(setup.model, setup.recipe):
        instructions = GELU[0] * hidden, GELU[1] * hidden
    elif block.has_experts and not setup.fp8_experts:
        instructions = 0.0, STACKED_GATE * hidden
    return Pass(2 * (u + hidden), instructions[0]), Pass(4 * (u + hidden), instructions[1])


def _moved(setup: Setup, block: Block) -> tuple[float, float]:
    """Bytes a token of rotary positions, of the parts of a projection to q, k and v, and of the order of the rows of
    experts. Positions turn q and k as they part. Without them the parts are views, and their gradients are copied side
    by side."""
    a, experts = block.attention, max(layer.active for layer in block.group("down"))
    features = a.queries + a.keys + a.values
    sorting = 8 * experts * setup.model.width if experts > 1 else 0  # rows to their experts and back
    if not setup.model.rotary:
        return sorting, 4 * features + sorting
    both = 4 * (a.queries + a.keys) + features + sorting
    return both, both


def bias_bytes(setup: Setup, block: Block) -> float:
    """Bytes a token of the gradients of biases, which the measured layers do not have: sums that read dy.

    In a fused MLP the dy of the layers before the activation is in eight bits: the sum reads dh and u, and computes dy
    from them again.
    """
    biased = [layer for layer in block.layers if layer.bias]
    moved = 0
    if is_fused(setup.model, setup.recipe) and any(layer.group == "up" for layer in biased):
        moved = 2 * (block.activated + block.hidden)
        biased = [layer for layer in biased if layer.group != "up"]
    return moved + 2 * sum(layer.outputs * layer.active for layer in biased)
