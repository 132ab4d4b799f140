"""The layers of a model that are watched, where each records its operands, and how its GEMMs run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.attention_layers import MultiheadAttention, input_weights
from octavo.nn.conversion import find_experts, stacks_of
from octavo.nn.fused_modules import FusedModule
from octavo.nn.linear import RecipeLayer
from octavo.nn.module_tools import class_name, is_conv1d, shape_of
from octavo.nn.observer import ExpertObserver, Observer
from octavo.nn.parallel_weights import local_part
from octavo.observation.operand_statistics import BRIEF_WIDTH, EXPONENTS, by_dtype, histogram_statistics, sampled_rows
from octavo.ops.dispatch import gemm_backends, grouped_backends
from octavo.recipe import Recipe
from octavo.watching.records import LAYER_MAXIMA, LAYER_SUMS, operand_records
from octavo.watching.storage import EXPERTS, OPERANDS, RECOMPUTED, Array, GemmRun, WatchedLayer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_GEMM_OF = {"y": "x", "dx": "dy", "dw": "dy", "recomputation": "x"}  # the operand whose record shows that a GEMM ran


@dataclass(frozen=True, eq=False)
class Place:
    """A module that records operands, and the layers whose weights it reads: several where it runs them as one GEMM."""

    name: str
    module: Any
    layers: tuple[int, ...]


class Layers:
    """The linear layers of a model, by number, and the observers of the converted ones.

    `modules` are `nn.Linear`, transformers' `Conv1D`, converted layers (convolutions and attentions too), and stacks of
    experts' matrices. `names` have no prefixes of wrappers. Each converted layer has one of the `places`, and each
    fused module one more. `dtype` is that of GEMMs that are not quantized.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        self._dtype = names.get(dtype, str(dtype))
        found: dict[str, Any] = {
            _plain(name): module
            for name, module in model.named_modules()
            if isinstance(module, RecipeLayer | nn.Linear) or is_conv1d(module)
        }
        for name, module in find_experts(model).items():
            for weight in stacks_of(name, module):
                found[_plain(weight)] = ExpertStack(module, weight.rpartition(".")[2])
        self.names = list(found)
        self.modules: list[Any] = list(found.values())
        numbers = {id(module): i for i, module in enumerate(self.modules)}
        converted = [i for i, module in enumerate(self.modules) if recipe_of(module) is not None]
        self.places = [Place(self.names[i], self.modules[i], (i,)) for i in converted]
        for name, fused in model.named_modules():  # those that may run several layers as one GEMM
            if isinstance(fused, FusedModule) and all(isinstance(linear, RecipeLayer) for linear in fused.inner):
                self.places.append(Place(_plain(name), fused, tuple(numbers[id(linear)] for linear in fused.inner)))

        again = {id(m) for block in model.modules() if _is_recomputed_by_compiler(block) for m in block.modules()}
        owners = [m.module if isinstance(m, ExpertStack) else m for m in self.modules]
        # Of each layer, the operands that were recorded, and "recomputed" where its forward pass ran twice in a step.
        self._seen: list[set[str]] = [{"recomputed"} if id(owner) in again else set() for owner in owners]

    def attach(self, device: torch.device) -> None:
        """Give each place an observer. A ValueError if the model is watched already."""
        if any(place.module.observer is not None for place in self.places):
            raise ValueError("the model is watched already: close the other octavo.watch first")
        for place in self.places:
            if isinstance(place.module, ExpertStack):
                place.module.attach(device)
            else:
                place.module.observer = Observer(len(place.layers), device)

    def detach(self) -> None:
        for place in self.places:
            of_stack = isinstance(place.module, ExpertStack)
            owner, name = (place.module.module, "observers") if of_stack else (place.module, "observer")
            owner.__dict__.pop(name, None)

    @property
    def experts(self) -> list[tuple[int, ExpertObserver]]:
        """The observer of each stack of experts that is recorded, with the number of its layer."""
        stacks = ((place.layers[0], place.module.observer) for place in self.places)
        return [(layer, observer) for layer, observer in stacks if isinstance(observer, ExpertObserver)]

    @property
    def stacks(self) -> list[tuple[int, ExpertStack]]:
        """All stacks of experts' matrices, with the numbers of their layers."""
        return [(i, module) for i, module in enumerate(self.modules) if isinstance(module, ExpertStack)]

    @property
    def stats(self) -> list[Tensor]:
        """The statistics of all places."""
        observers = (place.module.observer for place in self.places)
        return [stats for observer in observers for stats in (observer.forward, observer.backward)]

    def operands(self) -> tuple[Array, Array, Array]:
        """The layer [n] and the operand [n] of each operand of the converted layers, and the places of its statistics.

        These are rows [n, 2] of the concatenated `stats`, of the layer's own place and of the fused module's; -1: none.
        """
        rows: dict[tuple[int, int], list[int]] = {}
        start = 0
        for place in self.places:
            count = len(place.layers)
            for i, layer in enumerate(place.layers):
                for operand, slot in enumerate((0, 1 + i, 1 + count + i)):  # the layers share x
                    rows.setdefault((layer, operand), []).append(start + slot)
            start += 1 + 2 * count
        keys = sorted(rows)
        places = [(*rows[key], -1)[:2] for key in keys]
        shape = (len(keys), 2)
        return (*np.array(keys, int).reshape(shape).T, np.array(places, int).reshape(shape))

    def sizes(self) -> Array:
        """The number of elements of each weight, of which this rank may hold a part."""
        return np.array([weight_of(module).numel() for module in self.modules], float)

    def note(self, operands: Array) -> None:
        """Note what ran: the operands of a full sample. Compiled code does not say whether it ran twice."""
        for record in operands:
            again = {"recomputed"} if record["flags"] & RECOMPUTED else set()
            self._seen[record["layer"]] |= {OPERANDS[record["operand"]], *again}

    def describe(self) -> list[WatchedLayer]:
        """The layers as they run."""
        fused = {layer: place.name for place in self.places if len(place.layers) > 1 for layer in place.layers}
        found = []
        for i, module in enumerate(self.modules):
            recipe, stack = recipe_of(module), module if isinstance(module, ExpertStack) else None
            casts = {operand: getattr(recipe, operand, None) for operand in OPERANDS}
            layer = WatchedLayer(
                self.names[i],
                class_name(module if stack is None else stack.module),
                _shape(module),
                "" if recipe is None else recipe.name,
                {operand: self._dtype if cast is None else cast.format for operand, cast in casts.items()},
                {operand: "" if cast is None else cast.granularity.name for operand, cast in casts.items()},
                dict(_gemms(module, self._dtype, self._seen[i], fused.get(i))),
                0 if stack is None else stack.count,
            )
            found.append(layer)
        return found


def _gemms(module: Any, dtype: str, seen: set[str], fused: str | None) -> Iterator[tuple[str, GemmRun]]:
    """The GEMMs of a layer that ran. For a layer that was not converted no operand is recorded: all are listed."""
    recipe = recipe_of(module)
    if recipe is None:
        yield from dict.fromkeys(("y", "dx", "dw"), GemmRun(dtype, "torch", "the layer was not converted")).items()
        return
    weight = weight_of(module)
    backends = gemm_backends(recipe, weight.device)  # a layer that was moved to BF16 has the recipe bf16
    if isinstance(module, ExpertStack):
        backends = backends | grouped_backends(recipe, weight.device)
    for name, operand in _GEMM_OF.items():
        ran = "recomputed" in seen if name == "recomputation" else operand in seen
        if not ran or (name == "dw" and not weight.requires_grad):
            continue
        backend = backends["y" if name == "recomputation" else name]
        if backend.name == "bf16":
            yield name, GemmRun(dtype, "torch", backend.reason)
            continue
        kernel = "emulated" if backend.name == "none" and recipe.emulate else backend.name
        yield name, GemmRun("fp8", kernel, f"{backend.reason}; in {fused}" if fused else backend.reason)


def recipe_of(module: Any) -> Recipe | None:
    """The recipe of a converted layer, or of a stack of experts in FP8; None for another module."""
    return module.recipe if isinstance(module, RecipeLayer | ExpertStack) else None


def weight_of(module: Any) -> nn.Parameter:
    """The weight of a layer; of an attention with separate input projections, that of the queries."""
    if isinstance(module, MultiheadAttention):
        return next(iter(input_weights(module).values()))
    weight: nn.Parameter = module.weight
    return weight


def _shape(module: Any) -> tuple[int, int]:
    """N outputs and K inputs."""
    if is_conv1d(module):
        return shape_of(module)
    weight = weight_of(module)
    if isinstance(module, ExpertStack):
        return weight.shape[0] * weight.shape[1], weight.shape[2]
    return weight.shape[0], weight.shape[1:].numel()


def gate_and_up(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The gate and up layers of each SwiGLU, by the names of transformers' Llama."""
    pairs = [(getattr(m, "gate_proj", None), getattr(m, "up_proj", None)) for m in model.modules()]
    return [(gate, up) for gate, up in pairs if isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)]


def _is_recomputed_by_compiler(module: Any) -> bool:
    """True if a module is compiled, and checkpointed inside of the compiled code."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled and bool(getattr(module, "activation_checkpointing", False))


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# ---- The experts of a watched model: a stack of their matrices as one layer, and which expert is worst.
#
# load      rows of the fullest expert / mean rows of an expert: 1 is even
# worst     the expert whose operand has the lowest SQNR in the sample, 10 log10(sum(x^2) / sum((x - x_q * scale)^2))


ALIGNED_ROWS = 16  # of an expert's gate and up, in a brief sample


class ExpertStack:
    """A stack [E, N, K] of experts' matrices, as one layer: `leaf` is its name in the module of experts."""

    def __init__(self, module: Any, leaf: str) -> None:
        self.module, self.leaf = module, leaf

    @property
    def weight(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.leaf)
        return found

    @property
    def count(self) -> int:
        """The number of experts, of all ranks."""
        return self.weight.shape[0]

    @property
    def recipe(self) -> Recipe | None:
        """None where the experts are not in FP8, or each rank has some of them: those are not recorded."""
        found: Recipe | None = getattr(self.module, "recipe", None)
        return None if getattr(self.module, "parallel", None) is not None else found

    @property
    def observer(self) -> ExpertObserver | None:
        return (getattr(self.module, "observers", None) or {}).get(self.leaf)

    def attach(self, device: torch.device) -> None:
        observers = self.module.observers or {}
        self.module.observers = observers | {self.leaf: ExpertObserver(self.count, device)}


def first_numbers(layers: int, stacks: Sequence[tuple[int, ExpertStack]]) -> dict[int, int]:
    """The number of expert 0 of each stack, by the number of its layer.

    The records of brief samples number single experts after the layers, in the order of the stacks.
    """
    ends = accumulate((stack.count for _, stack in stacks), initial=layers)
    return {layer: first for (layer, _), first in zip(stacks, ends, strict=False)}


def brief_tables(observers: Sequence[ExpertObserver], device: torch.device) -> Tensor:
    """The numbers of brief samples [3 * experts of all stacks, BRIEF_WIDTH]: of each expert x, w and dy."""
    nothing = torch.empty(0, BRIEF_WIDTH, dtype=torch.float64, device=device)
    each = (torch.stack([observer.brief[name] for name in OPERANDS], 1).flatten(0, 1) for observer in observers)
    return torch.cat([nothing, *each])


def brief_expert_records(step: int, firsts: Sequence[tuple[int, int]], tables: Array) -> Array:
    """The `OPERAND` records of single experts in a brief sample, from `brief_tables`.

    `firsts` has of each stack that is recorded the number of its expert 0, and its experts.
    """
    numbers = np.concatenate([np.empty(0, int), *(np.arange(first, first + count) for first, count in firsts)])
    operands = np.tile(np.arange(len(OPERANDS)), len(numbers))
    return operand_records(step, numbers.repeat(len(OPERANDS)), operands, tables)


def expert_alignments(stacks: Sequence[ExpertStack], device: torch.device) -> Tensor:
    """The sum of |cosine| of rows of gate and up, and their number, by expert: float64 [experts of all stacks, 2].

    A rank that holds a part of the experts leaves the others at 0.
    """
    table = torch.zeros(sum(stack.count for stack in stacks), 2, dtype=torch.float64, device=device)
    end = 0
    for stack in stacks:
        begin, end = end + first_matrix(stack.weight), end + stack.count
        w = local_part(stack.weight).detach()
        if len(w):
            index = sampled_rows(w.shape[1] // 2, ALIGNED_ROWS, w.device)
            gate, up = (half[:, index].float() for half in w.chunk(2, 1))
            cosine = F.cosine_similarity(gate, up, dim=2).abs().sum(1)
            found = torch.stack([cosine, torch.full_like(cosine, len(index))], 1)
            table[begin : begin + len(w)] = found.to(device, torch.float64)
    return table


def first_matrix(weight: Any) -> int:
    """The number of the first matrix that this rank holds."""
    if not hasattr(weight, "__create_chunk_list__"):
        return 0
    [chunk] = weight.__create_chunk_list__()  # of a DTensor: two dimensions of a mesh may both divide the matrices
    return int(chunk.offsets[0])


def expert_sums(observers: Sequence[ExpertObserver], device: torch.device) -> Tensor:
    """The sums of all experts [experts of all stacks, 7], float64: those of x, w and dy beside each other."""
    nothing = torch.empty(0, 7, dtype=torch.float64, device=device)
    return torch.cat([nothing, *(torch.cat([observer.sums[name] for name in OPERANDS], 1) for observer in observers)])


def expert_records(step: int, layers: Sequence[tuple[int, int]], sums: Array) -> Array:
    """The `EXPERTS` records of a step, from `expert_sums`. `layers`: the number of each stack, and its experts."""
    records = np.zeros(len(layers), EXPERTS)
    start = 0
    for record, (layer, experts) in zip(records, layers, strict=True):
        found, start = sums[start : start + experts], start + experts
        rows = found[:, 0]
        record["step"], record["layer"], record["experts"] = step, layer, experts
        record["fullest"], record["idle"] = rows.argmax(), (rows == 0).sum()
        record["load"] = rows.max() / rows.mean() if rows.any() else np.nan
        squares, errors = found[:, 1::2], found[:, 2::2]  # [E, 3]
        with np.errstate(divide="ignore", invalid="ignore"):
            db = np.where((squares > 0) & np.isfinite(errors), 10 * np.log10(squares / errors), np.inf)
        record["worst"], least = db.argmin(0), db.min(0)
        record["sqnr"] = np.where(np.isfinite(least), least, np.nan)
    return records


# ---- Statistics of the weights of layers in a sampled step: the gradient, the range of the weight, and its change.
#
# The gradient is read before the optimizer's step, the change after it, on `UPDATE_ROWS` rows of each weight. Norms and
# amax are those of all elements that the rank holds; the histogram and the share that is not finite are of sampled
# rows. Of a DTensor, each rank reads its part.
#
# The alignment of a gate and an up layer is the mean |cosine| of the angles between their matching rows. It grows
# before the activations of a SwiGLU get outliers (arXiv:2409.12517, section 4).


UPDATE_ROWS = 16


class WeightStatistics:
    """The statistics of the weights of `modules` in one step; histograms are of `rows` rows. `pairs` become the numbers
    of the gate and up layers."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        pairs: Sequence[tuple[nn.Module, nn.Module]],
        rows: int,
        device: torch.device,
    ) -> None:
        numbers = {id(module): i for i, module in enumerate(modules)}
        self._modules, self._rows, self._device = modules, rows, device
        self.pairs = [(numbers[id(gate)], numbers[id(up)]) for gate, up in pairs]
        self._before: dict[int, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self._found: list[dict[str, Tensor]] = [{} for _ in self._modules]
        self._before.clear()
        self.has_gradients = False

    @torch.no_grad()
    def stats(self) -> Tensor:
        """Read the weights. The statistics of the step, float64 [layers, fields and EXPONENTS counts]."""
        for i, module in enumerate(self._modules):
            w = _local(weight_of(module), module)
            if w.numel():
                low, high = torch.aminmax(w)
                self._found[i] |= {
                    "minus_weight_smallest": -low,
                    "weight_largest": high,
                    "weight_elements": low.new_full((), w.numel(), dtype=torch.float32),
                    "weight_x2": _sum_of_squares(w),
                }
        for pair, alignment in zip(self.pairs, self._alignments(), strict=True):
            for i in pair:
                self._found[i] |= alignment
        nothing = torch.zeros(EXPONENTS, dtype=torch.float64, device=self._device)
        missing = dict.fromkeys(LAYER_MAXIMA, nothing[0] - torch.inf) | dict.fromkeys(LAYER_SUMS, nothing[0])
        found = [each.get(name, none).to(self._device) for each in self._found for name, none in missing.items()]
        scalars = torch.stack(by_dtype(lambda some: torch.stack(some).double().unbind(), found))
        exponents = [each.get("exponents", nothing).to(self._device, torch.float64) for each in self._found]
        return torch.cat([scalars.view(-1, len(missing)), torch.stack(exponents)], 1)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Read the gradients that the weights have now."""
        self.has_gradients = True
        for i, module in enumerate(self._modules):
            weight = weight_of(module)
            if weight.grad is not None and (g := _local(weight.grad, module)).numel():
                sample = histogram_statistics(g[_rows(g, self._rows)].float())
                low, high = torch.aminmax(g)
                self._found[i] |= sample | {
                    "gradient_amax": torch.maximum(-low, high),
                    "gradient_elements": low.new_full((), g.numel(), dtype=torch.float32),
                    "gradient_x2": _sum_of_squares(g),
                }

    @torch.no_grad()
    def before_update(self, parameters: Collection[int]) -> None:
        """Remember rows of the weights that the optimizer of `parameters` (by id) is about to change."""
        if not self.has_gradients:
            self.read_gradients()
        for i, module in enumerate(self._modules):
            weight = weight_of(module)
            if id(weight) in parameters and weight.grad is not None and (local := _local(weight, module)).numel():
                self._before[i] = local[_rows(local, UPDATE_ROWS)]

    @torch.no_grad()
    def after_update(self, parameters: Collection[int]) -> None:
        """Read how far the rows moved."""
        for i, module in enumerate(self._modules):
            if id(weight := weight_of(module)) in parameters and i in self._before:
                w = _local(weight, module)
                after, before = w[_rows(w, UPDATE_ROWS)].double(), self._before.pop(i).double()
                change = (after - before).square().sum()
                self._found[i] |= {"update_x2": change, "updated_x2": before.square().sum()}

    @torch.no_grad()
    def alignments(self) -> Tensor:
        """The sum of |cosine| of each pair, and the number of rows: float64 [pairs, 2]."""
        nothing = torch.zeros((), device=self._device)
        found = [each.get(name, nothing) for each in self._alignments() for name in ("alignment", "aligned_rows")]
        return torch.stack([nothing, *(sums.to(self._device) for sums in found)])[1:].double().view(-1, 2)

    def _alignments(self) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        for pair in self.pairs:
            gate, up = (_local(weight_of(self._modules[i]), self._modules[i]) for i in pair)
            if gate.shape != up.shape or not gate.numel():
                found.append({})
                continue
            index = _rows(gate, self._rows)
            cosine = F.cosine_similarity(gate[index].float(), up[index].float(), dim=1)
            found.append({"alignment": cosine.abs().sum(), "aligned_rows": cosine.new_full((), len(index))})
        return found


def _sum_of_squares(w: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(w, dtype=torch.float32)
    return norm.double().square()


def _rows(w: Tensor, rows: int) -> Tensor:
    return sampled_rows(w.shape[0], rows, w.device)


def _local(tensor: Any, module: Any) -> Tensor:
    """The tensor [N, K], or this rank's part of it; a convolution's has a row for each output, a stack's all rows."""
    part = local_part(tensor).detach()
    return part.flatten(0, 1) if isinstance(module, ExpertStack) else part.flatten(1)
