"""Tools for modules of other libraries: limits, classes, subclasses in place, shared inputs, adapters, caches."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from octavo.architectures import ARCHITECTURES
from octavo.checkpoint.scheme import WEIGHT_DTYPES
from octavo.ops.launching import TENSORS
from octavo.ops.registration import FLOATS


def is_weight(tensor: Tensor) -> bool:
    """True if a tensor of a model is a parameter, or a packed weight."""
    return isinstance(tensor, nn.Parameter) or tensor.dtype in WEIGHT_DTYPES


# ---- Errors for the uses of PyTorch that the converted layers do not support.
#
# Code that a compiler traces is not checked: an eager call with the same inputs raises the error.


def unsupported(what: str) -> NotImplementedError:
    """The error for a use of PyTorch, `what`, that the layers do not support."""
    return NotImplementedError(
        f"octavo's layers do not support {what}. octavo.restore(model) makes them plain PyTorch layers again"
    )


def check_module(model: object, function: str) -> None:
    """Raise a TypeError, which names the public function `function`, unless `model` is a module."""
    if not isinstance(model, nn.Module):
        text = repr(model)
        shown = text if len(text) <= 100 and "\n" not in text else f"a {type(model).__name__}"  # of a tensor: pages
        raise TypeError(f"{function} takes a torch.nn.Module, got {shown}: pass the model itself")


def check_initialized(model: nn.Module) -> None:
    """Raise a ValueError, which names the first, if a parameter or buffer of a lazy module has no shape yet."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, t in tensors if is_lazy(t)]:
        raise ValueError(f"{lazy[0]} ({len(lazy)} such tensors) has no shape yet: run the model on one batch first")


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a batch has for a model: keywords of a mapping, those of a tuple or list, or itself as one."""
    if hasattr(batch, "keys"):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def check_call(layer: Any, x: Tensor, *weights: Tensor) -> None:
    """Raise an error if this forward pass of `layer` cannot run. `check_input` comes first.

    The input x is [..., K]. The first of the weights, [N, K] or [E, N, K], multiplies x. A recipe without casts takes
    every dtype. Compiled code must not read the name of the layer: torch.compile would guard on it and compile each
    block of a model again.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    onnx = sys.modules.get("torch.onnx")  # PyTorch imports it at its first use
    if onnx is not None and onnx.is_in_onnx_export():
        raise unsupported("export to ONNX, which has no operations for their scaled GEMMs")
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise unsupported("the transforms of torch.func (grad, vmap, jvp and others)")
    dual, quantized = forward_ad._current_level >= 0, layer.recipe.quantized
    for t in (x, *weights):
        what = "its input" if t is x else "its weight"
        if dual and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise unsupported("forward-mode differentiation (torch.autograd.forward_ad)")
        if type(t) not in TENSORS and hasattr(t, "device_mesh"):
            raise unsupported(
                "PyTorch's styles of tensor parallelism, or a weight that FSDP2 has not gathered (in "
                f"{_named(layer)}, {what} is a DTensor): take the styles of octavo.distributed (tensor_parallel, "
                "ColumnParallel, RowParallel), or call fully_shard on the block, not on a part of it"
            )
        if quantized and t.dtype not in FLOATS:
            raise TypeError(
                f"{_named(layer)} takes float32, bfloat16 or float16, {what} is {t.dtype} {list(t.shape)}: "
                "convert it to one of these, or leave the layer out of octavo.convert by skip="
            )
    if x.is_nested or x.is_sparse:
        raise unsupported("nested and sparse inputs: give dense tensors, and convert an nn.TransformerEncoder whole")
    if weights:
        check_width(layer, x, weights[0].shape)


def check_input(layer: Any, x: object) -> None:
    """Raise a TypeError unless the input `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{_named(layer)} takes a tensor, got {type(x).__name__}: give it a torch.Tensor")


def check_width(layer: Any, x: Tensor, weight: Sequence[int]) -> None:
    """Raise ValueError unless the input `x` has the width of a weight of this shape, [N, K] or [E, N, K]."""
    width = weight[-1]
    if x.ndim == 0 or x.shape[-1] != width:
        kind = f"a {type(layer).__name__} with a weight {list(weight)}"
        name = f"{_named(layer)}, {kind}," if layer._layer_name else kind
        raise ValueError(
            f"{name} takes an input [..., {width}], got {list(x.shape)}: give it an input whose last dimension is "
            f"{width}"
        )


def _named(layer: Any) -> str:
    return f"the layer {layer._layer_name!r}" if layer._layer_name else f"a {type(layer).__name__}"


Way = Callable[[Tensor], Tensor]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way, back: Way) -> Tensor:
        ctx.back = back
        return way(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


def exchanged(x: Tensor, way: Way, back: Way) -> Tensor:
    """way(x), whose gradient is back(dy)."""
    return _Exchanged.apply(x, way, back)  # type: ignore[no-untyped-call]


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device; None where it is off, and on "meta", which has none."""
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `backward` so that differentiating its gradients again (`create_graph=True`) raises an error."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
            raise unsupported("batches of gradients (is_grads_batched=True, jacobian with vectorize=True)")
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        saved = ctx.saved_tensors  # read once: checkpointed activations are computed once
        # autograd would take the derivative of gradients that depend on no input for zero
        read = [t for t in (*gradients, *saved) if t is not None and t.requires_grad]
        with torch.no_grad():
            known = SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad)
            results = backward(known, *gradients)
        return _Final.apply(len(results), *(g if g is None else g.detach().requires_grad_() for g in results), *read)  # type: ignore[no-untyped-call]

    return run


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise unsupported("double backward (create_graph=True)")


# ---- Questions about the class of a module, answered by its name: to import FSDP or a library of models takes long.


def own_class(module: nn.Module) -> Any:
    """The class of `module`, before `fully_shard` made it a subclass of `FSDPModule` and of its own class."""
    classes = type(module).__mro__
    names = [cls.__name__ for cls in classes]
    return classes[names.index("FSDPModule") + 1] if "FSDPModule" in names else classes[0]


def class_name(module: nn.Module) -> str:
    """The name of the module's own class."""
    return str(own_class(module).__name__)


def library_of(module: nn.Module) -> str:
    """The name of the library that has the module's own class."""
    return str(own_class(module).__module__).partition(".")[0]


def is_of_library(module: nn.Module, library: str, name: str) -> bool:
    """True if the module's own class is the class `name` of a library."""
    return library_of(module) == library and class_name(module) == name


def is_conv1d(module: nn.Module) -> bool:
    """True if `module` is a `Conv1D` of transformers, converted or not, by name: transformers need not be installed."""
    theirs = ("transformers.pytorch_utils", "Conv1D")
    return any((cls.__module__, cls.__name__) == theirs for cls in type(module).__mro__)


def computes_linearly(module: nn.Module) -> bool:
    """True if a call of `module`, converted or not, computes x @ w^T + b: an `nn.Linear`, one of a subclass with the
    same forward, or Falcon's `FalconLinear`, which rounds x @ w^T before it adds b. A parametrized layer does more."""
    theirs = parts_of(own_class(module))[-1]
    plain = theirs.forward is nn.Linear.forward or is_of_library(module, "transformers", "FalconLinear")
    read = theirs is NonDynamicallyQuantizableLinear or is_parametrized(module)  # the first by PyTorch's attention
    return plain and not read and theirs.__call__ is nn.Module.__call__


def shape_of(layer: Any) -> tuple[int, int]:
    """N outputs and K inputs of an `nn.Linear` or a `Conv1D`."""
    if is_conv1d(layer):
        inputs, outputs = layer.weight.shape
        return outputs, inputs
    return layer.out_features, layer.in_features


def watched(module: nn.Module) -> bool:
    """True if a call of `module` does more than its class's forward: it has hooks, or a `forward` of its own."""
    own = module.__dict__
    return "forward" in own or bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def is_fsdp_module(module: nn.Module) -> bool:
    """True if FSDP manages this module."""
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)


# What DDP, torch.compile and PEFT put before all names of a model, and what wrappers of its modules put between names.
_WRAPPERS = re.compile(
    r"^((module|_orig_mod|base_model\.model)\.)+"
    r"|(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer|original_module"
    r"|modules_to_save\.[^.]+)(\.|$)"
)


def plain_name(name: str) -> str:
    """The name of a module or tensor in the model that nothing wraps."""
    return _WRAPPERS.sub("", name).removesuffix(".")


# ---- Classes that `convert` gives to modules of other libraries: subclasses of an Octavo class and the module's class.
#
# A mixed class has the name of the module's own class, so reports, `isinstance` and checkpoints see no difference.
# There is one for each pair of classes. Its instances can be pickled and copied: they are rebuilt from the two classes.


def _mix_classes(ours: Any, theirs: Any) -> Any:
    """The subclass of `ours` and `theirs` with the name of `theirs`; the same class at every call."""
    parts = (ours, *parts_of(theirs))
    members = {"__module__": theirs.__module__, "__reduce_ex__": _reduce, "_octavo_parts": parts}
    return type(theirs.__name__, (ours, theirs), members)


mix_classes: Callable[[Any, Any], Any] = cache(_mix_classes)  # mypy takes the class of a module for unhashable


def mix_into(module: nn.Module, ours: type) -> None:
    """Make the class of `module` a subclass of `ours` too, unless it is one."""
    if not isinstance(module, ours):
        module.__class__ = mix_classes(ours, type(module))


def unmix(module: nn.Module) -> bool:
    """Undo `mix_into`: delete the attributes `added` by our class. Returns whether `module` had one with such."""
    ours, *theirs = parts_of(type(module))
    if not theirs or "added" not in vars(ours):
        return False
    for name in ours.added:
        delattr(module, name)
    (module.__class__,) = theirs
    return True


def parts_of(cls: Any) -> tuple[Any, ...]:
    """The classes that `mix_classes` made `cls` of, ours first; `cls` alone if it was not mixed."""
    return cls.__dict__.get("_octavo_parts", (cls,))


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    # By default pickle stores a class by its name, and would find the module's own class under it.
    reduced: Any = object.__reduce_ex__(module, protocol)
    return _new, parts_of(type(module)), *reduced[2:]


def _new(*parts: Any) -> Any:
    *ours, cls = parts
    for part in reversed(ours):
        cls = mix_classes(part, cls)
    return cls.__new__(cls)


# ---- The outputs of several layers of one input, computed together and passed in place of that input.


class PrecomputedProjections:
    """q, k and v, passed to the attention of another library in place of the input x that they were computed from.

    The attention calls its projections with this object, and each converted projection returns its own output. The
    object has the dtype and device of x, and is not a tensor. Its shape is [..., K], with all tokens for which there
    are outputs, also where x has one rank's part of a sequence. `adds`: the attention may add x, and then sets `added`.
    """

    adds = added = False

    def __init__(self, x: Tensor, layers: Sequence[nn.Module], outputs: Sequence[Tensor]) -> None:
        batch = next((y.shape[:-1] for y in outputs), x.shape[:-1])
        self.shape = torch.Size((*batch, x.shape[-1]))
        self.ndim, self.x = len(self.shape), x
        self.dtype: torch.dtype = x.dtype
        self.device: torch.device = x.device
        self.pairs = tuple(zip(layers, outputs, strict=True))

    def output_of(self, layer: nn.Module) -> Tensor:
        for known, y in self.pairs:
            if known is layer:
                return y
        raise RuntimeError(
            f"a norm was fused with {len(self.pairs)} layers, and another one was given its output: {layer}"
        )


# ---- Modules whose buffers hold the state of scales, in dtypes that a cast of the model does not change.


class ScaleBuffers(nn.Module):
    """A module with buffers that begin as zeros and keep their dtypes, except the buffers in `cast_with_model`.

    `model.bfloat16()` casts the buffers of other modules, and `to_empty` gives those on the meta device memory that is
    not zero.
    """

    cast_with_model: tuple[str, ...] = ()
    ready: bool = False  # whether a history has a scale; a bool, since a compiled graph guards its value

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self.named_buffers(recurse=False))
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = getattr(self, name)
            if old.is_meta and not new.is_meta:
                new.zero_()
                self.ready = False
            if new.dtype != old.dtype and name not in self.cast_with_model:
                self._buffers[name] = old.to(new.device)
        return result


# ---- Layers in adapters (LoRA), which `octavo.nn.fused` computes.


class Adapter(NamedTuple):
    """B(A(x)) * scale, which is added to the output of a layer."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    scale: float


class AdaptedLayer(nn.Module):
    """A layer in adapters, as a library of adapters wraps it (`octavo.integrations.peft`)."""

    def parts(self) -> tuple[nn.Module, list[Adapter]] | None:
        """The layer and the adapters whose sum the output is; None where only `forward` computes it."""
        raise NotImplementedError


def parts_of_layer(module: nn.Module) -> tuple[nn.Module, list[Adapter]] | None:
    """`AdaptedLayer.parts`; another module is the layer itself. None too where the module or the layer is watched."""
    found = module.parts() if isinstance(module, AdaptedLayer) else (module, [])
    return None if found is None or watched(module) or watched(found[0]) else found


# ---- A cache for transformers, with which it does not wait for the GPU.


CACHES = ("cache", "past_key_values")  # the argument of transformers from 5.24 on, and before


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers; none if one of them may attend in another way than Llama's."""
    layers = [each for each in model.modules() if class_name(each).endswith("DecoderLayer")]
    known = {f"{each.name}DecoderLayer" for each in ARCHITECTURES.values() if each.block.rms}
    return layers if all(library_of(m) == "transformers" and class_name(m) in known for m in layers) else []


def spare_search(model: nn.Module) -> None:
    """Let each call of `model` with tokens alone spare transformers the search of `find_cache`."""
    if layers := decoder_layers(model):
        model.register_forward_pre_hook(
            lambda model, args, kwargs: (args, kwargs | find_cache(model, layers, args, kwargs)), with_kwargs=True
        )


def find_cache(model: Any, layers: list[nn.Module], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A cache as an argument of `model`, in which its layers store nothing; empty where transformers needs none.

    Without a cache and a mask, transformers looks for packed sequences in the positions of the tokens, which it has
    just made itself, and waits for the GPU to know. Until the host has launched the first layer again, the GPU is idle.
    """
    if not layers or len(args) > 1 or torch.compiler.is_compiling():
        return {}
    uses_cache = model.config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
    given = any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", *CACHES))
    checkpointed = any(getattr(layer, "gradient_checkpointing", False) for layer in layers)
    if uses_cache or given or checkpointed:  # a checkpointed layer warns of a cache
        return {}
    name = CACHES[0] if CACHES[0] in signature(model.forward).parameters else CACHES[1]
    cache: Any = import_module("transformers").DynamicCache()
    cache.stays_empty, cache.update = True, lambda keys, values, *_, **__: (keys, values)
    return {name: cache}
