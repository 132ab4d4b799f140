"""One weight of FSDP2 and what its all-gather moves: the bytes and scales of this rank's rows.

FSDP2 looks for `fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor of a sharded parameter. Ours are
attributes of that one tensor, so the parameter stays a plain DTensor: `state_dict`, optimizers and DCP see no subclass.
Only the gathered parameter is one (`GatheredWeight`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

from octavo.dist.fsdp_units import UnitWeight
from octavo.nn.delayed import ScaleHistory
from octavo.nn.gathered_weight import GatheredWeight
from octavo.nn.linear import Linear, RecipeLayer
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW, TENSOR
from octavo.numerics.qtensor import QTensor

_HOOK = "fsdp_pre_all_gather"


class ShardedWeight:
    """A weight of a converted layer: [N, K], or the stack [E, N, K] of experts' matrices.

    Args:
        layer: whose weight FSDP2 shards on its rows, or a stack on its matrices.
        leaf: the name of the weight in the layer.
        unit: how FSDP2 shards it.

    Attributes:
        parameter: the sharded parameter. `layer.weight` is the gathered one between a forward pass and its reshard.
        data: the bytes [shard_rows, ...] of this rank's rows, uint8; scale: of these rows.
        sending: `data` while it is sent: until the stream that computes, whose memory it is, has waited for the gather.
        cast_again: makes `data` anew; None where it is held from one step to the next.
        prepare: called before the bytes of a unit are sent, by the first of its weights; None for the others.
        key: `current_key` when the bytes were made.
    """

    def __init__(self, layer: Any, leaf: str, unit: UnitWeight) -> None:
        self.layer, self.leaf, self.unit = layer, leaf, unit
        self.cast: Cast = layer.recipe.w
        self.history = _history(layer)
        self.stack = WeightStack([self], [])
        self.parameter: Any = getattr(layer, leaf)
        self.data: Tensor | None = None
        self.sending: Tensor | None = None
        self.scale: Tensor | None = None
        self.cast_again: Callable[[], None] | None = None
        self.prepare: Callable[[], None] | None = None
        self.key: tuple[Any, ...] = ()

    @property
    def local(self) -> Tensor:
        """This rank's rows, as FSDP2 holds them: fewer than `shard_rows`, or none, on the last ranks."""
        local: Tensor = self.parameter._local_tensor
        return local

    def attach(self) -> None:
        """Put the hooks on the local tensor, which `.to()`, `to_empty` and loading by assignment replace.

        Raises:
            ValueError: the layer was converted again or restored, and reads other bytes than those that are gathered.
        """
        recipe: Any = getattr(self.layer, "recipe", None)
        # A layer without a cast of w reads the numbers that the gathered bytes stand for.
        if recipe is None or recipe.w not in (None, self.cast) or _history(self.layer) is not self.history:
            now = "restored" if recipe is None else f"converted to {recipe.name}"
            raise ValueError(
                f"{self.layer} of the FSDP unit {self.unit.unit!r} was {now} after fp8_all_gather, which gathers its "
                "weight for the recipe that it had: call octavo.convert or octavo.restore before fp8_all_gather"
            )
        current: Any = self.layer._parameters[self.leaf]
        if current is self.parameter and _HOOK in current._local_tensor.__dict__:
            return
        if isinstance(current, DTensor) and not isinstance(current._local_tensor, GatheredWeight):
            self.parameter = current
        local: Any = self.local
        if not hasattr(local, _HOOK):
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._hooks()

    @property
    def is_alone(self) -> bool:
        """Whether the bytes depend on no row of another rank: those of square blocks, and of whole matrices."""
        return self.cast.granularity not in (ROW, TENSOR) or self.local.ndim == 3

    def current_key(self) -> tuple[Any, ...]:
        """Differs from `key` if the weight was written, or its scale has changed, since the bytes were made."""
        history = self.history
        scale = None if history is None else (history.ready, history.scale._version)
        # An operation on the DTensor counts as a write to that alone, one on its local tensor as a write to both.
        return self.parameter._version, self.local._version, self.local.data_ptr(), scale

    def hold(self, data: Tensor, scale: Tensor) -> None:
        """Take the memory from which the all-gather sends, and hold it."""
        self.data, self.scale = data, scale

    def take_scale(self, scale: Tensor, amax: Tensor) -> None:
        """Take the memory of the scale, by which the bytes are made."""
        self.scale = scale
        if self.history is not None:
            self.layer.weight_cache.amax = amax

    def bytes_to_send(self) -> Tensor:
        """The bytes of this rank's rows.

        Those that were made after a step lie in one memory with the bytes of other weights. It is freed when all have
        arrived, so that it is not beside the activations. Later gathers cast the rows again.
        """
        data = self.data
        assert data is not None
        if self.cast_again is not None:
            self.data = None
        return data

    def _hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # A scale of the whole tensor is known to every rank. On one rank FSDP2 passes on the first input only.
        sends_scale = self.cast.granularity != TENSOR and self.unit.world > 1

        def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
            """The inputs of the all-gather, and what the other hook needs besides."""
            if self.prepare is not None:
                self.prepare()
            data = self.bytes_to_send()
            assert self.scale is not None
            return ((data, self.scale), None) if sends_scale else ((data,), self.scale)

        def post_all_gather(
            outputs: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            """The gathered weight and the memory that FSDP2 is to free; None where `out` is filled."""
            self.sending = None
            if out is not None:
                self.stack.refill()
                return None
            scale = outputs[1] if scale is None else scale
            rows = self.unit.rows
            scale_rows = self.cast.granularity.scale_shape((rows, *outputs[0].shape[1:]))[0]
            data = outputs[0].view(self.cast.fmt.dtype)
            return self.stack.take(self, data[:rows], scale[:scale_rows], dtype)

        pre: Any = pre_all_gather
        pre.__signature__ = inspect.signature(pre)  # FSDP2 asks for it at each all-gather: this makes that fast
        return pre, post_all_gather


def _history(layer: nn.Module) -> ScaleHistory | None:
    """The history of a layer's weight, if its scale comes from one. Restored layers and experts have none."""
    return layer.history_of("w") if isinstance(layer, RecipeLayer) else None


class WeightStack:
    """Weights of a unit that run as one GEMM: their gathered bytes lie one under the other, in memory FSDP2 frees.

    Args:
        parts: in the order of the stack.
        caches: of the modules that run the stack. The cache of each layer gets its own part.
    """

    def __init__(self, parts: Sequence[ShardedWeight], caches: Sequence[WeightCache]) -> None:
        self.parts, self.caches = parts, list(caches)
        self.starts = [0, *accumulate(part.unit.rows for part in parts)]
        self.stacked: tuple[Tensor, ...] = ()  # data and scale, of several parts
        self.copies: tuple[list[Tensor], list[Tensor]] = [], []  # destinations and sources, as words
        self.freed: list[Tensor] = []  # what FSDP2 gathers into
        self.arrived = 0  # parts, since the last copy

    def take(
        self, part: ShardedWeight, data: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Take the gathered bytes of a part for the first time; the result is that of `fsdp_post_all_gather`."""
        owned: tuple[Tensor, ...] = ()
        if len(self.parts) > 1:
            owned = () if self.stacked else self._allocate(data, scale)
            i = self.parts.index(part)
            rows = slice(self.starts[i], self.starts[i + 1])
            self.freed += [data, scale] if part.unit.world > 1 else [data]
            for source, destination in zip((data, scale), self.stacked, strict=True):
                self.copies[0].append(_as_words(destination[rows]))
                self.copies[1].append(_as_words(source))
            data, scale = (t[rows] for t in self.stacked)
            self.refill()
        else:
            self._publish(data, scale, self.caches)
        if isinstance(part.layer, Linear):
            self._publish(data, scale, [part.layer.weight_cache])
        return GatheredWeight(data, scale, dtype, part.cast.granularity.name), owned

    def refill(self) -> None:
        """Note that a part is gathered. The last part copies all into the stack, in one launch, and frees them."""
        self.arrived += 1
        if self.arrived < len(self.parts):
            return
        self.arrived = 0
        if self.copies[0]:
            with torch.no_grad(), _unsafe_preserve_version_counter(self.stacked):
                torch._foreach_copy_(*self.copies)
            for t in self.freed:  # FSDP2 allocates it again by itself
                t.untyped_storage().resize_(0)

    def _allocate(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):  # autograd saves them
            self.stacked = tuple(t.new_empty(self.starts[-1], t.shape[1]) for t in (data, scale))
        self._publish(self.stacked[0], self.stacked[1], self.caches)
        return self.stacked

    def _publish(self, data: Tensor, scale: Tensor, caches: Sequence[WeightCache]) -> None:
        cast = self.parts[0].cast
        for cache in caches:
            cache.gathered = QTensor(data, scale, cast.fmt, cast.granularity)


def _as_words(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 8-byte words, or as bytes where it does not divide into words.

    A copy of words is about twice as fast as one of bytes.
    """
    data = t.view(-1).view(torch.uint8)
    aligned = data.numel() % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if aligned else data
