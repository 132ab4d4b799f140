"""Bytes that the forward pass of a training step saves for the backward pass.

For each token of a block of width K, with r bytes an element of the residual stream (4 under autocast):

    inputs of the two norms     2 r K
    attention                   2 bytes an element of q, k, v and its output; 4 a head (logarithms of sums)
    u, the MLP's hidden inputs  2 bytes an element (of gate and up both)
    inputs of GEMMs             what dw reads: a byte an element and its scales, or 2 bytes in BF16

Octavo's fused modules (`octavo.nn.fused`) compute the outputs of norms and activations again, and save none of the
GEMMs' inputs. The input of the attention's output projection is the output of the attention, saved once, unless a
recipe casts it for dw alone.
Experts in FP8 save u, their outputs in BF16 and the bytes of their inputs, for each expert of a token, and compute h
again. In BF16 eager mode saves the outputs in FP32, which are multiplied by the weights of the routing.
Compiled code saves the input of several layers once, but not where each of them casts it by a history of its own.
Attention in FP8 saves q, k, v and its output with one byte an element, beside the input of the output projection.
"""

from octavo.numerics.granularity import ROW, TENSOR, Granularity
from octavo.plan.architecture import Architecture, Block, Layer
from octavo.recipe import Recipe


def block_bytes(
    block: Block,
    model: Architecture,
    recipe: Recipe,
    *,
    residual: int,
    compiled: bool,
    fp8_attention: bool,
    fp8_experts: bool,
) -> float:
    """Bytes a token that one block saves without activation checkpointing.

    Args:
        residual: bytes an element of the residual stream.
        compiled: whether `torch.compile` compiles the block.
        fp8_attention, fp8_experts: whether attention, and experts, run in FP8.
    """
    experts = {"compiled": compiled, "fp8_experts": fp8_experts}
    return (
        2 * residual * model.width
        + 2 * 4 * (2 if model.layer_norm else 1)
        + _attention_bytes(block, fp8=fp8_attention)
        + _hidden_bytes(block, model, recipe, **experts)
        + _expert_output_bytes(block, model, **experts)
        + sum(_input_bytes(group, model, recipe, fp8_attention=fp8_attention, **experts) for group in block.groups)
    )


def _attention_bytes(block: Block, *, fp8: bool) -> float:
    a = block.attention
    return (1 if fp8 else 2) * (a.queries + a.keys + a.values + a.output) + 4 * a.heads


def is_fused(model: Architecture, recipe: Recipe) -> bool:
    """Whether the model's norms and activations quantize in the pass that computes them."""
    return model.fused and recipe.fusable is not None


def _hidden_bytes(block: Block, model: Architecture, recipe: Recipe, *, compiled: bool, fp8_experts: bool) -> float:
    u = block.activated
    fused = fp8_experts if _routed(block) else is_fused(model, recipe)
    activated = block.hidden if block.gated and not compiled and not fused else 0  # silu(gate)
    return 2.0 * (u + activated)


def _expert_output_bytes(block: Block, model: Architecture, *, compiled: bool, fp8_experts: bool) -> float:
    each = 2.0 if fp8_experts else 0.0 if compiled else 4.0
    return each * _routed(block) * model.width


def _routed(block: Block) -> int:
    """Experts of a token."""
    return max((layer.active for layer in block.layers if layer.copies > 1), default=0)


def _input_bytes(
    group: tuple[Layer, ...],
    model: Architecture,
    recipe: Recipe,
    *,
    compiled: bool,
    fp8_attention: bool,
    fp8_experts: bool,
) -> float:
    """Bytes a token of the input of layers that read the same one."""
    name, elements, experts = group[0].group, group[0].inputs * group[0].active, group[0].copies > 1
    if experts and fp8_experts:
        return element_bytes(elements, recipe) if name == "up" else 0.0
    if experts:
        return 2.0 * elements
    converted = recipe.quantized and name != "router"
    if is_fused(model, recipe):  # norm outputs and h: only their scales
        return element_bytes(elements, recipe) if name == "o" and fp8_attention else 4.0
    if name == "o" and (not converted or recipe.dw is None):
        return 2.0 * elements if fp8_attention else 0.0
    if name == "o" and not fp8_attention and _casts_again(recipe):
        return element_bytes(elements, recipe) - elements  # only the scales
    times = 1 if compiled and not _has_history(recipe) else len(group)
    return times * (element_bytes(elements, recipe) if converted else 2.0 * elements)


def _casts_again(recipe: Recipe) -> bool:
    """Whether dw can read bytes that are made of a saved input again."""
    return recipe.quantizes_x_once and recipe.dw is not None and recipe.dw.b.rounding == "nearest"


def _has_history(recipe: Recipe) -> bool:
    """Whether each layer casts its input by a scale of its own, so that layers with the same input save other bytes."""
    return recipe.dw is not None and recipe.dw.b.history is not None


def element_bytes(elements: int, recipe: Recipe) -> float:
    """Bytes of the input x [elements] of a token, as dw reads it."""
    if recipe.dw is None:
        return 2.0 * elements
    return elements + scale_bytes(recipe.dw.b.granularity, elements)


def scale_bytes(granularity: Granularity, elements: int) -> float:
    """Bytes of the scales of a row of so many elements."""
    if granularity == TENSOR:
        return 0.0
    if granularity == ROW:
        return 4.0
    return 4.0 * elements / (granularity.cols or elements)


def checkpointed_bytes(
    block: Block, model: Architecture, recipe: Recipe, mode: str, residual: int, *, fp8_attention: bool
) -> float:
    """Bytes a token that a block saves with activation checkpointing: `mode` is full or selective.

    A block of Octavo's models has two inputs: the residual stream, and the output of the last MLP, which is not added
    yet.
    """
    inputs = (residual + 2.0) * model.width
    if mode == "full":
        return inputs
    gemms = block.groups if is_fused(model, recipe) else [(layer,) for layer in block.layers]
    if len(gemms) % 2:  # the last output is an input of the next block, which is counted
        gemms = gemms[:-1]
    outputs = sum(layer.outputs * layer.active for group in gemms[::2] for layer in group)
    attended = (3.0 if fp8_attention else 2.0) * block.attention.output  # in FP8 both for the layer and the gradient
    return inputs + attended + 4.0 * block.attention.heads + 2.0 * outputs
