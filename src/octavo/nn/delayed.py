"""The state of delayed scaling: for each operand a history of amax, and the scale computed from it.

A forward or backward pass only reads the scale and records the largest amax it has seen (`pending`).
`update_scales(model)`, called once after each optimizer step, pushes that amax into the history. So every micro-batch
of a step, and every recomputation under activation checkpointing, uses the same scale. The first step has no history
and scales dynamically. The amax is recorded in place, so one thread at a time trains a model.

`update_scales` computes the histories of all operands with one cast together: its operations are as many for any number
of layers. The counts of steps are on the device too: once every history has a scale, the host does not wait for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.checkpoint.files import check_match
from octavo.nn.module_tools import ScaleBuffers, check_module
from octavo.nn.parallel_weights import groups_of
from octavo.numerics.qtensor import Cast
from octavo.numerics.scaling import History, scale_from_amax


class ScaleHistory(ScaleBuffers):
    """The history of one operand. Its buffers are not in the model's `state_dict`: see `scale_state`."""

    recent: Tensor  # [length] float32, newest first
    scale: Tensor  # [1, 1] float32
    steps: Tensor  # 0-dim int64: the steps that pushed an amax

    def __init__(self, cast: Cast, rule: History, device: torch.device) -> None:
        super().__init__()
        self.cast, self.rule = cast, rule
        self.learns_in_evaluation = self.frozen = False
        with torch.inference_mode(False):  # training cannot change a tensor of inference
            recent, scale = (torch.zeros(shape, dtype=torch.float32, device=device) for shape in (rule.length, (1, 1)))
            self.register_buffer("recent", recent, persistent=False)
            self.register_buffer("scale", scale, persistent=False)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
            # [1, 1] float32. It is no buffer for DDP, which would replace it by that of rank 0 before a forward pass.
            self.pending = torch.zeros_like(scale)

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """With `pending`, for those that ask this module itself, as FSDP does, which moves them to its device."""
        yield from super().named_buffers(prefix, *args, **kwargs)
        yield f"{prefix}.pending".lstrip("."), self.pending

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.pending = torch.zeros_like(self.scale) if self.pending.is_meta else self.pending.to(self.scale.device)
        return result

    def observe(self, amax: Tensor) -> None:
        """Record an amax [1, 1] of this training step. One that is not finite is ignored."""
        if self.frozen or not (self.training or self.learns_in_evaluation):
            return
        with torch.no_grad():
            self.pending.copy_(torch.where(amax.isfinite(), torch.maximum(self.pending, amax), self.pending))

    @torch.no_grad()
    def seed(self, amax: Sequence[float]) -> None:
        """Begin with these entries, oldest first, in place of those that are there."""
        newest = torch.tensor(amax[::-1][: self.rule.length], dtype=torch.float32)
        self.recent.zero_()
        self.recent[: len(newest)] = newest
        self.pending.zero_()
        self.steps.fill_(len(newest))
        self.scale.copy_(_scales([self], self.recent[None], self.steps[None])[0])
        self.ready = True


class ScaleHistories(nn.ModuleDict):
    """The histories of a layer, by operand."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # `parallelize_module` reads it of every module in a linear layer
            raise AttributeError(
                "the scale histories of a layer have no weight: octavo's layers do not support PyTorch's styles "
                "of tensor parallelism. Those of octavo.distributed do (tensor_parallel, ColumnParallel, RowParallel)"
            )
        return super().__getattr__(name)


def histories(model: nn.Module) -> Iterator[tuple[str, ScaleHistory]]:
    check_module(model, "octavo.scales")
    named = ((name.replace("_checkpoint_wrapped_module.", ""), m) for name, m in model.named_modules())  # as state_dict
    yield from ((name, module) for name, module in named if isinstance(module, ScaleHistory))


@torch.no_grad()
def update_scales(
    model: nn.Module, *, skipped: Tensor | bool | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Finish a step of delayed scaling: call it after each optimizer step. Does nothing for other recipes.

    Where `skipped`, a bool or one on the device [], is True, the step changed no weight: its amax values are dropped.
    Where the parameters of `model` are sharded (DTensor: FSDP2, tensor parallelism), the amax values are reduced over
    all ranks, by one small all-reduce for each dimension of the mesh. Where `model` is or holds the module of
    `DistributedDataParallel`, they are reduced over its ranks, and in any case over those of `group`, each with a copy
    of the model. So every rank must call this.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> loss(model(x), y).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> octavo.scales.update_scales(model)
    """
    groups: dict[tuple[Cast, History], list[ScaleHistory]] = {}
    for _, history in histories(model):
        groups.setdefault((history.cast, history.rule), []).append(history)
    if not groups:
        return
    found = [history for group in groups.values() for history in group]
    amax = torch.stack([history.pending for history in found])
    if skipped is not None:
        amax = amax.masked_fill(torch.as_tensor(skipped, device=amax.device), 0)
    copies = (m.process_group for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
    for ranks in filter(None, (*groups_of(model.parameters()), *copies, group)):
        dist.all_reduce(amax, dist.ReduceOp.MAX, ranks)
    parts = torch.split(amax, [len(group) for group in groups.values()])
    for each, part in zip(groups.values(), parts, strict=True):
        _push(each, part)
    if not all(history.ready for history in found):  # only then does the host wait for the device
        for history, recorded in zip(found, (amax > 0).flatten().tolist(), strict=True):
            history.ready = history.ready or recorded


def _push(group: list[ScaleHistory], amax: Tensor) -> None:
    """Push amax [n, 1, 1] into n histories with one cast, and compute the scales that are due."""
    buffers = {name: [getattr(each, name) for each in group] for name in ("recent", "scale", "steps")}
    recent, scale, steps = (torch.stack(each) for each in buffers.values())
    recorded = amax.view(-1) > 0  # [n]; a layer that was not used has none
    recent = torch.where(recorded[:, None], torch.cat([amax[:, 0], recent[:, :-1]], 1), recent)
    steps = steps + recorded
    due = recorded & ((steps - 1) % group[0].rule.interval == 0)
    scale = torch.where(due[:, None, None], _scales(group, recent, steps), scale)
    for each, rows in zip(buffers.values(), (recent, scale, steps), strict=True):
        torch._foreach_copy_(each, rows.unbind())
    torch._foreach_zero_([each.pending for each in group])


def _scales(group: list[ScaleHistory], recent: Tensor, steps: Tensor) -> Tensor:
    """The scales [n, 1, 1] of n histories with one cast, from their entries [n, length] and steps [n]."""
    cast, rule = group[0].cast, group[0].rule
    amax = rule.amax(recent, steps[:, None].clamp(max=rule.length))
    return scale_from_amax(amax.view(-1, 1, 1), cast.fmt, power_of_two=cast.power_of_two)


def scale_state(model: nn.Module) -> dict[str, Tensor]:
    """The scale histories of `model` as a flat dictionary of tensors, for a checkpoint. It is empty without a history.

    Example:
        >>> torch.save({"model": model.state_dict(), "scales": octavo.scales.scale_state(model)}, "checkpoint.pt")
    """
    return {f"{name}.{part}": buffer for name, history in histories(model) for part, buffer in history.named_buffers()}


@torch.no_grad()
def load_scale_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore the histories from a `scale_state`. It does not hold whether they were frozen.

    Raises:
        TypeError: `state` is no dictionary.
        ValueError: a history is missing, left over, or of another shape; nothing is changed then.

    Example:
        >>> octavo.convert(model, "delayed")  # the recipe of the saved model
        >>> saved = torch.load("checkpoint.pt")
        >>> model.load_state_dict(saved["model"])
        >>> octavo.scales.load_scale_state(model, saved["scales"])
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_scale_state takes a dictionary, got {type(state).__name__}: give that of scale_state")
    check_match(state, scale_state(model), "the scale histories are of another recipe or model")
    for name, history in histories(model):
        for part, buffer in history.named_buffers():
            buffer.copy_(state[f"{name}.{part}"])
        history.ready = bool(state[f"{name}.steps"] > 0)


def weight_amax(weights: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of a layer's weights, 0-dim. If they are sharded (DTensor), all ranks must call this."""
    found: list[Any] = [w.detach().abs().amax() for w in weights]
    return torch.stack([amax.full_tensor() if hasattr(amax, "full_tensor") else amax for amax in found]).amax()
