"""The layers of a model that are watched, where each records its operands, and how its GEMMs run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo.nn.attention_layers import MultiheadAttention, input_weights
from octavo.nn.conversion import find_experts, stacks_of
from octavo.nn.experts import Experts
from octavo.nn.fused_modules import FusedModule
from octavo.nn.linear import RecipeLayer
from octavo.nn.module_tools import class_name, is_conv1d, plain_name, shape_of
from octavo.nn.observer import ExpertObserver, Observer
from octavo.nn.parallel_weights import device_of, first_indices, local_part
from octavo.observation.operand_statistics import EXPONENTS, clear, combine_all, histograms, sampled_rows, stack_double
from octavo.ops.dispatch import gemm_backends
from octavo.recipe import Recipe
from octavo.watching.records import LAYER_MAXIMA, LAYER_SUMS, Table
from octavo.watching.storage import OPERANDS, RECOMPUTED, Array, GemmRun, WatchedLayer

_GEMM_OF = {"y": "x", "dx": "dy", "dw": "dy", "recomputation": "x"}  # the operand whose record shows that a GEMM ran


class Matrix:
    """The weight of a layer, or a stack [E, N, K] of experts' matrices, which is watched as one layer. `name` has no
    prefixes of wrappers. `leaf` is the name of a stack in its module of experts, "" for a layer."""

    def __init__(self, name: str, module: Any, leaf: str = "") -> None:
        self.name, self.module, self.leaf = plain_name(name), module, leaf

    @property
    def weight(self) -> nn.Parameter:
        """The parameter; an attention with separate input projections gives that of its queries."""
        if isinstance(self.module, MultiheadAttention):
            return next(iter(input_weights(self.module).values()))
        return getattr(self.module, self.leaf or "weight")

    @property
    def experts(self) -> int:
        """The number of a stack's experts, of all ranks; 0 for a layer."""
        return self.weight.shape[0] if self.leaf else 0

    @property
    def recipe(self) -> Recipe | None:
        """None if the layer was not converted. Experts that ranks share are not recorded, and have none either."""
        if not self.leaf:
            return self.module.recipe if isinstance(self.module, RecipeLayer) else None
        found: Recipe | None = getattr(self.module, "recipe", None)
        return None if getattr(self.module, "parallel", None) is not None else found

    @property
    def shape(self) -> tuple[int, int]:
        """N outputs and K inputs."""
        if is_conv1d(self.module):
            return shape_of(self.module)
        first, *rest = self.weight.shape
        return (first * rest[0], rest[1]) if self.leaf else (first, math.prod(rest))

    def local(self, tensor: Any) -> Tensor:
        """This rank's part [N, K] of the weight or its gradient; a convolution's has a row for each output."""
        part = local_part(tensor).detach()
        return part.flatten(0, 1) if self.leaf else part.flatten(1)


@dataclass(frozen=True, eq=False)
class Place:
    """A module that records operands, and the layers whose weights it reads: several where it runs them as one GEMM."""

    name: str
    module: Any
    layers: tuple[int, ...]
    row: int  # the first of its rows of statistics: x, w of each layer, dy of each layer
    leaf: str = ""  # of a stack of experts

    @property
    def observer(self) -> Any:
        return (self.module.observers or {}).get(self.leaf) if self.leaf else self.module.observer


class Layers:
    """The linear layers of a model, by number, and the observers of the converted ones. The `matrices` are those of
    `nn.Linear`, transformers' `Conv1D`, converted layers (convolutions and attentions too), and stacks of experts. Each
    converted layer has one of the `places`, and each fused module one more. `dtype` is that of GEMMs that are not
    quantized. The rules take single experts, which are numbered after the layers, in the order of the stacks. `firsts`
    has the number of expert 0 of each stack, by the number of its layer. `count` is the number of layers and
    experts."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        self._dtype = names.get(dtype, str(dtype))
        self.matrices = [
            Matrix(name, module)
            for name, module in model.named_modules()
            if isinstance(module, RecipeLayer | nn.Linear) or is_conv1d(module)
        ]
        for name, module in find_experts(model).items():
            self.matrices += [Matrix(weight, module, weight.rpartition(".")[2]) for weight in stacks_of(name, module)]
        numbers = {id(matrix.module): i for i, matrix in enumerate(self.matrices)}
        converted = [(i, matrix) for i, matrix in enumerate(self.matrices) if matrix.recipe is not None]
        self.places = [Place(m.name, m.module, (i,), 3 * at, m.leaf) for at, (i, m) in enumerate(converted)]
        row = 3 * len(converted)
        for name, fused in model.named_modules():  # those that may run several layers as one GEMM
            # PEFT puts adapters around a layer, its base_layer
            inner = [getattr(m, "base_layer", m) for m in fused.inner] if isinstance(fused, FusedModule) else []
            if inner and all(isinstance(linear, RecipeLayer) for linear in inner):
                layers = tuple(numbers[id(linear)] for linear in inner)
                self.places.append(Place(plain_name(name), fused, layers, row))
                row += 1 + 2 * len(layers)
        self.firsts, self.count = dict[int, int](), len(self.matrices)
        for i, stack in self.stacks:
            self.firsts[i], self.count = self.count, self.count + stack.experts
        # A module that is compiled, and checkpointed inside of the compiled code.
        compiled = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
        again = {id(m) for b in compiled if getattr(b, "activation_checkpointing", False) for m in b.modules()}
        # Of each layer, the operands that were recorded, and "recomputed" where its forward pass ran twice in a step.
        self._seen: list[set[str]] = [{"recomputed"} if id(m.module) in again else set() for m in self.matrices]

    def attach(self, device: torch.device) -> None:
        """Give each place an observer. A ValueError if the model is watched already."""
        if any(place.observer is not None for place in self.places):
            raise ValueError("the model is watched already: close the other octavo.watch first")
        for place in self.places:
            if place.leaf:
                made = {place.leaf: ExpertObserver(self.matrices[place.layers[0]].experts, device)}
                place.module.observers = (place.module.observers or {}) | made
            else:
                place.module.observer = Observer(len(place.layers), device)

    def detach(self) -> None:
        for place in self.places:
            place.module.__dict__.pop("observers" if place.leaf else "observer", None)

    @property
    def stacks(self) -> list[tuple[int, Matrix]]:
        """All stacks of experts' matrices, with the numbers of their layers."""
        return [(i, matrix) for i, matrix in enumerate(self.matrices) if matrix.leaf]

    @property
    def stats(self) -> list[Tensor]:
        """The statistics of all places."""
        observers = [place.observer for place in self.places]
        return [stats for observer in observers for stats in (observer.forward, observer.backward)]

    def operands(self, stats: Array) -> tuple[Array, Array, Array]:
        """The layer [n], the operand [n] and the statistics [n, fields] of each operand of the converted layers.
        `stats` are of all places [m, fields]. A layer has its own, and those of the fused module that ran it."""
        rows: dict[tuple[int, int], list[int]] = {}
        for place in self.places:
            for i, layer in enumerate(place.layers):
                for operand, slot in enumerate((0, 1 + i, 1 + len(place.layers) + i)):  # the layers share x
                    rows.setdefault((layer, operand), []).append(place.row + slot)
        keys = sorted(rows)
        table = torch.from_numpy(stats)
        table = torch.cat([table, clear(table.new_empty(1, table.shape[1]))])
        places = torch.tensor([(*rows[key], -1)[:2] for key in keys], dtype=torch.long).view(-1, 2)  # -1: nothing
        return (*np.array(keys, int).reshape(-1, 2).T, combine_all(table[places]).numpy())

    def sizes(self) -> Array:
        """The number of elements of each weight, of which this rank may hold a part."""
        return np.array([matrix.weight.numel() for matrix in self.matrices], float)

    def note(self, operands: Array) -> None:
        """Note what ran: the operands of a full sample. Compiled code does not say whether it ran twice."""
        for record in operands:
            again = {"recomputed"} if record["flags"] & RECOMPUTED else set()
            self._seen[record["layer"]] |= {OPERANDS[record["operand"]], *again}

    def describe(self) -> list[WatchedLayer]:
        """The layers as they run."""
        fused = {layer: place.name for place in self.places if len(place.layers) > 1 for layer in place.layers}
        found = []
        for i, matrix in enumerate(self.matrices):
            recipe = matrix.recipe
            casts = {operand: getattr(recipe, operand, None) for operand in OPERANDS}
            formats = {operand: self._dtype if cast is None else cast.format for operand, cast in casts.items()}
            granularity = {operand: "" if cast is None else cast.granularity.name for operand, cast in casts.items()}
            gemms = dict(_gemms(matrix, self._dtype, self._seen[i], fused.get(i)))
            called, kind, shape = matrix.name, class_name(matrix.module), matrix.shape
            name = "" if recipe is None else recipe.name
            found.append(WatchedLayer(called, kind, shape, name, formats, granularity, gemms, matrix.experts))
        return found


def _gemms(matrix: Matrix, dtype: str, seen: set[str], fused: str | None) -> Iterator[tuple[str, GemmRun]]:
    """The GEMMs of a layer that ran. For a layer that was not converted no operand is recorded: all are listed."""
    recipe, weight = matrix.recipe, matrix.weight
    if recipe is None:
        yield from dict.fromkeys(("y", "dx", "dw"), GemmRun(dtype, "torch", "the layer was not converted")).items()
        return
    backends = gemm_backends(recipe, device_of(weight))  # a layer that was moved to BF16 has the recipe bf16
    if matrix.leaf:
        backends = backends | gemm_backends(recipe, device_of(weight), grouped=True)
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


# ---- Statistics of the weights of layers in a sampled step: the gradient, the range of the weight, and its change.
#
# The gradient is read before the optimizer's step, the change after it, on `UPDATE_ROWS` rows of each weight. Norms and
# amax are those of all elements that the rank holds; the histogram and the share that is not finite are of sampled
# rows. Of a DTensor, each rank reads its part.
#
# The alignment of a gate and an up layer is the mean |cosine| of the angles between their matching rows. It grows
# before the activations of a SwiGLU get outliers (arXiv:2409.12517, section 4).


UPDATE_ROWS = 16
ALIGNED_ROWS = 16  # of an expert's gate and up


class WeightStatistics:
    """The statistics of the weights of a model's layers in one step; histograms are of `rows` rows. `aligned` has the
    numbers of the layers, or the expert, of each gate and up. Its hooks of optimizers read, if the step is `active`."""

    def __init__(self, model: nn.Module, layers: Layers, rows: int, device: torch.device) -> None:
        self._matrices, self._rows, self._device = layers.matrices, rows, device
        of_module = {id(matrix.module): (i, matrix) for i, matrix in enumerate(layers.matrices)}
        pairs = [(getattr(m, "gate_proj", None), getattr(m, "up_proj", None)) for m in model.modules()]  # of Llama
        pairs = [pair for pair in pairs if all(isinstance(layer, nn.Linear) for layer in pair)]
        self._pairs = [[of_module[id(layer)][1] for layer in pair] for pair in pairs]
        self._stacks = [(i, stack) for i, stack in layers.stacks if stack.leaf == Experts.matrices[0]]
        self.aligned: list[list[int]] = [[of_module[id(layer)][0] for layer in pair] for pair in pairs]
        self.aligned += [[layers.firsts[i] + e] for i, stack in self._stacks for e in range(stack.experts)]
        self.begin(active=False)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def begin(self, *, active: bool) -> None:
        """Forget the step before."""
        self.active, self._has_gradients = active, False
        self._found: list[dict[str, Tensor]] = [{} for _ in self._matrices]
        self._before: dict[int, Tensor] = {}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def stats(self) -> Table:
        """Read the weights. The statistics of the step, [layers, fields and EXPONENTS counts]."""
        for found, matrix in zip(self._found, self._matrices, strict=True):
            if (w := matrix.local(matrix.weight)).numel():
                low, high = torch.aminmax(w)
                elements = low.new_full((), w.numel(), dtype=torch.float32)
                found |= {"weight_elements": elements, "weight_x2": _sum_of_squares(w)}
                found |= {"minus_weight_smallest": -low, "weight_largest": high}
        nothing = torch.zeros(EXPONENTS, dtype=torch.float64, device=self._device)
        missing = dict.fromkeys(LAYER_MAXIMA, nothing[0] - torch.inf) | dict.fromkeys(LAYER_SUMS, nothing[0])
        fields = [each.get(name, none).to(self._device) for each in self._found for name, none in missing.items()]
        scalars = stack_double(fields)
        exponents = [each.get("exponents", nothing).to(self._device, torch.float64) for each in self._found]
        return torch.cat([scalars.view(-1, len(missing)), torch.stack(exponents)], 1), len(LAYER_MAXIMA)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Read the gradients that the weights have now."""
        self._has_gradients = True
        for found, matrix in zip(self._found if self.active else (), self._matrices, strict=False):
            grad = matrix.weight.grad
            if grad is not None and (g := matrix.local(grad)).numel():
                sample = g[_rows(g, self._rows)].float()
                finite = sample.nan_to_num(0, 0, 0)
                low, high = torch.aminmax(g)
                found |= {
                    "elements": low.new_full((), sample.numel(), dtype=torch.float32),
                    "nonfinite": (finite != sample).sum(dtype=torch.float64),
                    "exponents": histograms(finite.abs()[None])[0],
                    "gradient_amax": torch.maximum(-low, high),
                    "gradient_elements": low.new_full((), g.numel(), dtype=torch.float32),
                    "gradient_x2": _sum_of_squares(g),
                }

    @torch.no_grad()
    def _before_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """Remember rows of the weights that the optimizer is about to change."""
        if not self.active:
            return
        if not self._has_gradients:
            self.read_gradients()
        changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for i, matrix in enumerate(self._matrices):
            weight = matrix.weight
            if id(weight) in changed and weight.grad is not None and (local := matrix.local(weight)).numel():
                self._before[i] = local[_rows(local, UPDATE_ROWS)]

    @torch.no_grad()
    def _after_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        for i, rows in self._before.items():
            w, before = self._matrices[i].local(self._matrices[i].weight), rows.double()
            change = (w[_rows(w, UPDATE_ROWS)].double() - before).square().sum()
            self._found[i] |= {"update_x2": change, "updated_x2": before.square().sum()}
        self._before.clear()

    @torch.no_grad()
    def alignments(self) -> Tensor:
        """The sum of |cosine| of the rows of each gate and up, and their number: float64, a row for each of `aligned`.
        A rank that holds a part of the experts leaves the others at 0."""
        table, end = torch.zeros(len(self.aligned), 2, dtype=torch.float64, device=self._device), 0
        for pair in self._pairs:
            gate, up = (matrix.local(matrix.weight)[None] for matrix in pair)
            if gate.shape == up.shape and gate.numel():
                _align(table[end : end + 1], gate, up, self._rows)
            end += 1
        for _, stack in self._stacks:
            w, begin = local_part(stack.weight).detach(), end + first_indices(stack.weight)[0]
            if len(w):
                gate, up = w.chunk(2, 1)
                _align(table[begin : begin + len(w)], gate, up, ALIGNED_ROWS)
            end += stack.experts
        return table


def _align(table: Tensor, gate: Tensor, up: Tensor, rows: int) -> None:
    """Set the rows [n, 2] of `table` by sampled rows of gate and up [n, N, K]."""
    index = sampled_rows(gate.shape[1], rows, gate.device)
    cosine = F.cosine_similarity(gate[:, index].float(), up[:, index].float(), dim=2)
    table.copy_(torch.stack([cosine.abs().sum(1), cosine.new_full((len(cosine),), len(index))], 1))


def _sum_of_squares(w: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(w, dtype=torch.float32)
    return norm.double().square()


def _rows(w: Tensor, rows: int) -> Tensor:
    return sampled_rows(w.shape[0], rows, w.device)
