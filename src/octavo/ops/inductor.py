"""What Inductor makes of our operations: the launches of their kernels, not a call into Python for each.

Such a call costs 50 to 100 µs of the host's time, more than many kernels run; a launch that Inductor makes costs a
tenth. An operation stays whole while its graph is made, merged and partitioned (equal casts of one tensor become one),
and is replaced by what it does when Inductor lowers it. That is for operations that run kernels, on static sizes:
elsewhere Inductor calls them as they stand, for a twin shall not be compiled into something that rounds otherwise.

Inductor compiles the kernels anew, with the options that it has for its own: a kernel that must not contract a product
and a sum says so itself (`device_math.add`), and has no float among its arguments but constants (it would be float64).

To register them also avoids a slowness of torch 2.11 and 2.12, whose Inductor describes each operation that is new to
it in a text for a log: its arguments, and theirs, down to the graph's inputs, which takes hours deep in a model.
PyTorch's scaled GEMM is as new to it as ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._library.custom_ops import CustomOpDef
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton
from torch.utils._pytree import tree_flatten, tree_unflatten

# Inductor launches kernels of its own from C++, and those of users so only if this is set before its first compilation,
# when it starts the processes that compile.
os.environ.setdefault("TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS", "1")

Function = Callable[..., Any]
OPERATIONS: dict[str, tuple[Function, Callable[..., bool]]] = {}
_lowering = False


def operation(
    name: str, runs_kernels: Callable[..., bool], mutates: tuple[str, ...] = ()
) -> Callable[[Function], CustomOpDef]:
    """Register a function as the operation `octavo::name`, of which `runs_kernels` says for which arguments it is no
    more than views, allocations and launches; one that writes to the arguments `mutates` never is."""

    def register(function: Function) -> CustomOpDef:
        OPERATIONS[name] = (function, runs_kernels)
        made = torch.library.custom_op(f"octavo::{name}", function, mutates_args=mutates)
        if not mutates:
            made.register_autograd(partial(_no_gradient, name))
        return made

    return register


def _no_gradient(name: str, ctx: Any, *grads: Any) -> Any:
    """The gradient of an operation that is called by itself; the layers of `octavo.nn` have gradients of their own."""
    raise RuntimeError(
        f"octavo.{name} has no gradient, and neither has a packed model: it is for inference. To train, take the BF16 "
        "model (octavo unpack makes one of a packed folder) and octavo.convert it"
    )


def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What to call with the arguments of a Triton kernel."""
    return (wrap_triton(kernel) if _lowering else kernel)[grid]


@cache
def tell_inductor() -> None:
    """Declare our operations to Inductor; called when a graph of ours is traced."""
    inductor = import_module("torch._inductor.lowering")
    ours = {getattr(torch.ops.octavo, name).default: how for name, how in OPERATIONS.items()}
    for op in (*ours, torch.ops.aten._scaled_mm_v2.default):
        if op not in inductor.lowerings:  # as a call, with the strides that eager code would pass
            tag = inductor.get_layout_constraint_tag(op, with_default=True)
            inductor.make_fallback(op, inductor.tag_to_layout_constraint(tag), warn=False)
    for op, how in ours.items():
        lower = partial(_lower, inductor, inductor.lowerings[op], *how)
        inductor.register_lowering(op, type_promotion_kind=None)(lower)


def _lower(inductor: Any, call: Function, function: Function, runs_kernels: Callable[..., bool], *args: Any) -> Any:
    """What Inductor has instead of an operation with these arguments: its launches, or the call."""
    graph = import_module("torch._inductor.virtualized").V.graph
    fakes = torch.fx.map_arg(graph.current_node.args, lambda node: node.meta["val"])
    leaves, spec = tree_flatten(fakes)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not _static(leaves[i] for i in where) or not runs_kernels(*fakes):
        return call(*args)

    def run(*tensors: Tensor) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(where, tensors, strict=True))
        return function(*tree_unflatten(filled.values(), spec))

    decompositions = import_module("torch._inductor.decomposition").select_decomp_table()
    mode = detect_fake_mode(leaves)
    assert mode is not None
    with mode, _kernels_wrapped():
        launches = make_fx(run, decompositions)(*(leaves[i] for i in where))
    inputs = tree_flatten(args)[0]
    return inductor.process_subgraph_nodes(launches, [inputs[i] for i in where])


def _static(tensors: Iterable[Tensor]) -> bool:
    return all(isinstance(size, int) for t in tensors for size in t.shape)


@contextmanager
def _kernels_wrapped() -> Iterator[None]:
    global _lowering
    _lowering = True
    try:
        yield
    finally:
        _lowering = False
