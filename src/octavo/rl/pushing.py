"""Pushing a model that is trained into a live model that generates: the bytes that the next step multiplies, in place.

    trained   w[N,K]  ->  w_q[N,K], s_w[N,1] = quantize(w)      by the cast of the layer's recipe
    served    weight <- w_q,  weight_scale <- s_w               into the memory that is there

Row scales do not depend on the batch, so training and the engine multiply the same bytes. A captured CUDA graph reads
the memory that was written, and so do layers that run as one GEMM: their weights are views of one stack. All that a
push needs is checked before a byte is changed. It holds the weights of one layer beside both models.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.checkpoint.files import ShardReader
from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE
from octavo.checkpoint.scheme import SCHEME_OF, groups
from octavo.hf.meta_model import transformers_meta_model
from octavo.hf.source import Source
from octavo.inference.packed_experts import PackedGroupedLinear
from octavo.inference.packed_linear import PackedLinear, Stacked
from octavo.nn.module_tools import check_module, class_name, parts_of_layer, plain_name
from octavo.nn.parallel_weights import largest_magnitudes
from octavo.numerics import TENSOR, Cast, QTensor
from octavo.ops import quantize, quantize_scaled, quantize_stack
from octavo.ops.quantization import quantize_matrices
from octavo.ops.rows import word_sums
from octavo.packing.options import PackOptions, choose_layers
from octavo.packing.packer import PackJob
from octavo.recipe import Recipe, similar_preset

# ---- The tensors of a model, by the names that they have in the model that nothing wraps.


class Place(NamedTuple):
    """A tensor in a module, and the module of PEFT that wraps the layer with adapters."""

    module: Any
    tensor: Tensor
    adapters: Any = None


def places(model: nn.Module) -> dict[str, Place]:
    """Parameters and persistent buffers by their plain names; a tensor with several names has all of them."""
    found, wrappers, unused = dict[str, Place](), dict[str, Any](), tuple[str, ...]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if "base_layer" in module._modules:
            wrappers[f"{prefix}.base_layer"] = module
        if "original_module" in module._modules:
            unused += tuple(f"{prefix}.{name}." for name in _unused(module))
        lasting = {leaf: t for leaf, t in module._buffers.items() if leaf not in module._non_persistent_buffers_set}
        for leaf, tensor in {**module._parameters, **lasting}.items():
            name = f"{prefix}.{leaf}".lstrip(".")
            if tensor is not None and not name.startswith(unused):
                found[plain_name(name)] = Place(module, tensor, wrappers.get(prefix) if leaf == "weight" else None)
    return found


def _unused(wrapper: Any) -> list[str]:
    """The modules in a wrapper of PEFT that it does not call: the original one, or copies of it for adapters."""
    copies = getattr(wrapper, "modules_to_save", {})
    active = [] if wrapper.disable_adapters else [name for name in wrapper.active_adapters if name in copies]
    used = f"modules_to_save.{active[0]}" if active else "original_module"
    return [name for name in ("original_module", *(f"modules_to_save.{each}" for each in copies)) if name != used]


def reshard(model: nn.Module) -> nn.Module:
    """Let the units of FSDP2 hold their parameters again, in place of gathered weights."""
    units: list[Any] = [module for module in model.modules() if hasattr(type(module), "reshard")]
    for unit in units:
        unit.reshard()
    return model


def whole(place: Place, *, merged: bool) -> Tensor:
    """The tensor, gathered from the ranks that shard it; `merged` adds its adapters, as PEFT does."""
    tensor = place.tensor
    for name in adapters_of(place.adapters) if merged else ():
        tensor = (tensor + place.adapters.get_delta_weight(name)).to(tensor.dtype)
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor; every rank calls it
    return (tensor if gather is None else gather()).detach()


def adapters_of(wrapper: Any) -> list[str]:
    """The adapters of a layer that PEFT wraps that are added to its output, and are not in its weight yet."""
    return [] if wrapper is None or wrapper.disable_adapters or wrapper.merged else list(wrapper.active_adapters)


def not_finite(sources: Mapping[str, Place]) -> list[str]:
    """The parameters that hold inf or NaN, on this rank or another one that shards them."""
    parameters = {name: p.tensor for name, p in sources.items() if isinstance(p.tensor, nn.Parameter)}
    trained = {name: p for name, p in parameters.items() if p.is_floating_point()}
    largest = largest_magnitudes([*trained.values()]).tolist()
    return [name for name, number in zip(trained, largest, strict=True) if not math.isfinite(number)]


def transformers_model(model: nn.Module, function: str) -> Any:
    """The model of transformers in its wrappers; a TypeError, which names the public `function`, if there is none."""
    check_module(model, function)
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise TypeError(f"{function} takes a model of transformers, got a {type(model).__name__}: open its folder so")
    return found


# ---- A push.


@dataclass(frozen=True)
class Pushed:
    """The result of `push`.

    Attributes:
        seconds: of the wall clock, until the device has written all.
        bytes: written into the served model.
        checksum: of the tensors that the engine multiplies (`octavo.rl.checksum`).
        remarks: what a push does not bring up to date.
    """

    seconds: float
    bytes: int
    checksum: str
    remarks: tuple[str, ...] = ()


@torch.no_grad()
def push(trained: nn.Module, served: nn.Module) -> Pushed:
    """Write the weights of a model that is trained into a live model, as bytes and scales, in place.

    A converted layer gives the bytes and scales that its next forward pass multiplies. A layer in BF16 is quantized by
    the scheme of the served layer, as `octavo pack` does. All else, norms and embeddings among it, is cast to the dtype
    that it has there. No buffer moves: CUDA graphs stay valid. A generation in another thread is waited for.

    Adapters of PEFT (LoRA) are merged into the weights that are written, and `trained` stays as it is. If `served` has
    the same adapters, they are written by themselves. Every rank calls `push` of a model that FSDP2 shards: one layer
    at a time is gathered.

    Args:
        trained: converted by `octavo.convert` or not, with the names of transformers' model.
        served: of `octavo.load`.

    Returns:
        Seconds, bytes and a checksum. `octavo.rl.checksum` of a freshly packed and loaded folder is the same.

    Raises:
        TypeError: one of them is no module.
        ValueError: they do not fit: other tensors or shapes, a scheme that does not hold the scales of the recipe, or
            weights that packing changed; or a trained parameter holds inf or NaN. Nothing is written then.
        RuntimeError: this thread generates from `served`.

    Example:
        >>> served = octavo.load("packed/first", "cuda")
        >>> octavo.rl.push(model, served).checksum
    """
    for model in (trained, served):
        check_module(model, "push")
    began = time.perf_counter()
    engine = getattr(served, "octavo_engine", None)
    with nullcontext() if engine is None else engine.alone():
        job = _Push(reshard(trained), served)
        written, found = job.write(), _checksum(job.held)  # which waits for the device
    return Pushed(time.perf_counter() - began, written, found, job.remarks)


class _Push:
    """What a push writes, all of it checked when this is made: a ValueError says what does not fit, and what to do."""

    def __init__(self, trained: nn.Module, served: nn.Module) -> None:
        self.stacked = list(stacks(served))
        self.sources, self.held = places(trained), places(served)
        self.merges = all(place.adapters is None for place in self.held.values())
        self.pow2, self.remarks = _read_record(getattr(served, "octavo_record", {}))
        static = any(getattr(getattr(place.module, "scheme", None), "static", False) for place in self.held.values())
        self.remarks += (f"the scales of inputs {_CALIBRATED}",) * static
        self.of: dict[int, str] = {}  # the trained tensor of each served one
        for name, place in self.held.items():
            if is_scale(name, place):
                continue
            trained_name = name.removesuffix(".weight") if isinstance(place.module, PackedGroupedLinear) else name
            if reason := _misfit(trained_name, self.sources, place, self._cast(name, place.module)):
                raise ValueError(f"push: {reason}")
            first = self.of.setdefault(id(place.tensor), trained_name)
            if self.sources[first].tensor is not self.sources[trained_name].tensor:
                raise ValueError(
                    f"push: {first} and {name} are one tensor in the served model, and two in the trained one: tie "
                    "them (tie_word_embeddings), or pack the model as it is trained now"
                )
        used = {id(self.sources[name].tensor) for name in self.of.values()}
        for name, place in self.sources.items():
            merged = self.merges and ".lora_" in name
            if isinstance(place.tensor, nn.Parameter) and id(place.tensor) not in used and not merged:
                raise ValueError(f"push: the served model has no {name}: {_OTHER}")
        if diverged := not_finite(self.sources):
            raise ValueError(f"push: {diverged[0]} holds inf or NaN: the model diverged, take an earlier checkpoint")

    def write(self) -> int:
        """Write all, layers that run as one GEMM together; returns the bytes."""
        left = dict(self.of)
        for stack, layers in self.stacked:
            names = [left.pop(id(layer.weight)) for layer in layers]
            cast = self._cast(names[0], layers[0])
            _copy(quantize_stack([self._get(name) for name in names], cast), stack.weight.data, stack.weight.scale)
        for modules in self._sharing():
            names = [left.pop(id(module.weight)) for module in modules]
            weights, cast = [self._get(name) for name in names], self._cast(names[0], modules[0])
            largest = torch.stack([quantize(w, cast).scale for w in weights]).amax(0)
            for layer, w in zip(modules, weights, strict=True):
                _copy(quantize_scaled(w, largest, cast)[0], layer.weight, layer.weight_scale)
        for place in self.held.values():
            module = place.module
            if (name := left.pop(id(place.tensor), None)) is None:
                continue
            w, in_bf16 = self._get(name), recipe_of(self.sources[name]) is None
            if isinstance(module, PackedGroupedLinear):
                # `octavo pack` quantizes gate and up each by itself; training takes both as one matrix.
                count = len(w) * (1 + (in_bf16 and name.endswith("gate_up_proj")))
                q = quantize_matrices(w.reshape(count, -1, w.shape[2]), self._cast(name, module))
                _copy(q, module.weight, module.weight_scale)
            elif isinstance(module, PackedLinear) and place.tensor is module.weight:
                rounds = in_bf16 and name.endswith("lm_head.weight")  # as a packed folder does before the head is cast
                q = quantize(w.to(UNQUANTIZED_DTYPE) if rounds else w, self._cast(name, module))
                _copy(q, module.weight, module.weight_scale)
            else:
                place.tensor.copy_(w)
        return sum({id(place.tensor): place.tensor.nbytes for place in self.held.values()}.values())

    def _cast(self, name: str, module: Any) -> Any:
        """The cast of a packed weight, or None. A head is cast where the folder is loaded, without its options."""
        cast: Any = getattr(getattr(module, "scheme", None), "weight", None)
        rounds = self.pow2 and cast is not None and not cast.power_of_two and not name.endswith("lm_head.weight")
        return replace(cast, scale="pow2") if rounds else cast

    def _sharing(self) -> Iterator[list[PackedLinear]]:
        """Layers in BF16 whose packed weights have one scale, the largest, as `octavo pack` gives it by default."""
        found = {name: place.module for name, place in self.held.items() if name.endswith(".weight")}
        wholes = {name.removesuffix(".weight"): module for name, module in found.items()
                  if isinstance(module, PackedLinear) and module.scheme.weight.granularity == TENSOR
                  and recipe_of(self.sources[name]) is None}  # fmt: skip
        for names in groups(wholes):
            modules = [wholes[name] for name in names]
            scales = torch.cat([module.weight_scale for module in modules])
            if len(names) > 1 and bool((scales == scales[0]).all()):
                yield modules

    def _get(self, name: str) -> Tensor:
        return whole(self.sources[name], merged=self.merges)


def _copy(q: QTensor, data: Tensor, scale: Tensor) -> None:
    data.view(torch.uint8).copy_(q.data.view(torch.uint8).view(data.shape))
    scale.copy_(q.scale.view(scale.dtype).view(scale.shape))  # E8M0 is stored as uint8


def is_scale(name: str, place: Place) -> bool:
    """True if a tensor is a scale of a packed weight."""
    return isinstance(place.module, PackedLinear | PackedGroupedLinear) and name.endswith("_scale")


# ---- The tensors of a packed folder, for the engines of others.


class _Gathering(ShardReader):
    """The tensors of a model that is trained, as if they were in files."""

    def __init__(self, sources: dict[str, Place]) -> None:
        self.folder, self._sources = Path("(the model in training)"), sources
        self.specs = {name: torch.empty_like(place.tensor, device="meta") for name, place in sources.items()}

    def get(self, name: str) -> Tensor:
        return whole(self._sources[name], merged=True)


@torch.no_grad()
def served_weights(trained: nn.Module, **options: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the folder that `octavo pack` would write of a model in training, in the same order.

    They have the layout of compressed-tensors. vLLM's `reload_weights` and SGLang's `update_weights_from_tensor` take
    them, in an engine that opened a packed folder of this model. The tensors of one layer follow each other. Adapters
    are merged, and of a model that FSDP2 shards every rank takes all of them.

    Args:
        trained: of transformers, converted or not.
        options: fields of `octavo.packing.PackOptions`. By default converted layers have the scheme of their recipe.

    Raises:
        ValueError: several recipes, adapters that are no plain LoRA, or what `octavo.packing.pack` raises.

    Example:
        >>> llm.collective_rpc("reload_weights", kwargs={"weights_iterator": octavo.rl.served_weights(model)})
    """
    model = transformers_model(trained, "served_weights")
    sources, where = places(reshard(trained)), Path(model.config.name_or_path)
    for name, place in sources.items():
        if reason := _misfit_of_adapters(name, place.adapters):
            raise ValueError(f"served_weights: {reason}")
    config = json.loads(model.config.to_json_string()) | {"architectures": [class_name(model)]}
    meta_model = transformers_meta_model(config, where)
    recipes = {name.removesuffix(".weight"): recipe_of(place) for name, place in sources.items()}
    presets = {similar_preset(recipe) for recipe in recipes.values() if recipe is not None}
    if len(presets) > 1:
        raise ValueError(f"served_weights takes a model of one recipe, got {', '.join(sorted(presets))}: convert it so")
    linears = [name for name, module in meta_model.model.named_modules() if isinstance(module, nn.Linear)]
    skip = [name for name in linears if recipes.get(name) is None] if presets else []
    experts = any(recipes.get(name) is not None for name in meta_model.experts.stacks)
    source = Source(where, where, meta_model, next(iter(presets), ""), skip, _Gathering(sources))
    chosen = PackOptions(**{"experts": experts} | options)
    job = PackJob(source, choose_layers(source, chosen), chosen)
    for name in source.specs:
        yield from job.change(name, source.get(name)).items()


# ---- What does not fit, and what to do.

_OTHER = "load the folder of the model that is trained, and give models of one class of transformers"


def recipe_of(place: Place) -> Recipe | None:
    """The recipe by which a weight is multiplied in training; None in BF16."""
    recipe: Recipe | None = getattr(place.module, "recipe", None) if place.tensor.ndim > 1 else None
    return None if recipe is None or recipe.y is None else recipe


def _misfit(name: str, sources: Mapping[str, Place], held: Place, cast: Cast | None) -> str:
    """Why the trained tensor cannot be written to a place of the served model, and what to do; or "". `cast` is that of
    a packed weight."""
    if (source := sources.get(name)) is None:
        return f"the trained model has no {name}: {_OTHER}"
    mine, theirs = list(source.tensor.shape), list(held.tensor.shape)
    if mine != theirs:
        return f"{name} is {mine} in the trained model, and {theirs} in the served one: {_OTHER}"
    if source.tensor.is_meta or (cast is not None and source.tensor.dtype == torch.float64):
        return f"{name} is {source.tensor.dtype} on {source.tensor.device}: load it in float32, bfloat16 or float16"
    wrapper, packed = source.adapters, held.module
    if reason := _misfit_of_adapters(name, wrapper):
        return reason
    if held.adapters is not None and getattr(wrapper, "scaling", None) != held.adapters.scaling:
        return f"{name} has adapters of another scaling in the served model: make both of one LoraConfig"
    recipe = recipe_of(source)
    if not isinstance(packed, PackedLinear | PackedGroupedLinear) or name.endswith(".bias"):
        if recipe is not None:
            how = "pack it (experts: --experts)" if source.tensor.ndim == 3 else "pack it"
            return f"{name} is trained by {recipe.name} and served in BF16: {how}, or leave it out of octavo.convert"
        return ""
    scheme = packed.scheme
    if recipe is not None and recipe.repeatable_w != cast:
        fitting = SCHEME_OF.get(similar_preset(recipe), "channel")
        advice = f"pack the folder by {fitting}"
        if recipe.repeatable_w == scheme.weight:
            advice = "pack the folder without --pow2"
        elif fitting in ("static", scheme.name):
            advice = f"train by {'tensorwise' if scheme.weight.granularity == TENSOR else 'rowwise'}"
        return f"{name} is trained by {recipe.name}, whose scales the scheme {scheme.name} does not hold: {advice}"
    if isinstance(packed, PackedGroupedLinear) and not scheme.weight.by_row:
        return f"{name} holds experts by {scheme.name}: pack them by channel (--layer '*.experts.*=channel')"
    return ""


def _misfit_of_adapters(name: str, wrapper: Any) -> str:
    """Why the adapters around a weight cannot be added to it, and what to do; or ""."""
    special = [*getattr(wrapper, "lora_variant", ()), *getattr(wrapper, "lora_embedding_A", ())]
    if wrapper is None or (hasattr(wrapper, "lora_A") and {*adapters_of(wrapper)}.isdisjoint(special)):
        return ""
    return f"{name} has adapters that are no plain LoRA: merge them (merge_and_unload) first"


_CALIBRATED = "are those of the calibration, of other weights: calibrate again where they change much"
# What packing may have done to weights that a push cannot repeat, and why.
_UNREADABLE = {
    "smooth": "the folder has the range of its factors, and not the factors",
    "rotate": "the folder does not say to which dtype the turned weights were rounded",
    "weights=mse": "it searches the scales of all weights, which takes longer than a push",
}


def _read_record(record: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """True if scales were rounded to powers of two, and what a push does not bring up to date, by octavo.json of the
    folder. A ValueError if packing changed the weights."""
    scales, folded = record.get("weight_scales") or {}, record.get("folded") or {}
    done = {**folded, "weights=mse": scales.get("rule") == "mse"}
    for what, reason in _UNREADABLE.items():
        if done.get(what):
            raise ValueError(f"push: the served folder was packed with {what}, and {reason}: pack it without")
    caches = (record.get("calibration") or {}).get("kv_cache")
    return bool(scales.get("pow2")), (f"the scales of keys and values {_CALIBRATED}",) if caches else ()


# ---- What the engine multiplies.


def stacks(model: nn.Module) -> Iterator[tuple[Stacked, list[PackedLinear]]]:
    """The stacks of packed layers that run as one GEMM, made anew where a buffer was replaced, as a call would do.

    The buffers of the layers are views of a stack. A ValueError if one has memory of its own, which is not multiplied.
    """
    for name, module in model.named_modules():
        stacked: Any = getattr(module, "stacked", None)
        inner: Any = getattr(module, "inner", ())
        if not isinstance(stacked, Stacked) or stacked.update(inner) is None:
            continue
        layers: list[Any] = [found[0] for found in map(parts_of_layer, inner) if found is not None]
        whole = {"weight": stacked.weight.data, "weight_scale": stacked.weight.scale, "bias": stacked.bias}
        for leaf, stack in whole.items():
            rows = [] if stack is None else torch.split(stack, list(stacked.sizes))
            own = [getattr(layer, leaf) for layer in layers]
            if any(a is not None and a.data_ptr() != b.data_ptr() for a, b in zip(own, rows, strict=False)):
                raise ValueError(
                    f"the engine multiplies a copy of {leaf} in {name}, with memory of its own: load the folder again"
                )
        yield stacked, layers


@torch.no_grad()
def checksum(served: nn.Module) -> str:
    """A checksum of the tensors that the engine of `octavo.load` multiplies.

    It depends on names, dtypes, shapes and bytes. Any byte that changes alone changes it: its word is multiplied by an
    odd number, another one at each position, and added up modulo 2^64. A ValueError if the engine multiplies a copy of
    a weight.

    Example:
        >>> octavo.rl.checksum(octavo.load("packed/first"))
    """
    list(stacks(served))
    return _checksum(places(served))


def _checksum(held: Mapping[str, Place]) -> str:
    """The checksum of tensors. A tensor with several names counts once, by the first."""
    named = dict[int, tuple[str, Tensor]]()
    for name, place in held.items():
        named.setdefault(id(place.tensor), (name, place.tensor))
    tensors = dict(named.values())
    described = "".join(f"{name} {t.dtype} {list(t.shape)} " for name, t in tensors.items())
    sums = word_sums(list(tensors.values())).tolist()  # one wait for the device
    return hashlib.blake2b(f"{described}{sums}".encode(), digest_size=8).hexdigest()
