"""AdamW, the dtypes of its weights and moments, and its state as named tensors.

Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on matrices, none on norms and biases. A parameter
takes 16 bytes by default: weight, gradient and two moments m and v in FP32. torchao's optimizers lower that:

    state = "8bit"      m and v in a byte each, with an FP32 scale for 256 elements of a row; the values of a byte are
                        spaced as a float with a variable number of exponent bits (Dettmers et al., arXiv:2110.02861)
    state = "fp8"       the same with the values of e4m3
    weights = "bf16"    the weights in BF16; a step computes in FP32 and rounds stochastically, up with the probability
                        of the part that is cut off, or else every update below 1/512 of a weight would be lost
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from octavo.nn.parallel_weights import local_part
from octavo.train.config import MOMENT_BLOCK, Config
from octavo.train.host_masters import HostAdamW
from octavo.train.processes import mean_of_ranks
from octavo.util import import_extra

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CLASSES = {"fp32": "_AdamW", "8bit": "AdamW8bit", "fp8": "AdamWFp8"}  # of torchao.optim, by optimizer.state


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW over the trained parameters, with its whole state, all zero: torch's fused one, or torchao's. Call it when
    the parameters are on their device, and sharded."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    common: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    kind, rounds = config.optimizer.state, config.optimizer.weights == "bf16"
    optimizer: torch.optim.Optimizer
    if kind == "fp32" and not rounds:
        adamw = HostAdamW if config.optimizer.masters == "host" else _LocalAdamW
        optimizer = adamw(groups, fused=True, **common)
    else:
        purpose = "weights in BF16 and moments in eight bits need an optimizer of torchao"
        torchao = import_extra("torchao.optim", "optim", purpose)
        cls = _compiled_once(getattr(torchao, _CLASSES[kind]))
        optimizer = cls(groups, bf16_stochastic_round=rounds, **common)
    for p in trained:
        optimizer.state[p] = first_state(optimizer, p)
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
    ENTRY is step, exp_avg or exp_avg_sq, each with the suffixes of `stored_parts`."""
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            state[f"{name}.step"] = optimizer.state[p]["step"]
            for moment in _MOMENTS:
                parts = stored_parts(optimizer, p, optimizer.state[p][moment])
                state |= {f"{name}.{moment}{suffix}": tensor for suffix, tensor in parts.items()}
    return state


class _LocalAdamW(torch.optim.AdamW):
    """AdamW on the parts that this rank holds of sharded parameters, gradients and moments: it is element by element. A
    fused step of DTensors takes some three times the host's time: DTensor makes a layout anew for each step count."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # fills the lists
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


SHAPES = 10_000  # of parameters, at most: the update is compiled for each


def _compiled_once(base: Any) -> Any:
    """The optimizer `base` of torchao with a step that wraps its function for compilation once. torchao's own wraps it
    anew for each parameter in each step, which takes the host 0.3 to 0.9 ms."""
    adam = import_module("torchao.optim.adam")
    if not hasattr(adam, "single_param_adam"):  # another version of torchao
        return base
    update: Any = torch.compile(adam.single_param_adam, fullgraph=True, dynamic=False)

    class Optimizer(base):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            with torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
                for group in self.param_groups:
                    for p in [p for p in group["params"] if p.grad is not None]:
                        state, rounds = self.state[p], self.bf16_stochastic_round and p.dtype == torch.bfloat16
                        state["step"] += 1
                        moments = state["exp_avg"], state["exp_avg_sq"], None
                        settings = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
                        update(p.detach(), p.grad, state["step"], *moments, *settings, self.is_adamw, rounds)

    return Optimizer


def first_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before the first step, all zero."""
    # torch's fused step counts on the device, torchao's compiled step on the CPU
    step = torch.zeros((), device=p.device if isinstance(optimizer, torch.optim.AdamW) else "cpu")
    moments = {moment: zero_moment(optimizer, p, signed=moment == "exp_avg") for moment in _MOMENTS}
    return {"step": step} | moments


def _draw_by_step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Let a step draw by `seed` and its number only: ranks that hold the same part of a weight round it alike."""
    drawing = ExitStack()
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}

    def begin(*args: Any) -> None:
        step = int(next(iter(optimizer.state.values()))["step"])
        drawing.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
        torch.manual_seed((seed * 1_000_003 + step) % (1 << 63))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *args: drawing.close())


# ---- AdamW's moments with a byte an element and an FP32 scale a block, as the tensors of torchao.optim.
#
# Moments are quantized by the shape of the whole parameter, and a block lies within a row. So the ranks that share the
# rows of a parameter (FSDP2) hold the bytes that one process would hold, and checkpoints are the same for any number of
# ranks.


SMALLEST = 4096  # elements of a parameter whose moments are quantized, as in bitsandbytes


def zero_moment(optimizer: Any, p: Tensor, *, signed: bool) -> Tensor:
    """A moment of the parameter `p` before the first step; float32 if it is not quantized."""
    if not _quantizes(optimizer, p) or (local := local_part(p)).numel() == 0:
        return torch.zeros_like(p, dtype=torch.float32)
    numbers = local.new_zeros((), dtype=torch.float32).expand(local.shape)  # without their memory
    return _like(p, optimizer._subclass_zeros(numbers, signed, MOMENT_BLOCK), p.shape)


def stored_parts(optimizer: torch.optim.Optimizer, p: Tensor, moment: Tensor) -> dict[str, Tensor]:
    """The plain tensors that store a moment of `p`, by the suffix of their names. They share the memory of the moment.
    The suffix is "" for a float32 moment; otherwise ".codes", uint8 of the parameter's shape [..., K], and ".scale",
    float32 [..., K / MOMENT_BLOCK]."""
    if not _quantizes(optimizer, p):
        return {"": moment}
    local: Any = local_part(moment)
    scales = torch.Size([*p.shape[:-1], p.shape[-1] // MOMENT_BLOCK])
    if local.numel() == 0:  # a parameter with fewer rows than there are ranks
        empty = local.new_empty(*local.shape[:-1], local.shape[-1] // MOMENT_BLOCK)
        return {".codes": _like(p, local.to(torch.uint8), p.shape), ".scale": _like(p, empty, scales)}
    by_row = local.scale.view(*local.shape[:-1], -1)
    return {".codes": _like(p, local.codes.view(torch.uint8), p.shape), ".scale": _like(p, by_row, scales)}


def _quantizes(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    """True if the moments of `p` take a byte an element: each rank's part of every row is whole blocks."""
    if getattr(optimizer, "block_size", None) != MOMENT_BLOCK:  # torch's, or torchao's with moments in float32
        return False
    ways = 1
    if isinstance(p, DTensor):
        places = zip(p.placements, p.device_mesh.shape, strict=True)
        ways = math.prod(size for place, size in places if place.is_shard(p.ndim - 1))
    return p.ndim >= 2 and p.numel() >= SMALLEST and p.shape[-1] % (MOMENT_BLOCK * ways) == 0


def _like(p: Tensor, local: Tensor, shape: torch.Size) -> Tensor:
    """`local` as the part of a tensor of `shape` that is sharded as `p` is."""
    if not isinstance(p, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    # not from_local: it copies a tensor of offloaded parameters, which are on the CPU, to the mesh's device
    spec = DTensorSpec(p.device_mesh, p.placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


# ---- Gradients: those of BF16 weights add up in FP32, and the norm of all is limited.


def accumulate_in_fp32(parameters: Iterable[Tensor]) -> None:
    """Let the gradients of BF16 parameters add up in float32: sums in BF16 lose addends below 1/512 of them."""
    for p in parameters:
        if p.dtype == torch.bfloat16:
            p.grad_dtype = None  # any: autograd neither refuses a float32 gradient nor casts it
            p.register_post_accumulate_grad_hook(_widen)  # type: ignore[no-untyped-call]


def _widen(p: Tensor) -> None:
    # the first gradient; the next ones are added to this one, in its dtype
    if p.grad is not None and p.grad.dtype != torch.float32:
        # FSDP2 of torch 2.11 copies the gradient of an offloaded parameter without waiting
        if p.grad.device.type == "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        p.grad = p.grad.float()


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients by one factor, in place, so that their Euclidean norm over all ranks is at most `limit`.

    Returns the norm before, 0-dim, on their device. The parameters are plain, or sharded by FSDP2, which leaves no
    partial sums. `torch.nn.utils.clip_grad_norm_` takes more than twice the host's time on DTensors.
    """
    layouts: dict[Any, list[Tensor]] = defaultdict(list)
    for p in parameters:
        if (grad := p.grad) is not None:
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            layouts[layout, grad.dtype].append(local_part(grad))
    norm: Tensor = torch.linalg.vector_norm(torch.cat([_norms(grads, key[0]) for key, grads in layouts.items()]))
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for grads in layouts.values() if limit < math.inf else ():
        torch._foreach_mul_(grads, factor)
    return norm


def _norms(grads: list[Tensor], layout: tuple[Any, Any] | None) -> Tensor:
    """The norm [P] of each of P gradients, of which this rank holds `grads`, with one all-reduce for all of them."""
    norms = torch.stack(torch._foreach_norm(grads))
    if layout is None:
        return norms
    mesh, placements = layout
    sums = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    squares = DTensor.from_local(norms.square(), mesh, sums, run_check=False)
    return squares.full_tensor().sqrt().to(norms.device)


# ---- The losses and gradient norms of the last steps, read all at once, and the weights before the first bad gradient.
#
# A GPU would wait if the host read the norm in every step. So the step whose gradient is not finite must not change the
# weights before anybody knows: torch's fused AdamW takes a flag on the device, `found_inf`. From the first such step on
# the flag stays set, and the weights and moments stay as they were before that step, until the host reads the norms.


class StepNumbers(NamedTuple):
    """The number of a step, its mean loss over all ranks, and the norm of its gradient."""

    step: int
    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class RecentSteps:
    """The steps since the last call of `read`. `bad`, a bool [], is True if one of them had a gradient that was not
    finite. In FP16 the scaler decides, and `bad` is None."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Tensor, Tensor]] = []
        self.bad: Tensor | None = None

    def update(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        """Take the optimizer's step, unless a gradient since the last `read` was not finite."""
        if scaler.is_enabled():  # FP16: the scaler decides, for each step by itself
            scaler.step(optimizer)
            return
        bad = ~norm.isfinite()
        self.bad = bad if self.bad is None else bad | self.bad
        if isinstance(optimizer, torch.optim.AdamW):  # fused
            optimizer.found_inf = self.bad.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif not self.bad:  # an optimizer of torchao's takes no flag: read the norm
            optimizer.step()

    def note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Take the numbers of a step: `loss` 0-dim, of this rank; `norm` 0-dim, whole."""
        self._steps.append((step, loss, norm))

    def read(self) -> list[StepNumbers]:
        """The numbers of the steps since the last call, and forget them. Every rank must call this."""
        if not self._steps:
            return []
        steps, losses, norms = zip(*self._steps, strict=True)
        self._steps, self.bad = [], None
        return list(map(StepNumbers, steps, mean_of_ranks(torch.stack(losses)).tolist(), torch.stack(norms).tolist()))


# ---- The learning rate as a function of the step: linear warmup, then cosine or WSD.
#
# With peak `a`, end `b`, warmup `W` and `S` = decay_steps, for step s = 0, 1, ..., S - 1:
#
#     warmup  s < W    a * (s + 1) / W                                       the first step already learns
#     cosine           b + (a - b) * (1 + cos(pi * (s - W) / (S - W))) / 2
#     wsd              a while s < S - D, then a + (b - a) * (s - (S - D)) / D,  with D = decay * S
#
# Both curves reach `b` at s = S and stay there. The cosine is that of SGDR without restarts (Loshchilov and
# Hutter, arXiv:1608.03983, equation 5). Warmup-stable-decay is from MiniCPM (Hu et al., arXiv:2404.06395), which
# leaves the shape of the decay open; a linear one is used here.


def learning_rate(step: int, config: Config) -> float:
    """The learning rate of `step`, counted from 0."""
    peak, end = config.learning_rate, config.min_learning_rate
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if step >= config.decay_steps:
        return end
    if config.schedule == "cosine":
        progress = (step - config.warmup) / (config.decay_steps - config.warmup)
        return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2
    decaying = config.decay * config.decay_steps
    decayed = step - (config.decay_steps - decaying)
    return peak if decayed <= 0 else peak + (end - peak) * decayed / decaying
