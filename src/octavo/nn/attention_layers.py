"""Attention by a recipe: the projections, q k^T and p v in FP8, and the tensors saved for backward."""

import math
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.fused_modules import mark_saved_inputs
from octavo.nn.linear import RecipeLayer
from octavo.nn.module_tools import ScaleBuffers, differentiable_once, parts_of
from octavo.numerics import TENSOR, Cast
from octavo.numerics.formats import E4M3
from octavo.ops import fp8_attention, fp8_attention_backward, fp8_attention_limit, quantize
from octavo.ops.dispatch import GRADIENT_TILE
from octavo.util import choose_device

# ---- `nn.MultiheadAttention` that computes its projections by a recipe.
#
# PyTorch's module keeps the projections of query, key and value in one parameter, and reads the weight of its output
# layer without calling it. Converted, it is the same function of the same parameters, in training and in evaluation:
#
#     q, k, v = split(x @ in_proj_weight[3E,E]^T + in_proj_bias)      one product if query, key and value are one tensor
#     y = out_proj(attention(q, k, v))                                a converted linear layer, which is called
#
# The attention itself is PyTorch's `scaled_dot_product_attention`, or a softmax where the weights are asked for.


def is_convertible(module: nn.MultiheadAttention) -> bool:
    """True if `module`, converted or not, can be converted: no subclass, and no keys of its own."""
    own_keys = module.bias_k is not None or module.add_zero_attn
    return parts_of(type(module))[-1] is nn.MultiheadAttention and not own_keys


def input_weights(module: Any) -> dict[str, nn.Parameter]:
    """The weights of the projections of query, key and value by name: one parameter [3E, E], or three."""
    separate = "q_proj_weight", "k_proj_weight", "v_proj_weight"
    names = ("in_proj_weight",) if module.in_proj_weight is not None else separate
    return {name: getattr(module, name) for name in names}


class MultiheadAttention(RecipeLayer):
    """A converted `nn.MultiheadAttention`. `cast_once` does not cache the weights of its input projections."""

    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool
    out_proj: nn.Module
    in_proj_bias: Tensor | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`; nested tensors are not taken."""
        check: Any = vars(F)["_mha_shape_check"]  # of ranks, with the messages of PyTorch
        batched = bool(check(query, key, value, key_padding_mask, attn_mask, self.num_heads))
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask: pass the causal mask as attn_mask too")
        q, k, v = (self._heads(t, batched=batched) for t in self._project(query, key, value))  # [B, H, T, E/H]
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, k)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), p)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # [B, T, E]
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def weights_to_cast(self) -> list[Tensor]:
        return list(input_weights(self).values())

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v [..., E]; those of one and the same tensor in one product."""
        e, weights, inputs = self.embed_dim, self.weights_to_cast(), (query, key, value)
        if len(weights) == 3:
            biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            return [self.compute(x, w, b, None) for x, w, b in zip(inputs, weights, biases, strict=True)]
        outputs: list[Tensor] = []
        for x, rows in _runs(query, key, value, e):
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            outputs += torch.split(self.compute(x, weights[0][rows], bias, None), e, dim=-1)
        return outputs

    def _heads(self, t: Tensor, *, batched: bool) -> Tensor:
        """[B, H, T, E/H] of [B, T, E], [T, B, E] or [T, E]."""
        t = t.unsqueeze(0) if not batched else t if self.batch_first else t.transpose(0, 1)
        return t.reshape(*t.shape[:-1], self.num_heads, t.shape[-1] // self.num_heads).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """The sum of both masks as a tensor to add to the scores [B, H, T, S], with -inf where a mask is True."""
        (b, h, t, _), s = q.shape, k.shape[2]
        mask = None
        if attn_mask is not None:
            expected = (t, s) if attn_mask.ndim == 2 else (b * h, t, s)
            if attn_mask.shape != expected:
                raise ValueError(f"attn_mask must be {list(expected)}, got {list(attn_mask.shape)}")
            mask = _added(attn_mask, q.dtype).view(-1, 1 if attn_mask.ndim == 2 else h, t, s)
        if padding is not None:
            padding = padding if padding.ndim == 2 else padding.unsqueeze(0)
            if padding.shape != (b, s):
                raise ValueError(f"key_padding_mask must be {[b, s]}, got {list(padding.shape)}")
            hidden = _added(padding, q.dtype).view(b, 1, 1, s)
            mask = hidden if mask is None else mask + hidden
        return mask


def _runs(query: Tensor, key: Tensor, value: Tensor, e: int) -> list[tuple[Tensor, slice]]:
    """The inputs, equal neighbours once, each with the rows of the weight [3E, E] that it is multiplied by."""
    if query is key and key is value:
        return [(query, slice(0, 3 * e))]
    if key is value:
        return [(query, slice(0, e)), (key, slice(e, 3 * e))]
    return [(query, slice(0, e)), (key, slice(e, 2 * e)), (value, slice(2 * e, 3 * e))]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


# ---- Causal attention in E4M3 with its gradient (`octavo.ops.fp8_attention`).
#
# q, k, v and dy are quantized with one scale each, which is computed from the tensor. The keys of a head are quantized
# without their mean over the tokens, which would take most of the range: it adds one number to all scores of a query,
# and the softmax does not change (SageAttention: Zhang et al., arXiv:2410.02367). Nor do the gradients: the rows of ds
# have the sum zero.
#
# cuDNN rounds dq, dk and dv to E4M3 as it writes them, so their scales must be known before. They come from the largest
# magnitudes of earlier backward passes, with room for `HEADROOM` times as much. For the first pass these magnitudes are
# estimated:
#
#     |dq| <= scale * amax(dy) * amax(v) * amax(k)        |dk| the same with amax(q)        |dv| <= 4 * amax(dy)


CAST = Cast(granularity=TENSOR)
SHORTEST = 8192  # tokens of a text: with fewer, both passes are faster in BF16, casts included
HEADROOM = 4.0  # E4M3 is as dense in each binade, so that room costs little
DECAY = 0.9  # of the largest magnitudes, in each backward pass


class GradientScales(ScaleBuffers):
    """The scales of the gradients of one attention; `shortest` is the number of tokens from which it runs in E4M3."""

    # float32 [3], the largest magnitudes of dq, dk and dv in earlier backward passes, decayed; zeros before the first.
    # It is not in the `state_dict`: a resumed run begins as the first pass does.
    amax: Tensor
    replaced: str  # what transformers called the attention that ran before

    def __init__(self, device: torch.device | str | None = None, shortest: int = SHORTEST) -> None:
        super().__init__()
        self.shortest = shortest
        self.register_buffer("amax", torch.zeros(3, device=device), persistent=False)

    def takes(self, q: Tensor, k: Tensor, dropout: float = 0.0) -> bool:
        """True if the attention of q [B, H, T, D] to k [B, G, S, D] runs in E4M3."""
        whole = q.device.type == "cpu" or q.shape[2] % GRADIENT_TILE == 0
        return not dropout and k.shape[2] == q.shape[2] >= self.shortest and whole

    def scales(self, expected: Tensor) -> Tensor:
        """float32 [3]; `expected` are the largest magnitudes to expect without earlier passes."""
        return torch.where(self.amax > 0, self.amax, expected) * (HEADROOM / E4M3.max)

    def observe(self, amax: Tensor) -> None:
        """Record the largest magnitudes of a backward pass. Those that are not finite are ignored."""
        with torch.no_grad():
            kept = self.amax * DECAY
            self.amax.copy_(torch.where(amax.isfinite(), torch.maximum(kept, amax), kept))


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, H, T, D] in E4M3, a view of contiguous [B, T, H, D], and its one scale, float32 [1, 1].

    Where x is such a view too, it is not copied.
    """
    by_token = x.transpose(1, 2)  # its shape is not read: torch 2.11 would not compile a size that became a constant
    found = quantize(by_token.flatten(2).flatten(0, 1), CAST)
    return found.data.view_as(by_token).transpose(1, 2), found.scale


def attend_fp8(q: Tensor, k: Tensor, v: Tensor, gradients: GradientScales, *, scale: float | None = None) -> Tensor:
    """softmax(scale * q k^T) v in E4M3, where token t sees the tokens 0..t. Differentiable.

    q is [B, H, T, D] of float32, bfloat16 or float16; k and v are [B, G, T, D] of its dtype, with H a multiple of G.
    The result is [B, H, T, D], a view of contiguous [B, T, H, D]. `scale` is 1 / sqrt(D) by default.
    """
    dim = index(q.shape[3])  # a constant: in the backward pass PyTorch takes a symbol of it for a stride of dy
    factor = dim**-0.5 if scale is None else scale
    return _Attention.apply(q, k, v, gradients, factor)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gradients: GradientScales, scale: float) -> Tensor:
        centered = (k - k.mean(2, keepdim=True, dtype=torch.float32)).to(k.dtype)
        (q_data, q_scale), (k_data, k_scale), (v_data, v_scale) = (quantize_heads(x) for x in (q, centered, v))
        scales = q_scale, k_scale, v_scale
        y, o, stats = fp8_attention(q_data, k_data, v_data, *scales, scale=scale, dtype=q.dtype)
        ctx.gradients, ctx.scale, ctx.dtype = gradients, scale, q.dtype
        ctx.save_for_backward(q_data, k_data, v_data, o, stats, *scales)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, o, stats, q_scale, k_scale, v_scale = ctx.saved_tensors
        gradients: GradientScales = ctx.gradients
        data, dy_scale = quantize_heads(dy)
        dy_amax = dy_scale.view(1) * E4M3.max
        factor = ctx.scale * E4M3.max**2 * v_scale.view(1)
        expected = torch.cat((factor * k_scale.view(1), factor * q_scale.view(1), torch.full_like(dy_amax, 4.0)))
        out_scales = gradients.scales(expected * dy_amax)
        operands = data.transpose(1, 2), q, k, v, o, stats, dy_scale, q_scale, k_scale, v_scale, out_scales
        dq, dk, dv, amax = fp8_attention_backward(*operands, scale=ctx.scale, dtype=ctx.dtype)
        gradients.observe(amax)
        return dq, dk, dv, None, None


# ---- The precision of the causal attention of a model in training.


NAME = "octavo_fp8"  # of the attention, in transformers


def use_fp8_attention(
    model: nn.Module, *, shortest: int = SHORTEST, device: torch.device | str | None = None
) -> list[str]:
    """Compute the causal attention of `model` in E4M3, forward and backward, in place.

    `octavo.convert(model, attention="fp8")` and `octavo train --attention.precision fp8` call this. It saves q, k, v
    and the result in a byte an element for the backward pass. Attention with dropout, with a mask (padding), over a
    cache, or on a GPU over a length that is not a multiple of 128 stays in BF16. The recipe of the linear layers does
    not matter, and neither does the order with `octavo.convert`. `octavo.restore` undoes it too.

    Args:
        model: a language model of `octavo.models` or of transformers.
        shortest: tokens of the shortest text whose attention runs in E4M3; shorter texts are faster in BF16.
        device: where the model will run; by default the device of its weights. A CPU computes the same in float32.

    Returns:
        The names of the attention modules.

    Raises:
        ValueError: the model has no causal attention that can be replaced, or the GPU, its libraries or the head size
            do not have FP8 attention.

    Example:
        >>> octavo.convert(model, "rowwise")
        >>> octavo.nn.use_fp8_attention(model)
    """
    found = find_attention(model, device)
    use_bf16_attention(model)
    for module in found.values():
        module.fp8_gradients = GradientScales(next(model.parameters()).device, shortest)
        module.fp8_gradients.replaced = getattr(getattr(module, "config", None), "_attn_implementation", None) or "sdpa"
    _choose_attention(model, NAME)
    mark_saved_inputs(model)
    return list(found)


def find_attention(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Any]:
    """The modules by name whose attention `use_fp8_attention` would change. It raises a ValueError as that does."""
    modules: dict[str, Any] = dict(model.named_modules())
    takes = getattr(model, "_supports_attention_backend", False) and hasattr(model, "set_attn_implementation")
    found = {name: m for name, m in modules.items() if hasattr(m, "fp8_gradients") or (takes and _is_causal(m))}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no causal attention that octavo can compute in FP8: it must be a language "
            "model of octavo.models, or one of transformers that takes an attention (set_attn_implementation)"
        )
    for name, module in modules.items():  # all layers change alike
        if getattr(module, "sinks", None) is not None or getattr(module, "attn_logit_softcapping", None):
            raise ValueError(f"{name} has sinks or a softcap, which FP8 attention does not compute. Leave it in BF16")
    place = next(model.parameters()).device if device is None else choose_device(device)
    for name, module in found.items():
        if place.type == "cuda" and (limit := fp8_attention_limit(place, module.head_dim, training=True)):
            raise ValueError(f"{name}: {limit}. Leave attention in BF16")
    return found


def use_bf16_attention(model: nn.Module) -> None:
    """Undo `use_fp8_attention`."""
    modules: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "fp8_gradients", None), GradientScales)]
    if modules:
        _choose_attention(model, modules[0].fp8_gradients.replaced)
    for module in modules:
        module.fp8_gradients = None
    mark_saved_inputs(model)


def _is_causal(module: nn.Module) -> bool:
    """True if `module` is a causal attention of transformers; Octavo's have `fp8_gradients`."""
    named = type(module).__name__.endswith("Attention") and hasattr(module, "head_dim") and hasattr(module, "config")
    return named and getattr(module, "is_causal", False) is True


def _choose_attention(model: Any, name: str) -> None:
    """Give a model of transformers, in which ours is registered with PyTorch's mask, the attention `name`."""
    if not (getattr(model, "_supports_attention_backend", False) and hasattr(model, "set_attn_implementation")):
        return
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(name)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls; returns [B, T, H, D]. transformers computes the calls that stay in BF16."""
    gradients: GradientScales | None = getattr(module, "fp8_gradients", None)
    others = (kwargs.get(name) for name in ("softcap", "s_aux", "position_bias", "cache"))
    plain = attention_mask is None and kwargs.get("is_causal") is not False and all(each is None for each in others)
    if gradients is not None and plain and gradients.takes(query, key, kwargs.get("dropout", 0.0)):
        return attend_fp8(query, key, value, gradients, scale=kwargs.get("scaling")).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
