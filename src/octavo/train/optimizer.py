"""AdamW, the dtypes of its weights and moments, and its state as named tensors.

Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on matrices, none on norms and biases.

A parameter takes 16 bytes in training by default: weight, gradient and two moments m and v in FP32. Settings of the
table `[optimizer]` lower that, by torchao's optimizers:

    state = "8bit"      m and v in a byte each, with an FP32 scale for 256 elements of a row; the values of a byte are
                        spaced as a float with a variable number of exponent bits (Dettmers et al., arXiv:2110.02861)
    state = "fp8"       the same with the values of e4m3
    weights = "bf16"    the weights in BF16; a step computes in FP32 and rounds stochastically, up with the probability
                        of the part that is cut off, or else every update below 1/512 of a weight would be lost
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from octavo.extras import import_extra
from octavo.nn.weight_cache import local_part
from octavo.train.config import Config
from octavo.train.gradients import accumulate_in_fp32
from octavo.train.moments import stored_parts, zero_moment

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CLASSES = {"fp32": "_AdamW", "8bit": "AdamW8bit", "fp8": "AdamWFp8"}  # of torchao.optim, by optimizer.state


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW over the parameters of `model` that are trained, with its whole state, all zero.

    Call it when the parameters are where they stay: on their device, and sharded. With FP32 weights and moments it is
    the fused implementation of torch (CPU and CUDA have one), otherwise torchao's.

    Raises:
        ImportError: the settings require torchao, and it is not installed.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    kind, rounds = config.optimizer.state, config.optimizer.weights == "bf16"
    optimizer: torch.optim.Optimizer
    if kind == "fp32" and not rounds:
        optimizer = _LocalAdamW(groups, fused=True, **common)
    else:
        purpose = "weights in BF16 and moments in eight bits need an optimizer of torchao"
        torchao = import_extra("torchao.optim", "optim", purpose)
        optimizer = getattr(torchao, _CLASSES[kind])(groups, bf16_stochastic_round=rounds, **common)
    for p in trained:
        optimizer.state[p] = _first_state(optimizer, p)
    if rounds:
        _draw_by_step(optimizer, config.seed)
    if config.accumulate > 1:
        accumulate_in_fp32(trained)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which its compiled step reads
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as PARAMETER.ENTRY -> tensor, in the memory of the optimizer: to restore it, write there.

    ENTRY is step, exp_avg or exp_avg_sq. A moment in eight bits is two tensors, exp_avg.codes and exp_avg.scale
    (`octavo.train.moments.stored_parts`). The tensors of a sharded parameter are sharded in the same way.
    """
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            if not optimizer.state[p]:  # torch's own AdamW before its first step
                optimizer.state[p] = _first_state(optimizer, p)
            state[f"{name}.step"] = optimizer.state[p]["step"]
            for moment in _MOMENTS:
                parts = stored_parts(p, optimizer.state[p][moment], _kind_of(optimizer))
                state |= {f"{name}.{moment}{suffix}": tensor for suffix, tensor in parts.items()}
    return state


class _LocalAdamW(torch.optim.AdamW):
    """AdamW whose step works on the parts that this rank holds of sharded parameters, gradients and moments.

    AdamW is element by element, so the numbers are the same. A fused step of DTensors takes some three times the host's
    time: for each tensor of the step's counts DTensor makes a layout anew.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # fills the lists
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


def _first_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    # torch's fused step counts on the device, torchao's compiled step on the CPU
    step = torch.zeros((), device=p.device if isinstance(optimizer, torch.optim.AdamW) else "cpu")
    moments = {moment: zero_moment(p, _kind_of(optimizer), signed=moment == "exp_avg") for moment in _MOMENTS}
    return {"step": step} | moments


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The value of optimizer.state in the settings that gave `optimizer`."""
    return next((kind for kind, name in _CLASSES.items() if name == type(optimizer).__name__), "fp32")


def _draw_by_step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Let a step draw random numbers that depend on `seed` and its number only, and leave the run's random state alone.

    Ranks that hold the same part of a weight must round it alike.
    """
    drawing = ExitStack()
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}

    def begin(*args: Any) -> None:
        step = int(next(iter(optimizer.state.values()))["step"])
        drawing.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
        torch.manual_seed((seed * 1_000_003 + step) % (1 << 63))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *args: drawing.close())
