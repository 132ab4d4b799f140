"""The scales of the weights of packed layers.

    amax     amax/448 of each block, or the scale in the history of a run (delayed scaling)
    mse      the scale of least mean squared error near that (`octavo.packing.mse_search`)

Layers that readers run as one GEMM (q, k and v; gate and up) need one scale if a scale is of a whole tensor: vLLM takes
the largest and casts the other weights again, which loses precision. So these layers share the largest scale before
they are cast. A run that was trained with a scale for each of these tensors keeps them, because sharing would change
its bytes, unless the option `share` is set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from octavo.artifact.packed.scheme import Scheme
from octavo.hf.fused_groups import groups
from octavo.hf.source import Source
from octavo.numerics import TENSOR, Cast, QTensor
from octavo.ops import quantize, quantize_scaled
from octavo.packing.mse_search import SearchedScale, cast_by, search_scale, search_shared_scale
from octavo.packing.options import PackOptions

# Recipes that train with one scale for a weight, which packing keeps.
_OWN_SCALES = ("tensorwise", "delayed")


class WeightScales:
    """Casts the weights of a source, one at a time.

    Args:
        source: the model.
        schemes: of the layers to pack, by their names in the model, and of experts, by those in the files.
        options: the rule of their scales.
        own: the scales, float32 [1, 1], that weights had in training; empty if the run's checkpoint holds none.

    Attributes:
        gains: the dB of SQNR that each weight gained over the rule amax, if the rule is mse.
        ratios: for layers that readers fuse and that keep their own scales, the largest scale over the smallest.
    """

    def __init__(
        self, source: Source, schemes: Mapping[str, Scheme], options: PackOptions, own: Mapping[str, Tensor]
    ) -> None:
        self.source, self.schemes, self.options = source, schemes, options
        keeps = source.recipe in _OWN_SCALES and options.weights == "amax" and not options.pow2
        self.own = own if keeps else {}
        self._shares = not keeps if options.share is None else options.share
        self.gains: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def cast(self, scheme: Scheme) -> Cast:
        rounds = self.options.pow2 and not scheme.weight.power_of_two
        return replace(scheme.weight, scale="pow2") if rounds else scheme.weight

    def quantize(self, module: str, w: Tensor) -> QTensor:
        """Cast the weight `w` [N, K] of a layer. A weight on the meta device gives one there."""
        cast = self.cast(self.schemes[module])
        if w.is_meta:
            return quantize(w, cast)
        q = self._quantize(module, w, cast)
        if cast.granularity == TENSOR:
            self._used[module] = float(q.scale)
        return q

    @property
    def ratios(self) -> dict[str, float]:
        """See the class. Known once the weights are cast; groups with equal scales are left out."""
        used = {", ".join(group): [self._used[name] for name in group] for group in self._groups()}
        return {names: max(scales) / min(scales) for names, scales in used.items() if min(scales) != max(scales)}

    def record(self) -> dict[str, object]:
        """The entry "weight_scales" of octavo.json (docs/format.md)."""
        record: dict[str, object] = {"rule": self.options.weights, "pow2": self.options.pow2}
        if self.options.weights == "mse":
            record["sqnr_gain_db"] = {name: db if math.isfinite(db) else None for name, db in self.gains.items()}
        return record

    @cached_property
    def _shared(self) -> dict[str, Tensor]:
        """The scales that layers share, by the name of each. Their weights are read to find them."""
        if not self._shares:
            return {}
        return {name: scale for group in self._groups() for scale in [self._one_scale(group)] for name in group}

    def _quantize(self, module: str, w: Tensor, cast: Cast) -> QTensor:
        scale = self._shared.get(module, self.own.get(module))
        if scale is not None:
            return quantize_scaled(w, scale, cast)[0]
        q = quantize(w, cast)
        if self.options.weights == "amax":
            return q
        searched = search_scale(w, q.scale.float(), cast)
        self._note([module], searched)
        exact = cast_by(w, searched.scale, cast)
        return replace(exact, scale=searched.scale.to(q.scale.dtype))

    def _groups(self) -> list[tuple[str, ...]]:
        """The layers that readers fuse, if their scales are of whole tensors."""
        wholes = [module for module, how in self.schemes.items() if how.weight.granularity == TENSOR]
        return [group for group in groups(wholes) if len(group) > 1]

    def _one_scale(self, group: tuple[str, ...]) -> Tensor:
        cast = self.cast(self.schemes[group[0]])
        if all(name in self.own for name in group):
            return torch.stack([self.own[name] for name in group]).amax(0)
        scale = torch.stack([quantize(self._weight(name), cast).scale for name in group]).amax(0)
        if self.options.weights == "amax":
            return scale
        searched = search_shared_scale((self._weight(name) for name in group), scale, cast)
        self._note(group, searched)
        return searched.scale

    def _weight(self, module: str) -> Tensor:
        name = f"{module}.weight"
        return self.source.get(name) if name in self.source.specs else self.source.get_from_file(name)  # of an expert

    def _note(self, modules: Sequence[str], searched: SearchedScale) -> None:
        for module, before, after in zip(modules, searched.before.tolist(), searched.after.tolist(), strict=True):
            self.gains[module] = 0.0 if before == after else 10 * math.log10(before / after) if after else math.inf
