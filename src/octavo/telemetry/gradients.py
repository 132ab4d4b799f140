"""Statistics of the weights of layers in a sampled step: the gradient, the range of the weight, and its change.

The gradient is read before the optimizer's step, the change after it, on `UPDATE_ROWS` rows of each weight. Norms and
amax are those of all elements that the rank holds; the histogram and the share that is not finite are of sampled rows.
Of a DTensor, each rank reads its part.

The alignment of a gate and an up layer is the mean |cosine| of the angles between their matching rows. It grows
before the activations of a SwiGLU get outliers (arXiv:2409.12517, section 4).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.weight_cache import local_part
from octavo.observation.statistics import EXPONENTS, histogram_statistics, sampled_rows
from octavo.telemetry.experts import ExpertStack
from octavo.telemetry.layers import weight_of
from octavo.telemetry.records import LAYER_MAXIMA, LAYER_SUMS

UPDATE_ROWS = 16


class WeightStatistics:
    """The statistics of the weights in one step.

    Args:
        modules: the layers.
        pairs: the gate and up layers.
        rows: the number of rows that are sampled for histograms.

    Attributes:
        pairs: the numbers of the gate and up layers.
    """

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
        self._read_weights()
        nothing = torch.zeros(EXPONENTS, dtype=torch.float64, device=self._device)
        missing = [nothing[0] - torch.inf] * len(LAYER_MAXIMA) + [nothing[0]] * len(LAYER_SUMS)
        names = (*LAYER_MAXIMA, *LAYER_SUMS)
        scalars = _wide(
            [
                found.get(name, default).to(self._device)
                for found in self._found
                for name, default in zip(names, missing, strict=True)
            ]
        )
        exponents = [found.get("exponents", nothing).to(self._device, torch.float64) for found in self._found]
        return torch.cat([scalars.view(-1, len(names)), torch.stack(exponents)], 1)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Read the gradients that the weights have now."""
        self.has_gradients = True
        for i, module in enumerate(self._modules):
            weight = weight_of(module)
            if weight.grad is not None:
                self._found[i] |= _gradient(_local(weight.grad, module), self._rows)

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
                self._found[i] |= _change(self._before.pop(i), _local(weight, module))

    def _read_weights(self) -> None:
        for i, module in enumerate(self._modules):
            w = _local(weight_of(module), module)
            self._found[i] |= _weight(w) if w.numel() else {}
        for pair, found in zip(self.pairs, self._alignments(), strict=True):
            for i in pair:
                self._found[i] |= found

    @torch.no_grad()
    def alignments(self) -> Tensor:
        """Of each pair the sum of |cosine|, and the number of rows: float64 [pairs, 2]."""
        nothing = torch.zeros((), device=self._device)
        found = [each.get(name, nothing) for each in self._alignments() for name in ("alignment", "aligned_rows")]
        return torch.stack([nothing, *(sums.to(self._device) for sums in found)])[1:].double().view(-1, 2)

    def _alignments(self) -> list[dict[str, Tensor]]:
        pairs = ([self._modules[i] for i in pair] for pair in self.pairs)
        weights = [[_local(weight_of(module), module) for module in pair] for pair in pairs]
        return [_alignment(gate, up, self._rows) for gate, up in weights]


def _gradient(g: Tensor, rows: int) -> dict[str, Tensor]:
    if not g.numel():
        return {}
    sample = histogram_statistics(g[_rows(g, rows)].float())
    low, high = torch.aminmax(g)
    return {
        "gradient_amax": torch.maximum(-low, high),
        "gradient_elements": low.new_full((), g.numel(), dtype=torch.float32),
        "gradient_x2": torch.linalg.vector_norm(g, dtype=torch.float32).double().square(),
        "sampled": sample["elements"],
        "nonfinite": sample["nonfinite"],
        "exponents": sample["exponents"],
    }


def _weight(w: Tensor) -> dict[str, Tensor]:
    low, high = torch.aminmax(w)
    return {
        "minus_weight_smallest": -low,
        "weight_largest": high,
        "weight_elements": low.new_full((), w.numel(), dtype=torch.float32),
        "weight_x2": torch.linalg.vector_norm(w, dtype=torch.float32).double().square(),
    }


def _change(before: Tensor, w: Tensor) -> dict[str, Tensor]:
    after, before = w[_rows(w, UPDATE_ROWS)].double(), before.double()
    return {"update_x2": (after - before).square().sum(), "updated_x2": before.square().sum()}


def _alignment(gate: Tensor, up: Tensor, rows: int) -> dict[str, Tensor]:
    if gate.shape != up.shape or not gate.numel():
        return {}
    index = _rows(gate, rows)
    cosine = F.cosine_similarity(gate[index].float(), up[index].float(), dim=1)
    return {"alignment": cosine.abs().sum(), "aligned_rows": cosine.new_full((), len(index))}


def _wide(scalars: Sequence[Tensor]) -> Tensor:
    """The scalars as one float64 tensor [n]: one conversion for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(each.dtype for each in scalars):
        places = [i for i, each in enumerate(scalars) if each.dtype == dtype]
        found |= zip(places, torch.stack([scalars[i] for i in places]).double().unbind(), strict=True)
    return torch.stack([found[i] for i in range(len(scalars))])


def _rows(w: Tensor, rows: int) -> Tensor:
    return sampled_rows(w.shape[0], rows, w.device)


def _local(tensor: Any, module: Any) -> Tensor:
    """The tensor [N, K], or this rank's part of it; a convolution's has a row for each output, a stack's all rows."""
    part = local_part(tensor).detach()
    return part.flatten(0, 1) if isinstance(module, ExpertStack) else part.flatten(1)
