"""The quantized rows of this rank, of all weights, kept fresh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.dist.shard_quantization import ShardQuantizer
from octavo.dist.sharded_weight import ShardedWeight


class ShardCache:
    """Quantizes the rows of all weights again when an optimizer, a load or a write in place has changed one.

    Ranks must agree on when that happens, since it takes an all-reduce. A rank that has no rows of one weight sees no
    write to it, but sees the writes to others. So it happens for all weights at once: after the step of an optimizer
    that updates all of them, or else when the next forward pass of the model begins.

    `torch.distributed.checkpoint.load` writes into the tensors of a `state_dict`, which leaves no trace on the
    parameters. So after a call of `state_dict` the next forward pass looks at the numbers. It does not quantize again
    because of the call alone, which one rank may have made by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights: Sequence[ShardedWeight] = ()
        self.quantizer = ShardQuantizer(())
        self.stale = True
        self.exposed = False  # whether `state_dict` was called since the weights were compared
        self.written: torch.Event | None = None  # on a GPU: when the bytes were made
        self.waited: set[int] = set()  # the streams that have waited for it
        # Before FSDP2's own hook, which gathers the weights of the root.
        model.register_forward_pre_hook(self.before_forward, prepend=True)
        # PyTorch holds the hook for good: it must not hold the model.
        this = weakref.ref(self)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            cache = this()
            if cache is not None:
                cache.note_step(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def fill(self, weights: Sequence[ShardedWeight]) -> None:
        """Take the weights, in the order in which FSDP2 gathers them, and make it call their hooks."""
        self.weights, self.quantizer = weights, ShardQuantizer(weights)
        for weight in weights:
            weight.attach()
            weight.layer.register_state_dict_pre_hook(self.note_state_dict)
        for _, found in groupby(weights, lambda weight: weight.unit.group):
            unit = list(found)
            unit[0].prepare = partial(self.prepare, unit)

    def note_state_dict(self, *_: Any) -> None:
        self.exposed = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note_step(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` has changed weights. If it is the one that updates all, quantize them at once.

        There the GPU still has work, and the host may not: a loop reads the loss after a step. Where several optimizers
        update the weights, or their scales come from histories that are updated later, the next forward pass does it.
        """
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = [id(weight.parameter) in updated for weight in self.weights]
        self.stale = self.stale or any(ours)
        if self.stale and all(ours) and all(weight.history is None for weight in self.weights):
            self.refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, *_: Any) -> None:
        for weight in self.weights:
            weight.attach()
        changed = self.stale or any(weight.current_key() != weight.key for weight in self.weights)
        if changed or (self.exposed and self.quantizer.has_changed()):
            self.refresh()
        self.exposed = False

    def prepare(self, unit: Sequence[ShardedWeight]) -> None:
        """Called in the stream that will send the bytes of the weights of a unit, before it does."""
        if self.stale or any(weight.current_key() != weight.key for weight in unit):
            self.refresh()  # `unshard()` was called before the forward pass
        if self.written is not None:
            stream = torch.accelerator.current_stream(unit[0].local.device)
            if stream.stream_id not in self.waited:
                stream.wait_event(self.written)
                self.quantizer.record_stream(stream)
                self.waited.add(stream.stream_id)
        for weight in unit:
            if weight.data is None and weight.cast_again is not None:
                weight.cast_again()

    def refresh(self) -> None:
        """Quantize the rows of all weights."""
        self.quantizer.run()
        self.stale = False
        device = self.weights[0].local.device if self.weights else torch.device("cpu")
        if device.type != "cpu":
            self.written, self.waited = torch.accelerator.current_stream(device).record_event(), set()
