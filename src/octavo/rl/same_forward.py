"""A mode in which a trained model and the served one give the same bits, in training, in prompts and in decoding.

    with octavo.rl.same_bits(trained, served):
        answers = served.generate(**prompts)
        now = octavo.rl.log_probabilities(trained(**texts).logits, tokens)

In the mode both models run the forward pass below, from the same kernels. No number in it depends on the other
sequences of a batch, on padding, or on how many tokens a pass takes:

    norm, activation, quantization    by row, in one order, as the served model fuses them
    linear layers and head            `octavo.ops.ordered_mm`: one order of K for every number of rows
    attention                         `octavo.ops.ordered_attention`: one order of the keys from the first token on

The backward pass of the trained model is the ordinary one: each layer is computed again as it is outside of the mode,
from the same input, as activation checkpointing does.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops
from octavo.checkpoint.scheme import CHANNEL
from octavo.inference.kv_cache import ModelKVCache, sliding_window
from octavo.inference.packed_linear import PackedLinear
from octavo.inference.transformers_cache import ATTENTION, CACHE, register_attention
from octavo.nn.fused import Stack
from octavo.nn.fused_loss import LossModel
from octavo.nn.fused_modules import is_known
from octavo.nn.linear import Linear
from octavo.nn.linear_function import rows
from octavo.nn.module_tools import differentiable_once, is_fsdp_module, mix_classes, watched
from octavo.numerics import QTensor
from octavo.ops.attention import ordered_attention
from octavo.ops.gemm import ordered_mm
from octavo.ops.softmax_loss import cross_entropy
from octavo.recipe import ROW_W, ROW_X


def same_bits(*models: nn.Module) -> ExitStack:
    """Put models into the mode of the same bits; `close()`, or the end of a `with`, undoes it.

    A model is a Llama, Mistral, Qwen2 or Qwen3 of transformers, in BF16 or float32: converted with `rowwise`,
    `rowwise_forward` or `rowwise_dw_bf16`, or opened by `octavo.load` with the scheme `channel`. Logits are in BF16.
    Rows of an attention mask are ones, with zeros before and after; positions count from the first one.

    Raises:
        ValueError: a model or a setting that the mode does not cover; the message has the remedy.

    Example:

        mode = octavo.rl.same_bits(trained, served)
    """
    for model in models:
        if reason := _reason(model):
            raise ValueError(f"same_bits does not cover this {type(model).__name__}: {reason}")
    register_attention()
    undo = ExitStack()
    for model in models:
        any_model: Any = model
        inner = any_model.base_model
        mixed = {inner: SameModel, inner.norm: SameNorm, any_model.get_output_embeddings(): SameHead}
        for module, ours in (mixed | dict.fromkeys(inner.layers, SameLayer)).items():
            undo.callback(setattr, module, "__class__", type(module))
            module.__class__ = mix_classes(ours, type(module))
        undo.callback(setattr, inner.config, "_attn_implementation", inner.config._attn_implementation)
        inner.config._attn_implementation = ATTENTION
        if (engine := getattr(model, "octavo_engine", None)) is not None:
            engine.sessions.clear()  # their graphs have other kernels
            undo.callback(engine.sessions.clear)
    return undo


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens, float32 [...], by logits [..., V], with a gradient.

    Each is computed from its own row, in one order: in float32 on a GPU, in float64 on a CPU. The label -100, of
    tokens that are not trained, gets 0 and no gradient. For another number that is no token PyTorch raises its error.
    """
    masked = tokens == -100
    given = logits.flatten(0, -2), tokens.masked_fill(masked, 0).flatten()
    return _LogProbabilities.apply(*given).view(tokens.shape).masked_fill(masked, 0)  # type: ignore[no-untyped-call]


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        # On a GPU `.data`: the operation may write to its argument, and does not do so without a factor.
        z = logits.double() if logits.device.type == "cpu" else logits.data.contiguous()
        lse, *_ = cross_entropy(z, tokens, None, None, 1.0, 0.0)
        picked = z.gather(1, tokens[:, None])[:, 0]  # an error for a number that is no token
        ctx.save_for_backward(logits, tokens, lse.float())
        return (picked - lse).float()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        logits, tokens, lse = ctx.saved_tensors
        dz = (logits - lse[:, None]).exp_().mul_(-dy[:, None])  # in float32
        return dz.scatter_add_(1, tokens[:, None], dy[:, None]).to(logits.dtype), None


def _reason(model: Any) -> str:
    """Why the mode does not cover `model`, and the remedy; "" if it does."""
    inner: Any = getattr(model, "base_model", None)
    layers = list(getattr(inner, "layers", ()))
    if not layers or not all(map(is_known, layers)) or len(layers) != model.config.num_hidden_layers:
        return "it takes transformers' Llama, Mistral, Qwen2 and Qwen3 as causal language models"
    linears = {name: each for name, each in inner.layers.named_modules() if isinstance(each, nn.Linear | PackedLinear)}
    other = next((name for name, linear in linears.items() if not _is_covered(linear)), "")
    dtypes = {p.dtype for p in model.parameters()} - {torch.bfloat16, torch.float32}
    engine, config = getattr(model, "octavo_engine", None), model.config
    modules = list(model.modules())
    reasons = {
        "it is in the mode already: close that mode first": isinstance(inner, SameModel),
        f"layer {other} does not multiply E4M3 by rows: convert it with 'rowwise' or 'rowwise_forward', pack it with "
        "the scheme 'channel', and merge adapters": other,
        "its head is not a plain linear layer: convert without fuse_loss, and load with head='bf16'": (
            type(model.get_output_embeddings()) is not nn.Linear or isinstance(model, LossModel)
        ),
        f"it has parameters in {dtypes}: cast it to bfloat16": dtypes,
        "keys and values are stored in eight bits, or attention runs in FP8: load with kv_cache='bf16', "
        "attention='bf16'": engine is not None and (engine.dtype not in (None, "bf16") or engine.fp8_attention),
        "its attention has a sliding window: choose a model without one": sliding_window(config),
        "its rotary embedding changes with the length of the text: choose another rope_type": any(
            kind in str(config.rope_parameters) for kind in ("dynamic", "longrope")
        ),
        "its rotary frequencies were rounded to BF16: load it by from_pretrained(dtype=torch.bfloat16), not by "
        "model.bfloat16()": inner.rotary_emb.inv_freq.dtype != torch.float32,
        "its attention drops probabilities: set attention_dropout to 0": config.attention_dropout,
        "linear layers have hooks, which the mode does not call: take them off": any(map(watched, linears.values())),
        "it is sharded: gather the model on one device": any(
            is_fsdp_module(m) or getattr(m, "parallel", None) is not None for m in modules
        ),
        "it is compiled: use the model as it was before torch.compile": any(
            m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in modules
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_covered(linear: Any) -> bool:
    if isinstance(linear, PackedLinear):
        return linear.scheme == CHANNEL
    gemm = linear.recipe.y if isinstance(linear, Linear) else None
    return gemm is not None and (gemm.a, gemm.b) == (ROW_X, ROW_W) and "y" not in linear.recipe.rotate


# ---- The forward pass, which both models share.


def _layer(layer: Any, first: Tensor | None, tables: tuple[Tensor, Tensor], cache: Any, x: Tensor) -> Tensor:
    """x [B, T, K] after a decoder layer; `first` is int32 [B], `tables` are cos and sin [B or 1, T, D]."""
    attention, mlp = layer.self_attn, layer.mlp
    w, bias = _weights([attention.q_proj, attention.k_proj, attention.v_proj], getattr(layer, "qkv", None))
    sizes = [each.out_features for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    _, n = _norm_quantize(layer.input_layernorm, rows(x), None)
    qkv = ordered_mm(n, w, bias).view(*x.shape[:2], -1)  # [T,K] @ [N,K]^T
    q, k, v = torch.split(qkv, sizes, -1)
    y = _attend(attention, q, k, v, tables, first, cache)
    w, bias = _weights([attention.o_proj])
    y = ordered_mm(ops.quantize(rows(y), ROW_X), w, bias)  # [T,H*D] @ [K,H*D]^T
    total, n = _norm_quantize(layer.post_attention_layernorm, rows(x), y)
    w, bias = _weights([mlp.gate_proj, mlp.up_proj], mlp)
    u = ordered_mm(n, w, bias)  # [T,K] @ [2F,K]^T
    w, bias = _weights([mlp.down_proj])
    return ordered_mm(ops.activation_quantize(u, "swiglu", ROW_X), w, bias, total).view(x.shape)  # [T,F] @ [K,F]^T


def _weights(linears: Sequence[Any], fused: Any = None) -> tuple[QTensor, Tensor | None]:
    """The stacked weights [sum of N, K] and biases of layers with one input; `fused` stacks those of a served model."""
    if not isinstance(linears[0], PackedLinear):
        weights = [linear.weight for linear in linears]
        bias = Stack(weights, [linear.bias for linear in linears]).bias()
        return ops.quantize_stack(weights, ROW_W), None if bias is None else bias.bfloat16()
    if len(linears) == 1:
        return linears[0].packed_weight(), linears[0].bias
    fused.stacked.update(linears)
    return fused.stacked.weight, fused.stacked.bias


def _norm_quantize(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, QTensor]:
    weight = norm.weight.bfloat16()
    return ops.norm_quantize_inference(x, residual, weight, None, norm.variance_epsilon, ROW_X, center=False)


def _attend(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], first: Tensor | None, cache: Any
) -> Tensor:
    """The attention [B, T, H * D] of q [B, T, H * D], and k and v [B, T, G * D], which a cache gets too."""
    norms: dict[str, Any] = {}
    if (q_norm := getattr(attention, "q_norm", None)) is not None:
        weights = q_norm.weight.bfloat16(), attention.k_norm.weight.bfloat16()
        norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": q_norm.variance_epsilon}
    (batch, tokens, _), place = q.shape, attention.layer_idx
    stored = getattr(cache, "model_cache", None)
    if isinstance(stored, ModelKVCache):
        q, (store, *_) = stored.rotate_append(place, q, k, v, *tables, **norms)
        cache.layers[place].is_initialized = True
        keys, values, length = store.keys, store.values, store.length
    else:
        keys, values = (q.new_empty(batch, k.shape[2] // attention.head_dim, tokens, attention.head_dim) for _ in "kv")
        length, clipped = (torch.full(shape, tokens, device=q.device) for shape in ((), (2,)))
        q, _ = ops.rotate_append(q, k, v, *tables, keys, values, None, None, length, clipped, **norms)
        if cache is not None:  # of transformers
            keys, values = (each.contiguous() for each in cache.update(keys, values, place))
            length = torch.full((), keys.shape[2], device=q.device)
    y = ordered_attention(q, keys, values, length, first=first, scale=attention.scaling)  # [B,H,T,D]
    return y.transpose(1, 2).flatten(2)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """The root-mean-square norm in BF16, by the sums of the norms that quantize."""
    weight, flat = norm.weight.bfloat16(), rows(x)
    rstd = ops.norm_quantize(flat, None, weight, None, norm.variance_epsilon, ROW_X, center=False).rstd
    return (weight * (flat.float() * rstd).bfloat16()).view(x.shape)


def _logits(head: Any, x: Tensor) -> Tensor:
    w, bias = head.weight.bfloat16(), None if head.bias is None else head.bias.bfloat16()
    return ordered_mm(rows(x), w, bias).view(*x.shape[:-1], w.shape[0])  # [T,K] @ [V,K]^T


# ---- The classes of the modules in the mode: subclasses of theirs, with the same names.


class SameModel(nn.Module):
    """The layers of a language model: embeddings in BF16, and a mask as the first token of each sequence."""

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None and attention_mask.ndim == 2:
            mask = attention_mask.int()
            if bool((F.pad(mask, (1, 0)).diff() > 0).sum(1).gt(1).any()):
                raise ValueError("each row of attention_mask must be ones, with zeros before and after: leave no gaps")
            if position_ids is None:
                position_ids = (mask.cumsum(1) - 1).clamp_(min=0)[:, -x.shape[1] :]
            first = mask.argmax(1).int().view(-1, 1, 1, 1)
            attention_mask = first if bool(first.any()) else None
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "inputs_embeds": x.bfloat16()}
        return super().forward(**given, **kwargs)


class SameLayer(nn.Module):
    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        cache, mask = kwargs.pop(CACHE, None), kwargs.get("attention_mask")
        first = None if mask is None else mask.flatten()
        run = partial(_layer, self, first, kwargs["position_embeddings"], cache)
        if torch.is_grad_enabled() and cache is not None and cache.get_seq_length(self.self_attn.layer_idx):
            raise RuntimeError("a gradient needs whole texts: go on with a cache under torch.no_grad()")
        return _computed(self, run, partial(super().forward, **kwargs | {"use_cache": False}), hidden_states)


class SameNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return _computed(self, partial(_normed, self), super().forward, hidden_states)


class SameHead(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return _computed(self, partial(_logits, self), super().forward, input)


Run = Callable[[Tensor], Tensor]


def _computed(module: nn.Module, run: Run, ordinary: Run, x: Tensor) -> Tensor:
    """run(x); its gradient is that of ordinary(x)."""
    parameters = [p for p in module.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    if not parameters and not (torch.is_grad_enabled() and x.requires_grad):
        return run(x)
    return _Recomputed.apply(run, ordinary, x, *parameters)  # type: ignore[no-untyped-call]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, ordinary: Run, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(x, *parameters)
        return run(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(needed[0])
        with torch.enable_grad(), torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            y = ctx.ordinary(x)
        wanted = [t for t, is_needed in zip((x, *parameters), needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(y, wanted, dy.to(y.dtype), allow_unused=True))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)
