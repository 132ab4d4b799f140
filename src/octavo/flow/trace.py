"""Tracing a model: one forward and backward pass on fake tensors, under the autocast of a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.flow.recorder import Recorder
from octavo.flow.report import DtypeFlow, make_report
from octavo.nn.layer_limits import check_module
from octavo.tracing.fakes import Fakes, clear_errors
from octavo.tracing.gpu_autocast import GpuAutocast

_AUTOCAST = (torch.bfloat16, torch.float16, None)


def dtype_flow(
    model: nn.Module,
    *inputs: Any,
    autocast: torch.dtype | None = torch.bfloat16,
    loss: Callable[[Any], Tensor] | None = None,
    backward: bool = True,
    **keywords: Any,
) -> DtypeFlow:
    """Show in which dtypes the operations of a model run in a forward and backward pass, and why.

    The pass runs on fake tensors, without memory or arithmetic, so the model may be of any size, on any device, the
    meta device included; it stays as it is. Autocast casts by its lists for GPUs, also where there is none. The kernels
    that PyTorch chooses are those for a CPU: attention has another name on a GPU, and softmax, which is given
    dtype=float32 there, shows a cast.

    Args:
        model: of any library, converted by `octavo.convert` or not, in training or evaluation mode.
        *inputs, **keywords: of its forward pass; tensors on any device. Values of tensors are not known in the pass.
        autocast: `torch.bfloat16` or `torch.float16`; None runs without autocast.
        loss: makes a scalar from the output of the model. By default the gradients start at the output, or at
            `output.loss` where the model computes that.
        backward: False runs the forward pass alone, without gradients, as inference does.

    Returns:
        The operations, with totals and tables; `print` it.

    Raises:
        TypeError: `model` is not a module.
        ValueError: another dtype for autocast, a sharded model, one whose code depends on the values of tensors, or an
            output without gradient.
        RuntimeError: the pass fails, as it would with real tensors of these shapes and dtypes.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        >>> flow = octavo.dtype_flow(model, torch.randn(8, 64))
        >>> [(each.name, each.computes_in) for each in flow.operations if each.kind in ("product", "sum")][:2]
        [('addmm', 'BF16'), ('native_layer_norm', 'FP32')]
    """
    check_module(model, "dtype_flow")
    if autocast not in _AUTOCAST:
        raise ValueError(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}")
    fakes, gpu = Fakes(), GpuAutocast(autocast)
    tensors = fakes.tensors_of(model)
    parameters = {name: tensors[name] for name, _ in model.named_parameters()}
    recorder = Recorder(model, parameters, gpu, fakes)
    given = fakes.fake((inputs, keywords))
    both = _Pass(model, loss, gpu, backward)
    with clear_errors(model), fakes.mode, torch.set_grad_enabled(backward), recorder:
        torch.func.functional_call(both, {f"model.{name}": t for name, t in tensors.items()}, given[0], given[1])
    return make_report(model, recorder, autocast)


class _Pass(nn.Module):
    """A forward and backward pass, as one module: recomputation in the backward pass needs the fake parameters too."""

    def __init__(
        self, model: nn.Module, loss: Callable[[Any], Tensor] | None, gpu: GpuAutocast, backward: bool
    ) -> None:
        super().__init__()
        self.model, self.loss, self.gpu, self.backward = model, loss, gpu, backward

    def forward(self, *inputs: Any, **keywords: Any) -> None:
        with self.gpu.kernels():
            with self.gpu.enabled():
                output = self.model(*inputs, **keywords)
                output = output if self.loss is None else self.loss(output)
            if self.backward:
                _run_backward(self.model, output)


def _run_backward(model: nn.Module, output: Any) -> None:
    start = getattr(output, "loss", None)
    found = [start] if isinstance(start, Tensor) else tree_leaves(_fields(output))
    found = [t for t in found if isinstance(t, Tensor) and t.requires_grad]
    if not found:
        raise ValueError(
            f"the output of {type(model).__name__} has no gradient, so there is no backward pass: give a model whose "
            "parameters require one, or backward=False"
        )
    torch.autograd.backward(found, [torch.empty_like(t) for t in found])


def _fields(output: Any) -> Any:
    """The values of an output object of transformers, which is a dictionary of a class of its own."""
    return list(output.values()) if hasattr(output, "values") and not isinstance(output, Tensor) else output
