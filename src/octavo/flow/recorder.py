"""Recording the operations of a forward and backward pass, each with its module.

A dispatch mode sees every operation after autograd and autocast, so the tensors that it gets have the dtypes that the
operation runs in. Hooks know the module in the forward pass. In the backward pass the current autograd node does: its
sequence number is that of the operation of the forward pass whose gradient it computes.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.flow.operation import Operation
from octavo.flow.reasons import backward_reason, forward_reason
from octavo.tracing.arithmetic import compute_dtype, floating, flops_of, kind_of, names_of, sum_dtype
from octavo.tracing.fakes import Fakes
from octavo.tracing.gpu_autocast import GpuAutocast

# Operations without arithmetic: they make tensors, or show the same numbers in another shape.
_SHAPES = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "empty_like", "empty", "new_empty"}
_SHAPES |= {"empty_strided", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full"}
_SHAPES |= {"full_like", "arange", "scalar_tensor", "device", "fill_", "zero_"}
_REARRANGED = ("clone", "cat", "stack", "transpose")  # a parameter stays one under these


class _Owner(NamedTuple):
    """The module, the operation of the forward pass and the parameters that an autograd node belongs to."""

    module: str = ""
    operation: str = ""
    parameters: tuple[str, ...] = ()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records operations.

    Args:
        model: whose modules the operations belong to.
        parameters: the parameters that take part, by their names.
        autocast: that the operations run under.
        fakes: of the trace.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], autocast: GpuAutocast, fakes: Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self.operations: list[Operation] = []
        self.called: set[str] = set()
        self._model, self._autocast = model, autocast
        self._parameters: dict[int, tuple[str, ...]] = {id(t): (name,) for name, t in parameters.items()}
        self._derived: list[Any] = []  # views and casts of parameters: alive, so that no other tensor gets their id
        self._stack: list[str] = []
        self._owners: dict[int, _Owner] = {}  # by the sequence number of the autograd node

    def __enter__(self) -> Self:
        self._hooks = ExitStack()
        for name, module in self._model.named_modules():
            # Calls are counted by a stack: a hook that is always called takes the name off again, when recomputation
            # stops early too.
            self._hooks.enter_context(module.register_forward_pre_hook(self._entering(name), prepend=True))
            self._hooks.enter_context(module.register_forward_hook(self._leaving, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)
            self.called.add(name)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, keywords = self._fakes.fake_meta((args, kwargs or {}))
        out = func(*args, **keywords)
        if func.namespace != "prim":
            self._record(func, args, keywords, out)
        return out

    def _record(self, func: Any, args: Any, keywords: Any, out: Any) -> None:
        name, namespace = func.overloadpacket.__name__, func.namespace
        hidden, kind = func.is_view or name in _SHAPES, kind_of(name, namespace)
        takes, gives = floating((args, keywords)), floating(out)
        read = [leaf for leaf in tree_leaves((args, keywords)) if id(leaf) in self._parameters]
        parameters = tuple(dict.fromkeys(p for leaf in read for p in self._parameters[id(leaf)]))
        owner, phase = self._place(name, parameters)
        if read and (func.is_view or kind == "cast" or name in _REARRANGED):
            self._derived.append(out)
            self._parameters |= {id(leaf): parameters for leaf in tree_leaves(out)}
        if hidden or not (takes or gives):
            return
        inputs, outputs = names_of(takes), names_of(gives)
        computed = compute_dtype(kind, inputs, outputs)
        if phase == "backward":
            reason = backward_reason(kind, inputs, outputs, owner.operation)
            parameters = parameters or owner.parameters
        else:
            wide = any(leaf.dtype == torch.float32 for leaf in read)
            decision, on = self._autocast.decision, self._autocast.dtype is not None
            reason = forward_reason(kind, inputs, outputs, computed, decision, reads_fp32=wide, autocast=on)
        flops = flops_of(func, kind, args, keywords, out)
        adds = sum_dtype(kind, computed)
        self.operations.append(
            Operation(name, owner.module, phase, kind, inputs, outputs, computed, adds, flops, reason, parameters)
        )

    def _place(self, name: str, parameters: tuple[str, ...]) -> tuple[_Owner, str]:
        """The owner and the phase of the operation `name`, which reads `parameters`.

        The engine of autograd turns gradients off, and recomputation turns them on again, except in the forward of a
        torch.autograd.Function, which a module calls.
        """
        node: Any = torch._C._current_autograd_node()
        known = _Owner() if node is None else self._owners.get(node._sequence_nr(), _Owner())
        if node is not None and not self._stack and not torch.is_grad_enabled():
            # The node of a torch.autograd.Function stands for all that its forward runs.
            is_function = isinstance(node, torch._C._FunctionBase)
            return known._replace(operation=node.name()) if is_function else known, "backward"
        module = self._stack[-1] if self._stack else _block_of(known.module)
        decision = self._autocast.decision
        owner = _Owner(module, name if decision is None else decision.operation, parameters)
        # Autograd has made the node of this operation just before. One without a gradient has no node of its own.
        self._owners.setdefault(torch.autograd._get_sequence_nr() - 1, owner)  # type: ignore[attr-defined]
        return owner, "forward" if node is None else "recomputation"


def _block_of(module: str) -> str:
    """The innermost repeated block that holds `module`: "layers.3" of "layers.3.attention.q"."""
    found = re.match(r"(.*\.)?\d+(?=\.|$)", module)
    return found[0] if found else module
