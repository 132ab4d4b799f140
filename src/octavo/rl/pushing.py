"""Pushing a model that is trained into a live model that generates: the bytes that the next step multiplies, in place.

    trained   w[N,K]  ->  w_q[N,K], s_w[N,1] = quantize(w)      by the cast of the layer's recipe
    served    weight <- w_q,  weight_scale <- s_w               into the memory that is there

Row scales do not depend on the batch, so training and the engine multiply the same bytes. A captured CUDA graph reads
the memory that was written, and so do layers that run as one GEMM: their weights are views of one stack. All that a
push needs is checked before a byte is changed. It holds the weights of one layer beside both models.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.checkpoint.files import ShardReader
from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE
from octavo.checkpoint.scheme import SCHEME_OF, Scheme
from octavo.hf.meta_model import transformers_meta_model
from octavo.hf.source import Source
from octavo.inference.packed_experts import PackedGroupedLinear
from octavo.inference.packed_linear import PackedLinear, Stacked
from octavo.models.decoder import Decoder
from octavo.nn.module_tools import check_module, class_name, parts_of_layer
from octavo.numerics import TENSOR
from octavo.ops import quantize, quantize_stack
from octavo.ops.quantization import quantize_matrices
from octavo.packing.options import PackOptions, choose_layers
from octavo.packing.packer import PackJob
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
    began = time.perf_counter()
    reshard(trained)
    with idle(served):
        plan = Plan(trained, served)
        for write in plan.writes:
            write.run(plan)
        found = checksum(served)  # it waits for the device
    written = sum(write.data.nbytes + (0 if write.scale is None else write.scale.nbytes) for write in plan.writes)
    return Pushed(time.perf_counter() - began, written, found, plan.remarks)


def reshard(trained: nn.Module) -> None:
    """Let the units of FSDP2 hold their parameters, which their gathered weights replace."""
    units: list[Any] = [module for module in trained.modules() if hasattr(module, "reshard")]
    for unit in units:
        unit.reshard()


def idle(served: Any) -> AbstractContextManager[Any]:
    """Wait until no other thread generates from the model, and let none begin."""
    engine = getattr(served, "octavo_engine", None)
    return nullcontext() if engine is None else engine.alone()


class Plan:
    """What a push writes. A ValueError if something does not fit, with what to do."""

    def __init__(self, trained: nn.Module, served: nn.Module) -> None:
        stacked = list(stacks(served))
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
        self.writes = list(self._writes(stacked, held, of))

    def _writes(
        self, stacked: list[tuple[Stacked, list[PackedLinear]]], held: dict[str, Place], of: dict[int, str]
    ) -> Iterator["Write"]:
        for stack, layers in stacked:
            names = [of.pop(id(layer.weight)) for layer in layers]
            yield Write(names, stack.weight.data, stack.weight.scale, layers[0].scheme)
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

    They have the layout of compressed-tensors: vLLM's `load_weights` and SGLang's `update_weights_from_tensor` take
    them, in an engine that opened a packed folder of this model. The tensors of one layer follow each other. Adapters
    are merged, and of a model that FSDP2 shards every rank takes all of them.

    Args:
        trained: of transformers or `octavo.models`, converted or not.
        options: fields of `octavo.packing.PackOptions`. By default converted layers have the scheme of their recipe.

    Raises:
        ValueError: several recipes, or what `octavo.packing.pack` raises.

    Example:
        >>> llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(served_weights(model))
    """
    model: Any = next((m for m in trained.modules() if isinstance(m, PreTrainedModel | Decoder)), None)
    if model is None:
        raise TypeError(
            f"served_weights takes a model of transformers or octavo.models, got a {type(trained).__name__}"
        )
    reshard(trained)
    sources, where = places(trained), Path(getattr(model.config, "name_or_path", ""))
    ours = isinstance(model, Decoder)
    config = model.config.to_hf() if ours else json.loads(model.config.to_json_string())
    named = {} if ours else {"architectures": [class_name(model)]}
    meta_model = transformers_meta_model(config | named, where)
    recipes = {name.removesuffix(".weight"): recipe_of(place) for name, place in sources.items()}
    presets = {similar_preset(recipe) for recipe in recipes.values() if recipe is not None}
    if len(presets) > 1:
        raise ValueError(f"served_weights takes a model of one recipe, got {', '.join(sorted(presets))}: convert it so")
    linears = meta_model.linears() if presets else []
    skip = [name for name in linears if recipes.get(name) is None]
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


_WORDS = 2**23  # of 8 bytes, that are added up at a time


@torch.no_grad()
def checksum(served: nn.Module) -> str:
    """A checksum of the tensors that the engine of `octavo.load` multiplies.

    It depends on names, dtypes, shapes and bytes. Any byte that changes alone changes it: its word is multiplied by an
    odd number and added up modulo 2^64. A ValueError if the engine multiplies a copy of a weight.

    Example:
        >>> octavo.rl.checksum(octavo.load("packed/first"))
    """
    digest, seen, waiting, sums = hashlib.blake2b(digest_size=8), set[int](), list[Tensor](), list[Tensor]()
    list(stacks(served))
    for name, place in places(served).items():
        if id(place.tensor) in seen:
            continue
        seen.add(id(place.tensor))
        digest.update(f"{name} {place.tensor.dtype} {list(place.tensor.shape)} ".encode())
        for part in torch.split(_words(place.tensor), _WORDS):
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
