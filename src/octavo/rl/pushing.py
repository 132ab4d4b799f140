"""Pushing a model that is trained into a live model that generates: the bytes that the next step multiplies, in place.

    trained   w[N,K]  ->  w_q[N,K], s_w[N,1] = quantize(w)      by the cast of the layer's recipe
    served    weight <- w_q,  weight_scale <- s_w               into the memory that is there

Row scales do not depend on the batch, so training and the engine multiply the same bytes. A captured CUDA graph reads
the memory that was written, and so do layers that run as one GEMM: their weights are views of one stack. All that a
push needs is checked before a byte is changed. It holds the weights of one layer beside both models.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE
from octavo.checkpoint.scheme import SCHEME_OF, Scheme
from octavo.inference.packed_experts import PackedGroupedLinear
from octavo.inference.packed_linear import PackedLinear, Stacked
from octavo.nn.module_tools import check_module, parts_of_layer
from octavo.numerics import TENSOR
from octavo.ops import quantize, quantize_stack
from octavo.ops.quantization import quantize_matrices
from octavo.recipe import Recipe, similar_preset

# ---- The tensors of a model, by the names that they have in the model that nothing wraps.

# What DDP, PEFT, torch.compile, checkpointing and FSDP add to names.
_WRAPPED = re.compile(
    r"^base_model\.model\.|^module\.|(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer)\."
    r"|modules_to_save\.[^.]+\."
)


class Place(NamedTuple):
    """A tensor in a module, and the module of PEFT that wraps the layer with adapters."""

    module: nn.Module
    tensor: Tensor
    adapters: Any = None


def places(model: nn.Module) -> dict[str, Place]:
    """Parameters and persistent buffers by their plain names; a tensor with several names has all of them."""
    found, wrappers = dict[str, Place](), dict[str, Any]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "base_layer"):
            wrappers[f"{prefix}.base_layer"] = module
        lasting = {leaf: t for leaf, t in module._buffers.items() if leaf not in module._non_persistent_buffers_set}
        for leaf, tensor in {**module._parameters, **lasting}.items():
            name = f"{prefix}.{leaf}".lstrip(".")
            if tensor is not None and ".original_module." not in name:
                found[_WRAPPED.sub("", name)] = Place(
                    module, tensor, wrappers.get(prefix) if leaf == "weight" else None
                )
    return found


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
    the same adapters, they are written by themselves. Of a model that FSDP2 shards, every rank calls `push`: one layer
    at a time is gathered.

    Args:
        trained: converted by `octavo.convert` or not, with the names of transformers' model.
        served: of `octavo.load`.

    Returns:
        Seconds, bytes and a checksum. `octavo.rl.checksum` of a freshly packed and loaded folder is the same.

    Raises:
        TypeError: one of them is no module.
        ValueError: they do not fit: other tensors or shapes, a scheme that does not hold the scales of the recipe, or
            weights that packing changed. Nothing is written then.
        RuntimeError: this thread generates from `served`.

    Example:
        >>> served = octavo.load("packed/first", "cuda")
        >>> octavo.rl.push(model, served).checksum
    """
    for model in (trained, served):
        check_module(model, "push")
    began, units = time.perf_counter(), list[Any](trained.modules())
    for unit in units:
        if hasattr(unit, "reshard"):  # of FSDP2: while its weights are gathered, they are not the parameters
            unit.reshard()
    with idle(served):
        plan = Plan(trained, served)
        for write in plan.writes:
            write.run(plan)
        found = checksum(served)  # it waits for the device
    written = sum(write.data.nbytes + (0 if write.scale is None else write.scale.nbytes) for write in plan.writes)
    return Pushed(time.perf_counter() - began, written, found, plan.remarks)


def idle(served: Any) -> AbstractContextManager[Any]:
    """Wait until no other thread generates from the model, and let none begin."""
    engine = getattr(served, "octavo_engine", None)
    return nullcontext() if engine is None else engine.alone()


class Plan:
    """What a push writes. A ValueError if something does not fit, with what to do."""

    def __init__(self, trained: nn.Module, served: nn.Module) -> None:
        _check_copies(served)
        self.sources, held = places(trained), places(served)
        self.merges = all(place.adapters is None for place in held.values())
        self.remarks = _read_record(getattr(served, "octavo_record", {}))
        of: dict[int, str] = {}  # the trained tensor of each served one
        for name, place in held.items():
            if isinstance(place.module, PackedLinear | PackedGroupedLinear) and name.endswith("_scale"):
                continue
            name = name.removesuffix(".weight") if isinstance(place.module, PackedGroupedLinear) else name
            source, first = self.sources.get(name), of.setdefault(id(place.tensor), name)
            if reason := _misfit(name, source, place, merges=self.merges):
                raise ValueError(f"push: {reason}")
            if source is None or self.sources[first].tensor is not source.tensor:
                raise ValueError(
                    f"push: {first} and {name} are one tensor in the served model, and two in the trained one: tie "
                    "them (tie_word_embeddings), or pack the model as it is trained now"
                )
        written = {id(self.sources[name].tensor) for name in of.values()}
        for name, place in self.sources.items():
            merged = self.merges and ".lora_" in name
            if isinstance(place.tensor, nn.Parameter) and id(place.tensor) not in written and not merged:
                raise ValueError(f"push: the served model has no {name}: {_OTHER}")
        self.writes = list(self._writes(served, held, of))

    def _writes(self, served: nn.Module, held: dict[str, Place], of: dict[int, str]) -> Iterator["Write"]:
        for stacked, layers in stacks(served):
            names = [of.pop(id(layer.weight)) for layer in layers]
            yield Write(names, stacked.weight.data, stacked.weight.scale, layers[0].scheme)
        for place in held.values():
            module: Any = place.module
            if (name := of.pop(id(place.tensor), None)) is None:
                continue
            if isinstance(module, PackedGroupedLinear):
                # `octavo pack` quantizes gate and up each by itself, training both as one matrix.
                apart = name.endswith("gate_up_proj") and recipe_of(self.sources[name]) is None
                yield Write([name], module.weight, module.weight_scale, module.scheme, len(module.weight) * (1 + apart))
            elif isinstance(module, PackedLinear) and place.tensor is module.weight:
                rounds = name.endswith("lm_head.weight") and recipe_of(self.sources[name]) is None
                yield Write([name], module.weight, module.weight_scale, module.scheme, rounds=rounds)
            else:
                yield Write([name], place.tensor)


@dataclass
class Write:
    """One write into the served model: of a tensor as it is, or of weights that are quantized and stacked along N."""

    names: list[str]  # of the trained tensors
    data: Tensor  # of the served model
    scale: Tensor | None = None
    scheme: Scheme | None = None
    matrices: int = 0  # of the weight of a layer of experts, quantized one by one
    rounds: bool = False  # to BF16 first, as the head of a packed folder

    def run(self, plan: Plan) -> None:
        tensors = [whole(plan.sources[name], merged=plan.merges) for name in self.names]
        tensors = [t.to(UNQUANTIZED_DTYPE) for t in tensors] if self.rounds else tensors
        if self.scheme is None or self.scale is None:
            self.data.copy_(tensors[0])
            return
        cast = self.scheme.weight
        if self.matrices:
            q = quantize_matrices(tensors[0].reshape(self.matrices, -1, tensors[0].shape[-1]), cast)
        else:
            q = quantize(tensors[0], cast) if len(tensors) == 1 else quantize_stack(tensors, cast)
        self.data.view(torch.uint8).copy_(q.data.view(torch.uint8).view(self.data.shape))
        self.scale.copy_(self.scheme.stored_scale(q).view(self.scale.shape))


# ---- What does not fit, and what to do.

_OTHER = "load the folder of the model that is trained, and give models of one class of transformers"


def recipe_of(place: Place) -> Recipe | None:
    """The recipe by which a weight is multiplied in training; None in BF16."""
    recipe: Recipe | None = getattr(place.module, "recipe", None) if place.tensor.ndim > 1 else None
    return None if recipe is None or recipe.y is None else recipe


def _misfit(name: str, source: Place | None, held: Place, *, merges: bool) -> str:
    """Why the trained tensor cannot be written to a place of the served model, and what to do; or ""."""
    if source is None:
        return f"the trained model has no {name}: {_OTHER}"
    mine, theirs = list(source.tensor.shape), list(held.tensor.shape)
    if mine != theirs:
        return f"{name} is {mine} in the trained model, and {theirs} in the served one: {_OTHER}"
    wrapper, packed = source.adapters, held.module
    special = [*getattr(wrapper, "lora_variant", ()), *getattr(wrapper, "lora_embedding_A", ())]
    if wrapper is not None and (not hasattr(wrapper, "lora_A") or not {*adapters_of(wrapper)}.isdisjoint(special)):
        return f"{name} has adapters that are no plain LoRA: merge them (merge_and_unload) before the push"
    if held.adapters is not None and getattr(wrapper, "scaling", None) != held.adapters.scaling:
        return f"{name} has adapters of another scaling in the served model: make both of one LoraConfig"
    recipe = recipe_of(source)
    if not isinstance(packed, PackedLinear | PackedGroupedLinear) or name.endswith(".bias"):
        if recipe is not None:
            return f"{name} is trained by {recipe.name} and served in BF16: pack it, or leave it out of octavo.convert"
        return ""
    scheme = packed.scheme
    if scheme.static:
        return f"{name} is served by static, with scales of inputs that other weights had: pack the folder by channel"
    if recipe is not None and recipe.repeatable_w != scheme.weight:
        fitting = SCHEME_OF.get(similar_preset(recipe), "channel")
        advice = "train by rowwise" if fitting in ("static", scheme.name) else f"pack the folder by {fitting}"
        return f"{name} is trained by {recipe.name}, whose scales the scheme {scheme.name} does not hold: {advice}"
    if recipe is None and scheme.weight.granularity == TENSOR:
        return f"{name} is served by {scheme.name}, one scale for layers that are fused: pack the folder by channel"
    if isinstance(packed, PackedGroupedLinear) and not scheme.weight.by_row:
        return f"{name} holds experts by {scheme.name}: pack them by channel (--layer '*.experts.*=channel')"
    return ""


def _read_record(record: dict[str, Any]) -> tuple[str, ...]:
    """What a push does not bring up to date, by octavo.json of the folder. A ValueError if packing changed weights."""
    scales = record.get("weight_scales") or {}
    changed = [what for what in ("smooth", "rotate") if (record.get("folded") or {}).get(what)]
    changed += ["weights=mse"] * (scales.get("rule") == "mse") + ["pow2"] * bool(scales.get("pow2"))
    if changed:
        raise ValueError(
            f"push: the served folder was packed with {' and '.join(changed)}, which the weights in training do not "
            "have: pack it without"
        )
    caches = (record.get("calibration") or {}).get("kv_cache")
    return ("the scales of keys and values are those of the calibration, of other weights",) if caches else ()


# ---- What the engine multiplies.
#
# Fused layers read a stack, of which their own buffers are views, and a layer keeps what it made of its buffers. Where
# such a copy has memory of its own, a push would leave it as it was.


def stacks(model: nn.Module) -> Iterator[tuple[Stacked, list[PackedLinear]]]:
    """The stacks of packed layers that run as one GEMM, made anew where a buffer was replaced, as a call would do."""
    for module in model.modules():
        stacked: Any = getattr(module, "stacked", None)
        inner: Any = getattr(module, "inner", ())
        if isinstance(stacked, Stacked) and stacked.update(inner) is not None:
            parts: list[Any] = [parts_of_layer(each) for each in inner]
            yield stacked, [layer for layer, _ in parts]


def copies(model: nn.Module) -> dict[int, Tensor]:
    """The tensors that the engine reads in place of buffers of packed layers, by the ids of these."""
    found: dict[int, Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer._known is not None:
            data, scale, made = layer._known
            found |= {id(data): made.data, id(scale): made.scale}
    for stacked, layers in stacks(model):
        ends = torch.tensor(stacked.sizes).cumsum(0).tolist()
        for layer, end in zip(layers, ends, strict=True):
            rows = slice(end - layer.out_features, end)
            found |= {id(layer.weight): stacked.weight.data[rows], id(layer.weight_scale): stacked.weight.scale[rows]}
            if layer.bias is not None and stacked.bias is not None:
                found[id(layer.bias)] = stacked.bias[rows]
    return found


def _check_copies(served: nn.Module) -> None:
    read = copies(served)
    for name, place in places(served).items():
        copy = read.get(id(place.tensor))
        if copy is not None and copy.data_ptr() != place.tensor.data_ptr():
            raise ValueError(
                f"push: the engine multiplies a copy of {name} with memory of its own, which a push would not reach: "
                "load the folder again"
            )


_WORDS = 2**23  # of 8 bytes, that are added up at a time


@torch.no_grad()
def checksum(served: nn.Module) -> str:
    """A checksum of the tensors that the engine of `octavo.load` multiplies, copies of weights among them.

    It depends on names, dtypes, shapes and bytes. Any byte that changes alone changes it: its word is multiplied by an
    odd number and added up modulo 2^64.

    Example:
        >>> octavo.rl.checksum(octavo.load("packed/first"))
    """
    digest, read, seen = hashlib.blake2b(digest_size=8), copies(served), set[int]()
    waiting, sums = list[Tensor](), list[Tensor]()
    for name, place in places(served).items():
        if id(place.tensor) in seen:
            continue
        seen.add(id(place.tensor))
        tensor = read.get(id(place.tensor), place.tensor)
        digest.update(f"{name} {place.tensor.dtype} {list(tensor.shape)} ".encode())
        for part in torch.split(_words(tensor), _WORDS):
            if waiting and (len(part) + sum(map(len, waiting)) > _WORDS or part.device != waiting[0].device):
                sums.append(_sum(waiting))
                waiting = []
            waiting.append(part)
    sums.append(_sum(waiting))
    digest.update(str([int(each) for each in sums]).encode())
    return digest.hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """The memory of a tensor as int64, with zeros at the end."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if len(data) % 8 or data.data_ptr() % 8:
        data = F.pad(data, (0, 8 - len(data) % 8))
    return data.view(torch.int64)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    words = torch.cat(list(parts))
    factors = torch.arange(len(words), device=words.device).mul_(-7046029254386353131)  # of the golden ratio, as usual
    factors = factors.bitwise_xor_(factors >> 31).bitwise_or_(1)
    return (words * factors).sum()
