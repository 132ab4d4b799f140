"""Autocast as it is on a GPU, for fake tensors of the CPU.

A trace runs on fake tensors. Where PyTorch has no CUDA, fake tensors of a GPU take no part in autograd, so the tensors
of a trace are the CPU's, and autocast has other lists for a CPU. During a trace the kernels below replace those of
autocast on the CPU. They cast by the lists of the GPU, and record the operation that they cast for, so that a trace
knows the reason of each dtype.

Autocast casts a weight once and uses it again where a layer is called twice. These kernels cast it at each call.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from octavo.tracing.autocast_lists import POLICIES, Policy

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class Decision(NamedTuple):
    """The treatment by autocast of the operation that runs now.

    Args:
        operation: as the model calls it, such as "softmax".
        policy: of `octavo.tracing.autocast_lists`.
        casting: whether the inputs are being cast, before the operation itself.
    """

    operation: str
    policy: Policy
    casting: bool


class GpuAutocast:
    """Autocast of a GPU for tensors of the CPU.

    Args:
        dtype: of matrix products, BF16 or FP16; None leaves autocast off.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._decisions: list[Decision] = []

    @property
    def decision(self) -> Decision | None:
        """The decision about the innermost operation that autocast handles; None where it handles none."""
        return self._decisions[-1] if self._decisions else None

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within the block, autocast on the CPU casts as on a GPU."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():  # PyTorch warns that kernels are replaced, which is the purpose
                warnings.simplefilter("ignore")
                for name in _autocast_operations():
                    library.impl(name, self._kernel(name), "AutocastCPU")
            yield
        finally:
            library._destroy()

    def enabled(self) -> torch.autocast:
        """Autocast to the dtype, as a context."""
        return torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def _kernel(self, name: str) -> Callable[..., Any]:
        base, _, overload = name.partition(".")
        operation: Any = getattr(getattr(torch.ops.aten, base), overload or "default")
        # Versions of PyTorch differ in a few operations, so the kernels of this one decide.
        policy = POLICIES.get(name) if _handles(name, "AutocastCUDA") else None
        if policy is None and operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            # Only the CPU's autocast handles it: on a GPU, its parts are cast.
            decompose: Callable[..., Any] = operation.decompose
            return decompose

        def run(*args: Any, **keywords: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_KEY):
                if policy is None:
                    return operation(*args, **keywords)
                with self._deciding(Decision(base, policy, True)):
                    args, keywords = self._cast(operation, policy, args, keywords)
                with self._deciding(Decision(base, policy, False)):
                    return operation(*args, **keywords)

        return run

    def _cast(self, operation: Any, policy: Policy, args: Any, keywords: Any) -> tuple[Any, dict[str, Any]]:
        if policy == "result":
            return _with_result_in_fp32(operation, args, keywords)
        tensors = [t for t in tree_leaves((args, keywords)) if _is_cast(t)]
        if policy == "lower":
            to = torch.get_autocast_dtype("cpu")
        elif policy == "fp32" or any(t.dtype == torch.float32 for t in tensors):
            to = torch.float32
        else:
            return args, keywords
        cast: Any = tree_map(lambda leaf: leaf.to(to) if _is_cast(leaf) else leaf, (args, keywords))
        return cast[0], cast[1]

    @contextmanager
    def _deciding(self, decision: Decision) -> Iterator[None]:
        self._decisions.append(decision)
        try:
            yield
        finally:
            self._decisions.pop()


def _autocast_operations() -> list[str]:
    """The names of the operations of this PyTorch that autocast handles, on a GPU or on the CPU."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name for name in names if _handles(name, "AutocastCUDA") or _handles(name, "AutocastCPU")]


def _handles(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def _is_cast(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


def _with_result_in_fp32(operation: Any, args: Any, keywords: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments, with dtype=float32 where the call gives no dtype and its first tensor is floating."""
    at = [argument.name for argument in operation._schema.arguments].index("dtype")
    given = args[at] if at < len(args) else keywords.get("dtype")
    if given is not None or not _is_cast(args[0]):
        return args, keywords
    if at < len(args):
        return (*args[:at], torch.float32, *args[at + 1 :]), keywords
    return args, {**keywords, "dtype": torch.float32}
