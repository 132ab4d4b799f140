"""Modules that compute a norm or a whole MLP with its linear layers in one function, and the blocks that use them."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.architectures import ARCHITECTURES, LLAMA
from octavo.nn.fused import ALONE, NO_PAIR, Exchange, Norm, NormSpec, Pair, is_frozen, reads, run_fused, stack_adapters
from octavo.nn.heads import turning
from octavo.nn.linear import Linear, WeightCache, compute_dtype
from octavo.nn.linear_function import FusedCall, LinearCall
from octavo.nn.module_tools import (
    CACHES,
    Adapter,
    PrecomputedProjections,
    check_call,
    is_of_library,
    library_of,
    mix_into,
    own_class,
    parts_of_layer,
    unsupported,
    watched,
)
from octavo.nn.observer import Observer, observer_of
from octavo.nn.parallel_weights import parallel_of
from octavo.numerics.qtensor import Cast
from octavo.recipe import FusableRecipe

# ---- A norm that feeds linear layers, whose output is quantized once, in the pass that computes it.
#
# The module refers by name to a norm and layers that another module owns, so that parameters keep their names:
#
#     self.qkv = NormLinear(self, "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
#     (q, k, v), x = self.qkv(x, residual)
#
# and looks them up in each forward pass, so that it runs whatever a library puts in their place. The pass is fused when
# all layers were converted with one fusable recipe (`Recipe.fusable`: `rowwise`) and none has a hook, which would not
# be called. Otherwise the norm and the layers run one after the other.


LONGEST_NORM = 16384  # elements of a row: beyond, the registers of the fused norm spill, and PyTorch's norm is faster
LONGEST_TRAINED_LAYER_NORM = 8192  # the backward pass holds the gradient of the bias too


class FusedModule(nn.Module):
    """Base of the modules that run several linear layers in one pass, where that is possible.

    Args:
        owner: the module under which the layers are found; it is not registered here.
        inner: dotted names below `owner` of the layers that read the input, and run as one GEMM.
    """

    inner_names: tuple[tuple[str, ...], ...]  # each as the parts of a dotted name
    weight_cache: WeightCache  # of the quantized weights of `inner`
    observer: Observer | None = None  # of `inner`

    def __init__(self, owner: nn.Module, *inner: str) -> None:
        super().__init__()
        object.__setattr__(self, "_owner", owner)  # not a child: it would be its own descendant
        self.inner_names = tuple(tuple(name.split(".")) for name in inner)
        self.weight_cache = WeightCache()

    @property
    def owner(self) -> nn.Module:
        """The module that owns the layers: this one, unless another was given."""
        return self.__dict__.get("_owner", self)

    @property
    def inner(self) -> list[Any]:
        """The layers that read the input."""
        owner = self.owner
        return [find(owner, name) for name in self.inner_names]

    @property
    def layers(self) -> list[Any]:
        """All layers that run in the pass."""
        return self.inner

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise unsupported("nn.DataParallel: take DistributedDataParallel, with a process for each GPU")

    def cached_weights(self) -> tuple[Sequence[nn.Linear], Cast] | None:
        """The stacked layers and their cast, where they are fused."""
        fusable = fusable_layers(self.layers)
        return None if fusable is None else (fusable.linears[: len(self.inner_names)], fusable.recipe.w)


class NormLinear(FusedModule):
    """y_i = linear_i(norm(x + residual)).

    Args:
        owner: the module under which the others are found; it is not registered here.
        norm: dotted name below `owner` of an `nn.LayerNorm`, an `nn.RMSNorm`, or a root-mean-square norm of
            transformers' Llama, Mistral or Qwen. Other norms work too, but are not fused.
        linears: dotted names below `owner` of the layers that the norm feeds.
    """

    def __init__(self, owner: nn.Module, norm: str, *linears: str) -> None:
        super().__init__(owner, *linears)
        self.norm_name = tuple(norm.split("."))

    @property
    def norm(self) -> Any:
        return find(self.owner, self.norm_name)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The outputs [..., N_i] of the layers, and x + residual [..., K] (x itself without a residual)."""
        outputs = self.fused(x, residual)
        if outputs is not None:
            return outputs
        exchange, total = exchange_of(self, self.inner), x if residual is None else x + residual
        n = exchange.input(self.norm, total)
        return tuple(exchange.run(linear, n) for linear in self.inner), total

    def fused(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """The outputs of `forward`, computed in one pass; None where the norm or the layers cannot be fused."""
        exchange, layers, norm = exchange_of(self, inner := self.inner), fusable_layers(inner), read_norm(self.norm)
        if layers is None or norm is None or x.numel() == 0 or not layers.take(norm, x):
            return None
        call = fused_call(layers, x, exchange, observer_of(self))
        stack = exchange.stack(layers.linears, call.recipe.w, self.weight_cache)
        exchanges, pairs = (exchange, ALONE), (layers.pair(x), NO_PAIR)
        y, total = run_fused(x, residual, exchange.read_norm(norm), stack, call, exchanges, pairs)
        parts = torch.split(y, [w.shape[0] for w in stack.weights], dim=-1)
        return tuple(exchange.output(part, x) for part in parts), total

    def cached_weights(self) -> tuple[Sequence[nn.Linear], Cast] | None:
        return None if read_norm(self.norm) is None else super().cached_weights()

    def extra_repr(self) -> str:
        norm, *linears = (".".join(name) for name in (self.norm_name, *self.inner_names))
        return f"{norm} -> {', '.join(linears)}"


def find(owner: nn.Module, name: tuple[str, ...]) -> Any:
    """The submodule of `owner` with the dotted name whose parts are `name`."""
    for part in name:
        owner = child(owner, part)
    return owner


def child(module: nn.Module, name: str) -> Any:
    """getattr(module, name) for a submodule, in a fourth of the time: Python would raise and catch an exception."""
    found = module._modules.get(name)
    return getattr(module, name) if found is None else found


class FusableLayers(NamedTuple):
    """Converted layers that can run as one, their recipe, and the adapters around each."""

    linears: Sequence[Linear]
    recipe: FusableRecipe
    adapters: Sequence[Sequence[Adapter]]

    def take(self, norm: Norm | None, x: Tensor) -> bool:
        """True if the adapters, if there are any, run in the pass of the layers, for the input `x` of `norm`."""
        alone = not any(self.adapters)
        return alone or (all(map(is_frozen, self.linears)) and reads(self.adapters, norm, compute_dtype(x)))

    def pair(self, x: Tensor, first: int = 0, end: int | None = None) -> Pair:
        """The adapters of the layers from `first` to `end` as one pair, for the input `x`."""
        weights = [linear.weight for linear in self.linears[first:end]] if any(self.adapters) else []
        return stack_adapters(self.adapters[first:end], weights, compute_dtype(x))


def fusable_layers(modules: Sequence[nn.Module]) -> FusableLayers | None:
    """The layers, if they can run as one: all converted with the same fusable recipe, and none watched."""
    parts = [found for found in map(parts_of_layer, modules) if found is not None]
    linears = [linear for linear, _ in parts if isinstance(linear, Linear)]
    if len(linears) < len(modules):
        return None
    first = linears[0].recipe  # mostly that of all layers: torch.compile takes long to trace a comparison of recipes
    if not all(linear.recipe is first or linear.recipe == first for linear in linears):
        return None
    recipe = first.fusable
    return None if recipe is None else FusableLayers(linears, recipe, [adapters for _, adapters in parts])


def is_fusable(cls: Any, ending: str) -> bool:
    """True if a class is transformers' own, as LlamaRMSNorm with the ending RMSNorm, and its architecture is fused."""
    known = ARCHITECTURES.get(cls.__name__.removesuffix(ending)) if cls.__name__.endswith(ending) else None
    return known is not None and known.fusable and cls.__module__.startswith("transformers.")


def exchange_of(module: nn.Module, linears: Sequence[nn.Module]) -> Exchange:
    """The exchange of the layers that read the input of `module`."""
    exchange: Exchange = parallel_of(linears) or ALONE
    exchange.check(module)
    return exchange


def fused_call(
    layers: FusableLayers, x: Tensor, exchange: Exchange, observer: Observer | None, outer: Observer | None = None
) -> FusedCall:
    """The call of layers that run as one, for the input `x`; raises the errors of `check_call`."""
    whole = [linear.weight for linear in layers.linears] if exchange is ALONE else []  # others are DTensors
    check_call(layers.linears[0], x, *whole)
    return LinearCall(layers.recipe, compute_dtype(x), observer=observer, outer_observer=outer)


def read_norm(norm: Any, *, backward: bool = True) -> Norm | None:
    """The norm as the fused functions take it; None if it is of an unknown kind, too long, or watched.

    Without a backward pass, longer layer norms are fused.
    """
    if watched(norm):
        return None
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        longest = LONGEST_TRAINED_LAYER_NORM if backward and isinstance(norm, nn.LayerNorm) else LONGEST_NORM
        if norm.weight is None or len(norm.normalized_shape) != 1 or norm.weight.numel() > longest:
            return None
        if isinstance(norm, nn.LayerNorm):
            return NormSpec(norm.eps, center=True), norm.weight, norm.bias
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # torch's default, for BF16 too
        return NormSpec(eps, center=False), norm.weight, None
    if is_fusable(type(norm), "RMSNorm"):  # weight * x / rms(x), eps in `variance_epsilon`
        weight = norm._parameters.get("weight")  # as in `child`
        return NormSpec(norm.variance_epsilon, center=False), norm.weight if weight is None else weight, None
    return None


# ---- MLPs whose activations stay in FP8 between the GEMMs; only the input of the activation is stored in high
# precision.
#
# They are plain PyTorch until their layers are converted with a fusable recipe (`rowwise`). A norm in front of the MLP
# and the residual stream around it are computed in the same pass where they are given.


class FusedMLP(FusedModule):
    """y = outer(activate(inner(x))); with a norm, x is norm(x + residual). Base of `SwiGLU`, `GELU` and `GEGLU`.

    Args:
        owner: the module under which the layers are found, so that they keep their names; it is not registered here.
        inner, outer: dotted names below `owner` of the layers before and after the activation.
    """

    activation: ClassVar[str]  # as `octavo.ops.activation_quantize` calls it
    outer_name: tuple[str, ...]
    recompute: bool = False  # the input of the activation, in the backward pass; set by `octavo.convert`

    def __init__(self, owner: nn.Module, inner: str, outer: str) -> None:
        super().__init__(owner, inner)
        self.outer_name = tuple(outer.split("."))

    @property
    def layers(self) -> list[Any]:
        return [*self.inner, self.outer]

    @property
    def outer(self) -> Any:
        """The layer after the activation."""
        return find(self.owner, self.outer_name)

    def runs_fused(self) -> bool:
        return self.cached_weights() is not None

    def activate(self, *u: Tensor) -> Tensor:
        """The activation of the outputs of the inner layers, in plain PyTorch."""
        raise NotImplementedError

    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Any:
        """y [..., width] of x [..., width]. With a norm: y, and x + residual (x itself without a residual)."""
        if norm is None and residual is not None:
            raise ValueError("a residual needs a norm: pass both, or add it to x")
        y, total = self.run(x, norm, residual)
        return y if norm is None else (y, total)

    def forward_residual(self, x: Tensor, norm: nn.Module, residual: Tensor | None = None) -> Tensor:
        """x + residual + y: the residual stream after the MLP."""
        y, total = self.run(x, norm, residual)
        return total + y

    def run(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """y and x + residual, in one pass where that is possible."""
        exchange, layers = exchange_of(self, self.inner), fusable_layers(self.layers)
        known_norm = None if norm is None else read_norm(norm)
        unknown = norm is not None and known_norm is None
        if layers is None or x.numel() == 0 or unknown or not layers.take(known_norm, x):
            total = x if residual is None else x + residual
            n = exchange.input(norm, total)
            return self.outer(self.activate(*(exchange.run(linear, n) for linear in self.inner))), total
        *inner, outer = layers.linears
        exchanges: Any = exchange, parallel_of([outer]) or ALONE
        call = fused_call(layers, x, exchange, observer_of(self), observer_of(outer))
        call.recompute = self.recompute
        inner_stack = exchange.stack(inner, call.recipe.w, self.weight_cache)
        outer_stack = exchanges[1].stack([outer], call.recipe.w, outer.weight_cache)
        norm_here = None if known_norm is None else exchange.read_norm(known_norm)
        pairs = layers.pair(x, 0, -1), layers.pair(x, -1)
        return run_fused(x, residual, norm_here, inner_stack, call, exchanges, pairs, self.activation, outer_stack)


class SwiGLU(FusedMLP):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x)), with the names of transformers' Llama.

    Args:
        width: of x and y.
        mlp_width: of the hidden layer.
        bias: whether the three layers have biases.
    """

    activation = "swiglu"
    added: ClassVar[tuple[str, ...]] = ("weight_cache",)
    inner_names, outer_name = (("gate_proj",), ("up_proj",)), ("down_proj",)

    def __init__(self, width: int, mlp_width: int, *, bias: bool = False) -> None:
        nn.Module.__init__(self)  # it owns its layers
        self.gate_proj = nn.Linear(width, mlp_width, bias=bias)
        self.up_proj = nn.Linear(width, mlp_width, bias=bias)
        self.down_proj = nn.Linear(mlp_width, width, bias=bias)
        self.weight_cache = WeightCache()

    def activate(self, *u: Tensor) -> Tensor:
        gate, up = u
        return F.silu(gate) * up


class GELU(FusedMLP):
    """y = outer(gelu(inner(x))), the exact GELU."""

    activation = "gelu"

    def activate(self, *u: Tensor) -> Tensor:
        return F.gelu(u[0])


class GEGLU(FusedMLP):
    """y = outer(up * gelu(gate)), where inner(x) is up, gate: the halves of its last dimension, as in diffusers."""

    activation = "geglu"

    def run(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if parallel_of(self.inner) is not None:
            raise ValueError(
                "tensor parallelism cuts the first layer of a GEGLU between up and gate, which are halves of its "
                "outputs: leave the layers of this MLP whole"
            )
        return super().run(x, norm, residual)

    def activate(self, *u: Tensor) -> Tensor:
        up, gate = u[0].chunk(2, dim=-1)
        return up * F.gelu(gate)


# ---- Decoder layers of transformers whose norms and MLPs are fused with quantization, once they are converted.
#
#     n = input_layernorm(x);  q, k, v = q_proj(n), k_proj(n), v_proj(n)      one pass: `NormLinear`
#     z = x + o_proj(attention(q, k, v))
#     y = z + mlp(post_attention_layernorm(z))                                 one pass: `SwiGLU` with its norm
#
# A decoder layer of a known class, and its MLP, become subclasses of their classes, with the same names: parameters,
# `state_dict`, hooks and `isinstance` stay as they are, and the attention is still transformers' own code. Where the
# passes cannot be fused (another recipe, a wrapped or watched layer, no tokens) the class's own forward runs, unless
# the layer is parallel (`octavo.nn.parallel_weights`).


SILU = ("SiLU", "SiLUActivation")


def fuse_decoder_layers(model: nn.Module) -> None:
    """Fuse the norms and MLPs of the decoder layers whose classes are known; idempotent."""
    for module in list[Any](model.modules()):
        if not isinstance(module, DecoderLayer) and is_known(module):
            module.qkv = NormLinear(module, LLAMA.norms[0], *LLAMA.qkv)
            mix_into(module, DecoderLayer)
            module.mlp.weight_cache = WeightCache()
            mix_into(module.mlp, SwiGLU)


def is_known(layer: Any) -> bool:
    """True if `layer` is a decoder layer of transformers whose class, norms and MLP are known."""
    if not is_fusable(own_class(layer), "DecoderLayer"):
        return False
    norms = all(is_fusable(type(layer.get_submodule(name)), "RMSNorm") for name in LLAMA.norms)
    return norms and is_fusable(own_class(layer.mlp), "MLP") and type(layer.mlp.act_fn).__name__ in SILU


class TrainedNorm(nn.Module):
    """A norm of transformers that feeds no quantized layer. In training PyTorch's `rms_norm` computes it in one pass.

    Without gradients transformers' own operations run. They round the norm before they multiply it by the weight, as a
    packed model does.
    """

    added: ClassVar[tuple[str, ...]] = ()

    def forward(self: Any, x: Tensor) -> Tensor:
        sharded = hasattr(x, "device_mesh") or hasattr(self.weight, "device_mesh")
        if sharded or x.dtype != self.weight.dtype or not torch.is_grad_enabled():
            return super().forward(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon).to(x.dtype)  # autocast widens it


class DecoderLayer(nn.Module):
    """A decoder layer of transformers that runs norms and projections, and norm and MLP, in one pass each."""

    added: ClassVar[tuple[str, ...]] = ("qkv",)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K]; `kwargs` go to the attention."""
        kwargs |= {name: None for name in CACHES if getattr(kwargs.get(name), "stays_empty", False)}
        attend, mlp, qkv = child(self, "self_attn"), child(self, "mlp"), child(self, "qkv")
        if parallel_of(layers := qkv.inner) is not None:  # transformers' code takes a part of a sequence for all of it
            fused = qkv(hidden_states)
        else:
            fused = None if args or watched(attend) or watched(mlp) else qkv.fused(hidden_states)
        if fused is None:
            return super().forward(hidden_states, *args, **kwargs)
        (q, k, v), hidden_states = fused
        # Attention saves v for its backward pass. As a view, v would keep all of the stacked q, k, v in memory.
        projections = PrecomputedProjections(hidden_states, layers, (q, k, v.contiguous() if v.requires_grad else v))
        projections.adds = is_fusable(type(attend), "Attention")  # others may change the attention's result
        attention, _ = turning(attend, kwargs)(hidden_states=projections, **kwargs)
        norm = child(self, "post_attention_layernorm")
        if attention.shape[1] == 1:  # the last layer of a served prompt goes on with the last token alone
            hidden_states = hidden_states[:, -1:]
        hidden_states, attention = (attention, None) if projections.added else (hidden_states, attention)
        if isinstance(mlp, FusedMLP):
            return mlp.forward_residual(hidden_states, norm, attention)
        y, total = mlp(hidden_states, norm, attention)  # a wrapper, which must be called
        return total + y


# ---- Blocks of timm's vision transformers whose norms and MLPs are fused with quantization, once they are converted.
#
#     q, k, v = attn.qkv(norm1(x))                           one pass: `NormLinear`
#     z = x + drop_path1(ls1(attn.proj(attention(q, k, v))))
#     y = z + drop_path2(ls2(mlp(norm2(z))))                 the MLP with its norm in one pass: `GELU`
#
# As above, a block becomes a subclass of its class with the same name, and the attention is timm's own code. Saved for
# the backward pass are x, z, q, k, v, the output of the attention, and the input of the GELU.


def _is_vision_block(block: Any) -> bool:
    """True if `block` is one of timm, with plain attention, and an MLP of two layers, the exact GELU and no dropout."""
    if not is_of_library(block, "timm", "Block"):
        return False
    attn, mlp = block.attn, block.mlp
    if not (is_of_library(attn, "timm", "Attention") and is_of_library(mlp, "timm", "Mlp")):
        return False
    exact = type(mlp.act).__name__ == "GELU" and getattr(mlp.act, "approximate", "none") == "none"
    plain = type(getattr(mlp, "norm", None)) in (type(None), nn.Identity) and mlp.drop1.p == mlp.drop2.p == 0
    linears = all(isinstance(layer, nn.Linear) for layer in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
    return exact and plain and linears and getattr(attn, "gate", None) is None


class VisionBlock(nn.Module):
    """A block of timm that runs norm and projections, and norm and MLP, in one pass each."""

    added: ClassVar[tuple[str, ...]] = ("fused_qkv", "fused_mlp")

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the class's own forward: x [B, T, K] to [B, T, K]; other arguments go to the attention."""
        attend, qkv = child(self, "attn"), child(self, "fused_qkv")
        fused = None if watched(attend) or watched(child(self, "mlp")) else qkv.fused(x)
        if fused is None:
            return super().forward(x, *args, **kwargs)
        outputs, x = fused
        attention = attend(PrecomputedProjections(x, qkv.inner, outputs), *args, **kwargs)
        attention = self.drop_path1(self.ls1(attention))
        y, total = child(self, "fused_mlp").run(x, child(self, "norm2"), attention)
        return total + self.drop_path2(self.ls2(y))


# ---- Blocks of diffusers' transformers whose norms and MLPs are fused with quantization, once they are converted.
#
#     x = x + attn1(norm1(x))                q, k, v in one pass with the norm: `NormLinear`
#     x = x + attn2(norm2(x), text)          q in one pass with the norm; k and v are those of the text
#     x = x + ff(norm3(x))                   the MLP with its norm in one pass: `GEGLU`
#
# They are the `BasicTransformerBlock`s of a U-Net such as SDXL's. The attention is diffusers' own code. Saved for the
# backward pass are the three x, q, k, v, the outputs of the attentions, and the input of the GEGLU.


def _is_plain_attention(attention: Any) -> bool:
    """True if `attention` is diffusers' `Attention` and calls PyTorch's attention, between its four layers alone."""
    known = is_of_library(attention, "diffusers", "Attention")
    if not known or type(attention.processor).__name__ != "AttnProcessor2_0" or attention.to_out is None:
        return False
    changed = attention.residual_connection or attention.rescale_output_factor != 1
    return not changed and attention.group_norm is None and attention.spatial_norm is None


def _is_diffusion_block(block: Any) -> bool:
    """True if `block` is a block of diffusers with layer norms, plain attentions, and a GEGLU without dropout."""
    if not is_of_library(block, "diffusers", "BasicTransformerBlock") or block.norm_type != "layer_norm":
        return False
    special = block.only_cross_attention or block.pos_embed is not None or hasattr(block, "fuser")
    attentions = [each for each in (block.attn1, block.attn2) if each is not None]
    activation, _, outer, *_ = net = block.ff.net
    dropped = any(isinstance(module, nn.Dropout) and module.p for module in net)
    mlp = is_of_library(activation, "diffusers", "GEGLU") and isinstance(outer, nn.Linear) and not dropped
    return mlp and not special and all(map(_is_plain_attention, attentions))


class DiffusionBlock(nn.Module):
    """A block of diffusers that runs norms and projections, and norm and MLP, in one pass each."""

    added: ClassVar[tuple[str, ...]] = ("fused_qkv", "fused_q", "fused_mlp")

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K]; encoder_hidden_states [B, S, J]."""
        attn1, attn2, mlp = self.attn1, self.attn2, child(self, "fused_mlp")
        called = [attn1, self.ff, self.ff.net[0], *([] if attn2 is None else [attn2])]
        alone = attn2 is not None and encoder_hidden_states is None
        if alone or cross_attention_kwargs or self._chunk_size is not None or any(map(watched, called)):
            return super().forward(
                hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
                cross_attention_kwargs, *args, **kwargs,
            )  # fmt: skip
        y, x = _attend(child(self, "fused_qkv"), attn1, hidden_states, None, attention_mask=attention_mask)
        if attn2 is not None:
            text = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
            y, x = _attend(child(self, "fused_q"), attn2, x, y, **text)
        return mlp.forward_residual(x, self.norm3, y)


def _attend(
    projections: NormLinear, attention: nn.Module, x: Tensor, residual: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The attention of the norm of x + residual [B, T, K], and x + residual."""
    fused = projections.fused(x, residual)
    if fused is None:
        total = x if residual is None else x + residual
        return attention(projections.norm(total), **kwargs), total
    outputs, total = fused
    return attention(PrecomputedProjections(total, projections.inner, outputs), **kwargs), total


def fuse_blocks(model: nn.Module) -> None:
    """Fuse the norms and MLPs of the blocks whose classes are known; idempotent."""
    fuse_decoder_layers(model)
    for block in list[Any](model.modules()):
        if is_fusable(type(block), "RMSNorm"):
            mix_into(block, TrainedNorm)
        elif not isinstance(block, VisionBlock) and _is_vision_block(block):
            block.fused_qkv = NormLinear(block, "norm1", "attn.qkv")
            block.fused_mlp = GELU(block.mlp, "fc1", "fc2")
            mix_into(block, VisionBlock)
        elif not isinstance(block, DiffusionBlock) and _is_diffusion_block(block):
            block.fused_qkv = NormLinear(block, "norm1", "attn1.to_q", "attn1.to_k", "attn1.to_v")
            block.fused_q = None if block.attn2 is None else NormLinear(block, "norm2", "attn2.to_q")
            block.fused_mlp = GEGLU(block.ff, "net.0.proj", "net.2")
            mix_into(block, DiffusionBlock)


# ---- The layers after attention, whose input PyTorch's attention saves for its own backward pass.
#
# Such a layer saves its input too, instead of the bytes that it makes of it. That takes no memory, since both save one
# tensor, and the backward pass casts it again. In compiled code the partitioner would save the bytes: it does not know
# that they are computed from a tensor that is saved anyway.


FUNCTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")  # of transformers, that save their result


def mark_saved_inputs(model: nn.Module) -> None:
    """Tell the converted layers after attention in `model` whether it saves their input."""
    for module in model.modules():
        name = _layer_after(module)
        layer = module.get_submodule(name) if name else None
        if isinstance(layer, Linear):
            layer.input_is_saved = _saves_output(module)


def _layer_after(attention: Any) -> str:
    """The name of the layer whose input is the result of PyTorch's attention in `attention`; "" for other modules."""
    name, library = own_class(attention).__name__, library_of(attention)
    if library == "timm" and name == "Attention":
        kept = isinstance(getattr(attention, "norm", None), nn.Identity | None)  # BEiT has none
        return "proj" if kept and getattr(attention, "gate", None) is None else ""
    if library == "transformers" and name.endswith("Attention"):
        known = ARCHITECTURES.get(name.removesuffix("Attention"))
        return known.block.o.rpartition(".")[2] if known and known.block.rms else ""
    if _is_plain_attention(attention):  # of diffusers
        return "to_out.0"
    return str(getattr(attention, "layer_after", ""))  # in `octavo.models`


def _saves_output(attention: Any) -> bool:
    """True if the attention saves its result in the dtype of the next layer's input."""
    if getattr(attention, "fp8_gradients", None) is not None:
        return False
    if library_of(attention) == "transformers":
        return attention.config._attn_implementation in FUNCTIONS
    return bool(getattr(attention, "fused_attn", True))  # in timm
