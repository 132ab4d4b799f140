"""Our operations in Inductor: compiled code launches their kernels directly instead of calling into Python.

A call of an operation costs 50 to 100 µs of the host's time, more than many kernels run, and a launch that Inductor
makes a tenth of that. An operation stays whole while its graph is made, merged (equal casts of one tensor become one)
and partitioned. Inductor replaces it by its launches when it lowers the graph. An operation that runs its reference, or
has dynamic sizes, stays a call: Inductor would compile a reference into code that rounds differently.

Inductor compiles the kernels again, with the options that it uses for its own. So a kernel that must not contract a
product and a sum into one instruction says so itself (`device_math.add`), and kernels take no float arguments but
constants (Inductor would pass a float64).

Registering a lowering also avoids a slow path of torch 2.11 and 2.12. There, for each operation that it does not know,
Inductor writes a log text with its arguments, their arguments, and so on down to the graph's inputs, which takes hours
in a deep model. PyTorch's own scaled GEMM is such an operation, so it is registered too.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from octavo.ops.cache_tag import add_source_version
from octavo.ops.eager import Operation, on_device_of_first
from octavo.ops.launching import launch

# With this, Inductor launches the kernels of users from C++, as it does its own. The variable must be set before the
# first compilation, which starts the processes that compile. Inductor may have read it already.
_STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
if f"TORCHINDUCTOR_{_STATIC_LAUNCH.upper()}" not in os.environ:
    os.environ[f"TORCHINDUCTOR_{_STATIC_LAUNCH.upper()}"] = "1"
    if hasattr(config := sys.modules.get("torch._inductor.config"), _STATIC_LAUNCH):
        setattr(config, _STATIC_LAUNCH, True)

add_source_version()

Function = Callable[..., Any]
OPERATIONS: dict[str, tuple[Function, Callable[..., bool]]] = {}
_lowering = False
# The launches of operations, as graphs: those with equal arguments, as in the blocks of a model, share one.
_launches: WeakKeyDictionary[Any, dict[tuple[Any, ...], torch.fx.GraphModule]] = WeakKeyDictionary()
_accesses: dict[tuple[Any, ...], Any] = {}  # to the arguments of a kernel, as PyTorch finds them


def _never(*args: Any) -> bool:
    return False


def operation(
    name: str, runs_kernels: Callable[..., bool] = _never, mutates: tuple[str, ...] = ()
) -> Callable[[Function], Operation]:
    """Register a function as the operation `octavo::name`, and return what calls it.

    Args:
        name: of the operation.
        runs_kernels: takes the operation's arguments. True if, for these, the function consists only of views,
            allocations and kernel launches, so that Inductor may inline it. By default it never does.
        mutates: the names of the arguments that the function writes to. Inductor must not inline such an operation, so
            it keeps the default of `runs_kernels`.

    A function may return None among its results: a direct call gives None, the registered operation an empty tensor.
    """

    def register(function: Function) -> Operation:
        filled = _with_empty(function)
        OPERATIONS[name] = (filled, runs_kernels)

        @wraps(function)
        def run(*args: Any) -> Any:
            return on_device_of_first(filled, *args)

        op = torch.library.custom_op(f"octavo::{name}", run, mutates_args=mutates)
        if not mutates:
            op.register_autograd(partial(_no_gradient, name))
        parameters = list(inspect.signature(function).parameters)
        return Operation(function, op, tuple(map(parameters.index, mutates)))

    return register


def _with_empty(function: Function) -> Function:
    """`function` with empty tensors where it returns None: each result of a registered operation is a tensor."""

    @wraps(function)
    def run(*args: Any) -> Any:
        results = function(*args)
        if not isinstance(results, tuple):
            return results
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        return tuple(first.new_empty(0) if result is None else result for result in results)

    return run


def _no_gradient(name: str, ctx: Any, *grads: Any) -> Any:
    """The gradient of an operation that is called by itself. The layers of `octavo.nn` define their own gradients."""
    raise RuntimeError(
        f"octavo.{name}, called by itself, has no gradient: call a layer of octavo, which defines one. The weights of "
        "a packed model are frozen: octavo unpack makes a BF16 model of it, and octavo.convert prepares that to train"
    )


def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
    """A function that launches `kernel` on `grid`: call it with the kernel's arguments."""
    return wrap_triton(kernel)[grid] if _lowering else partial(launch, kernel, grid)


@cache
def register_lowerings() -> None:
    """Register our operations with Inductor, once. The fake implementations call it while a graph is traced."""
    from torch._inductor import lowering

    ours = {getattr(torch.ops.octavo, name).default: functions for name, functions in OPERATIONS.items()}
    for op in (*ours, torch.ops.aten._scaled_mm_v2.default):
        if op not in lowering.lowerings:
            lowering.make_fallback(op, _place, warn=False)
    for op, functions in ours.items():
        lower = partial(_lower, lowering.lowerings[op], *functions)
        lowering.register_lowering(op, type_promotion_kind=None)(lower)
    restoring = torch._prims.rng_prims.graphsafe_run_with_rng_state
    lower = partial(_lower_random, lowering.lowerings[restoring])
    lowering.register_lowering(restoring, type_promotion_kind=None)(lower)


def _lower_random(call: Function, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower an operation that draws random numbers, and that the backward pass computes again with the same state.

    Attention is among these, even if it drops nothing. Restoring the state takes 80 µs of the host's time a call.
    """
    from torch._inductor.lowering import lowerings

    if draws_numbers(op, args, kwargs):
        return call(op, *args, **kwargs)
    return lowerings[op](*args, **{name: value for name, value in kwargs.items() if name != "rng_state"})


def draws_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random operation draws numbers for these arguments: attention that drops nothing does not."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _place(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
    """The arguments of an operation, in memory and with the strides of the traced ones.

    An argument that several operations take, such as a scale of ones, is thus computed once, and not for each of them.
    """
    from torch._inductor.lowering import constrain_to_fake_tensors

    fake_args, fake_kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda input_node: input_node.meta["val"])
    for leaf in tree_leaves((args, kwargs)):
        if hasattr(leaf, "realize"):
            leaf.realize()
    return constrain_to_fake_tensors(args, kwargs, fake_args, fake_kwargs)


def _lower(call: Function, function: Function, runs_kernels: Callable[..., bool], *args: Any) -> Any:
    """Lower an operation with these arguments: to its launches if it runs kernels, else to the call of it."""
    from torch._inductor.lowering import process_subgraph_nodes
    from torch._inductor.virtualized import V

    fakes = torch.fx.map_arg(V.graph.current_node.args, lambda node: node.meta["val"])
    leaves, spec = tree_flatten(fakes)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not _static(leaves[i] for i in where) or not runs_kernels(*fakes):
        return call(*args)

    known = _launches.setdefault(V.graph, {})
    key = (call, spec, *(_facts(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
    if key not in known:
        known[key] = _trace(function, leaves, where, spec)
    launches, inputs = known[key], tree_flatten(args)[0]
    with _analyses_cached():
        result = process_subgraph_nodes(launches, [inputs[i] for i in where])
    for node in launches.graph.nodes:  # as if they had not been lowered: the next equal operation lowers them again
        V.graph.env.pop(node, None)
    return result


def _trace(function: Function, leaves: list[Any], where: list[int], spec: Any) -> torch.fx.GraphModule:
    """The launches of `function` as a graph; its inputs are the tensors among the `leaves` of its arguments."""
    from torch._inductor.decomposition import select_decomp_table

    def run(*tensors: Tensor) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(where, tensors, strict=True))
        return function(*tree_unflatten(filled.values(), spec))

    mode = detect_fake_mode(leaves)
    assert mode is not None
    with mode, _kernels_wrapped():
        return make_fx(run, select_decomp_table())(*(leaves[i] for i in where))


def _facts(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, t.device


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


@contextmanager
def _analyses_cached() -> Iterator[None]:
    """Inside, PyTorch finds out once a kernel which arguments it reads and writes, and not twice at each launch.

    For that it translates the kernel to Triton's intermediate representation, which takes some 20 ms.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    names = ("identify_mutated_tensors", "identify_accessed_tensors")  # of the function until torch 2.12, and from then
    name = next(name for name in names if hasattr(triton_kernel_wrap, name))
    analyse = getattr(triton_kernel_wrap, name)

    def analyse_once(kernel: Any, args: dict[str, Any], *rest: Any) -> Any:
        own = kernel if hasattr(kernel, "params") else kernel.fn  # of an autotuner with one configuration
        constants = {parameter.name for parameter in own.params if parameter.is_constexpr}
        key = (id(own), *((name, arg if name in constants else _kind(arg)) for name, arg in args.items()))
        if key not in _accesses:
            _accesses[key] = analyse(kernel, args, *rest)
        return _accesses[key]

    setattr(triton_kernel_wrap, name, analyse_once)
    try:
        yield
    finally:
        setattr(triton_kernel_wrap, name, analyse)


def _kind(arg: Any) -> Any:
    """All of an argument that decides whether a kernel writes to it."""
    return None if arg is None else getattr(arg, "dtype", type(arg))
