"""The products of a forward pass with their FLOPs: which parameter each multiplies, and by how many rows.

The pass runs on fake tensors. A dispatch mode sees every product; views, casts and quantized bytes of a parameter
stand for the parameter itself. Gradients are on, so that a module in evaluation mode takes none of PyTorch's fast
paths, which compute a whole layer in one operation.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from octavo.tracing.arithmetic import floating, flops_of, kind_of
from octavo.tracing.fakes import Fakes, clear_errors
from octavo.tracing.gpu_autocast import GpuAutocast


@dataclass(frozen=True)
class Product:
    """A matrix product, a convolution or an attention.

    Args:
        parameters: ids of the parameters that it multiplies, stacked if there are several; none in a product of
            activations.
        rows: that the parameter is multiplied by; positions of the output in a convolution.
        flops: a multiplication and an addition count 2.
    """

    parameters: tuple[int, ...]
    rows: int
    flops: int


@dataclass(frozen=True)
class ForwardPass:
    """The products of a forward pass, and the modules that it called."""

    products: tuple[Product, ...]
    called: frozenset[str]

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.products)

    def rows_of(self, parameter: Tensor) -> int:
        """The rows that `parameter` is multiplied by, in the largest of its products; 0 if none reads it."""
        return max((each.rows for each in self.products if id(parameter) in each.parameters), default=0)

    def flops_by_parameter(self, parameters: Sequence[Tensor]) -> dict[int, float]:
        """The FLOPs of each parameter, by its id. Stacked parameters share those of their product by their sizes."""
        sizes = {id(parameter): parameter.numel() for parameter in parameters}
        flops = dict.fromkeys(sizes, 0.0)
        for each in self.products:
            together = sum(sizes[i] for i in each.parameters)
            for i in each.parameters:
                flops[i] += each.flops * sizes[i] / together
        return flops


def trace_forward(model: nn.Module, batch: Any) -> ForwardPass:
    """The products of `model(batch)`, traced without memory or arithmetic; `model` stays as it is.

    Args:
        model: converted or not, on any device.
        batch: a tensor, a sequence of positional arguments, or a mapping of keyword arguments.

    Raises:
        ValueError: the model is sharded, or its code depends on the values of tensors.
        RuntimeError: the pass fails, as it would with real tensors of these shapes.
    """
    fakes, gpu = Fakes(), GpuAutocast(torch.bfloat16)
    tensors = fakes.tensors_of(model)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            tensors[name].requires_grad_()  # a frozen layer in evaluation mode would take a fast path
    of: dict[int, tuple[int, ...]] = {
        id(tensors[name]): (id(parameter),) for name, parameter in model.named_parameters()
    }
    recorder, called = _Products(of, fakes), set[str]()
    args, keywords = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(_note(called, name)))
        with clear_errors(model), fakes.mode, torch.enable_grad(), gpu.kernels(), gpu.enabled(), recorder:
            torch.func.functional_call(model, tensors, *fakes.fake((args, keywords)))
    return ForwardPass(tuple(recorder.products), frozenset(called))


def _note(called: set[str], name: str) -> Any:
    return lambda module, args: called.add(name)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records products. `parameters` has the parameters that a fake tensor stands for, by its id."""

    def __init__(self, parameters: dict[int, tuple[int, ...]], fakes: Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters, self._fakes = parameters, fakes
        self._alive: list[Any] = []  # so that no other tensor gets the id of a view
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, keywords = self._fakes.fake_meta((args, kwargs or {}))
        name = func.overloadpacket.__name__
        grouped = name == "_grouped_mm"  # whose fake implementation takes BF16 alone
        out = func(*(tree_map(_in_bf16, args) if grouped else args), **keywords)
        kind = kind_of(name, func.namespace)
        if flops := flops_of(func, kind, args, keywords, out):
            operand = self._operand(name, args)
            parameters = () if operand is None else self._parameters[id(operand)]
            rows = 0 if operand is None else flops // (2 * max(operand.numel(), 1))
            self.products.append(Product(parameters, rows, flops))
        elif func.is_view or kind in ("cast", "copy"):
            self._follow(floating((args, keywords)), out)
        return out

    def _operand(self, name: str, args: Any) -> Tensor | None:
        """The operand of a product that stands for parameters: the last one, as layers multiply x by w."""
        operands = args[1:] if name.startswith(("add", "badd", "_addmm")) else args
        operands = operands[1:2] if "conv" in name else operands[:2]
        known = [t for t in operands if isinstance(t, Tensor) and id(t) in self._parameters]
        return known[-1] if known else None

    def _follow(self, inputs: Sequence[Tensor], out: Any) -> None:
        """Let the results of a view, copy or cast of parameters alone stand for the parameters."""
        found = [self._parameters.get(id(t)) for t in inputs]
        if found and all(found):
            self._alive.append(out)
            parameters = tuple(dict.fromkeys(i for each in found for i in each or ()))
            self._parameters |= {id(leaf): parameters for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}


def _in_bf16(leaf: Any) -> Any:
    return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
