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
    that updates all of them, or else when the next forward pass of the model begins. The all-reduce takes place in that
    forward pass, when the first of the weights is gathered.

    `torch.distributed.checkpoint.load` writes into the tensors of a `state_dict`, which leaves no trace on the
    parameters. So after a call of `state_dict` the next forward pass looks at the numbers. It does not quantize again
    because of the call alone, which one rank may have made by itself.
    """

    def __init__(self, model: nn.Module, weights: Sequence[ShardedWeight]) -> None:
        """Keep `weights` fresh and make FSDP2 call their hooks: one at least, in the order in which it gathers them."""
        self.weights, self.quantizer = weights, ShardQuantizer(weights)
        self.stale = True
        self.measured = False  # whether the ranks have yet to agree on the scales
        self.exposed = False  # whether `state_dict` was called since the weights were compared
        self.stream: Any = None  # in which the weights are quantized
        self.written: Any = None  # when the bytes were made, an event of `stream`
        self.waited: set[Any] = set()  # the streams that have waited for it
        for weight in weights:
            weight.attach()
            weight.layer.register_state_dict_pre_hook(self.note_state_dict)
        for _, found in groupby(weights, lambda weight: weight.unit.group):
            unit = list(found)
            unit[0].prepare = partial(self.prepare, unit)
        # Before FSDP2's own hook, which gathers the weights of the root.
        model.register_forward_pre_hook(self.before_forward, prepend=True)
        # PyTorch holds the hook for good: it must not hold the model.
        this = weakref.ref(self)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            cache = this()
            if cache is not None:
                cache.note_step(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    @property
    def streams(self) -> Any:
        """The module of the weights' device, such as torch.cuda. torch.cpu has streams too, which do nothing."""
        return torch.get_device_module(self.weights[0].local.device)

    def note_state_dict(self, *_: Any) -> None:
        self.exposed = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note_step(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` has changed weights. If it is the one that updates all, begin to quantize them.

        There the GPU still has work, and the host may not: a loop reads the loss after a step. Where several optimizers
        update the weights, or their scales come from histories that are updated later, the next forward pass does it.
        """
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = [id(weight.parameter) in updated for weight in self.weights]
        self.stale = self.stale or any(ours)
        if self.stale and all(ours) and all(weight.history is None for weight in self.weights):
            self.begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, *_: Any) -> None:
        for weight in self.weights:
            weight.attach()
        changed = self.stale or any(weight.current_key() != weight.key for weight in self.weights)
        if changed or (self.exposed and self.has_changed()):
            self.begin()
        self.exposed = False

    def has_changed(self) -> bool:
        self.streams.current_stream().wait_stream(self.stream)  # which found the amaxes to compare with
        return self.quantizer.has_changed()

    def prepare(self, unit: Sequence[ShardedWeight]) -> None:
        """Called in the stream that will send the bytes of the weights of a unit, before it does."""
        if self.stale or any(weight.current_key() != weight.key for weight in unit):
            self.begin()  # `unshard()` was called before the forward pass
        if self.measured:
            self.finish()
        stream = self.streams.current_stream()
        if stream not in self.waited:
            stream.wait_event(self.written)
            self.waited.add(stream)
        for weight in unit:
            weight.sending = weight.data
            if weight.data is None and weight.cast_again is not None:
                weight.cast_again()

    def begin(self) -> None:
        """Measure the rows of all weights, in a stream beside that of the caller.

        So the first gather of a forward pass, that of the root, does not wait for it. The memory of the bytes is of the
        caller's stream, which computes: it has that memory again, for activations, when the bytes are sent.
        """
        caller = self.streams.current_stream()
        if self.stream is None:
            self.stream = self.streams.Stream()
            # A model may be deleted after its last step: its memory is used again by the stream that computes.
            weakref.finalize(self, _wait_for, self.stream, self.streams).atexit = False
        with self.streams.stream(self.stream):
            self.quantizer.group()
        caller.wait_stream(self.stream)  # bytes of an earlier call that were not sent are freed
        self.quantizer.allocate()
        self.stream.wait_stream(caller)
        with self.streams.stream(self.stream):
            self.quantizer.measure()
        self.stale, self.measured = False, True

    def finish(self) -> None:
        """Find the scales with the other ranks, and make the bytes by them.

        It is called where the first weight that needs them is gathered. Collectives of one process group run in the
        order of their calls: before the gather of the root, the all-reduce would make that wait for the amaxes.
        """
        with self.streams.stream(self.stream):
            self.quantizer.finish()
            self.written, self.waited = self.stream.record_event(), set()
        self.measured = False


def _wait_for(stream: Any, streams: Any) -> None:
    streams.current_stream().wait_stream(stream)
