"""The registration of operations: with PyTorch, with Inductor, and for eager calls without the dispatcher.

It also has the checks of tensors that operations share, and the tag by which PyTorch finds compiled code on disk.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._guards import detect_fake_mode
from torch.autograd.graph import increment_version
from torch.compiler import config as compiler_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from octavo.numerics.formats import E2M1, Format, narrow_format
from octavo.numerics.qtensor import Cast, Granularity, parse_cast, parse_granularity
from octavo.ops.dispatch import COLUMNS
from octavo.ops.launching import TENSORS, launch, repeat
from octavo.version import __version__

# ---- Calls of our operations, without PyTorch's dispatcher where nothing traces, records or transforms the call.
#
# On a CPU a direct call of `multiply` takes 4.7 µs, and one through the dispatcher 6.1. A step makes hundreds of calls,
# and their time decides that of an eager step and of decoding.


PLAIN = TENSORS | {int, float, bool, str, torch.dtype, type(None)}
READERS: dict[Any, Callable[[str], Any]] = {
    Cast: parse_cast,
    Format: narrow_format,
    Granularity: cache(parse_granularity),
}
Function = Callable[..., Any]
Result = TypeVar("Result")
LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str, function: Function, key: str = "CompositeExplicitAutograd") -> Any:
    """Register a function under a dispatch key as the operation `octavo::` of this schema, and return what calls it. A
    call of an operation that mutates takes 1.2 µs of a CPU's time, and 18.6 by `torch.library.custom_op`."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, key)
    return getattr(torch.ops.octavo, name).default


class Operation(Generic[Result]):
    """A registered operation, which `operation` makes of its options. A call computes without the dispatcher where the
    result is the same as through it."""

    def __init__(self, function: Callable[..., Result], *, like: Function, check: Function = lambda *args: None,
                 runs: Function | None = None, inlines: Function | None = None, mutates: tuple[str, ...] = (),
                 after: bool = False, strided: tuple[str, ...] = (),
                 repeats: Function = lambda *args: True) -> None:  # fmt: skip
        self.name = function.__name__.strip("_").removesuffix("_reference")
        self.kernels = function.__module__.rpartition(".")[2] if runs else ""
        self.__doc__ = function.__doc__
        self.function, self.like, self.check, self.mutates, self.after = function, like, check, mutates, after
        self.runs: Any = runs
        self.repeats = repeats
        self._inlines = inlines or runs or (lambda *given: False)
        signature = inspect.signature(function)
        given = list(signature.parameters.values())
        self._stacked = given[0].annotation == list[Tensor]
        names: list[tuple[str, Any]] = []
        self._bundles: list[tuple[int, type[Any]]] = []  # the last first, so that the places of the others stay
        for p in given:
            if hasattr(p.annotation, "_fields"):
                self._bundles.insert(0, (len(names), p.annotation))
                names += get_type_hints(p.annotation).items()
            else:
                names.append((p.name, p.annotation))
        self._readers = [(i, READERS[kind]) for i, (_, kind) in enumerate(names) if kind in READERS]
        self._mutated = {i: name for i, (name, _) in enumerate(names) if name in mutates}
        tensors = [i for i, (_, kind) in enumerate(names) if kind in (Tensor, Tensor | None)]
        self._packed = [i for i in tensors if runs and names[i][0] not in (*strided, *mutates)]
        names = [(name, str if kind in READERS else kind) for name, kind in names]
        names += [("after", Tensor | None)] * after

        def run(*args: Any) -> Any:
            return self.fill(*args)

        parameters = [inspect.Parameter(name, given[0].kind, annotation=kind) for name, kind in names]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        self.overload = define(self.name + torch.library.infer_schema(run, mutates_args=mutates), run)
        torch.library.register_fake(self.overload, self._fake, lib=LIBRARY)
        if not mutates:
            torch.library.register_autograd(self.overload, partial(_no_gradient, self.name), lib=LIBRARY)
        OPERATIONS[self.name] = self.fill, self.inlines

    def __call__(self, *args: Any) -> Result:
        if torch.compiler.is_compiling():  # the fake implementation checks then
            return self.overload(*args)
        if _is_plain(self._values(args)):
            return self._results(args, plain=True)
        give_formulas()
        return self.overload(*args)

    def _values(self, args: Sequence[Any]) -> Sequence[Any]:
        return (*args[0], *args[1:]) if self._stacked else args

    def _results(self, args: Sequence[Any], plain: bool) -> Any:
        """The results. `plain` is what `_is_plain` says of the arguments."""
        first = args[0][0] if self._stacked else args[0]
        if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(first.device):  # Triton launches on the current device
                return self._results(args, plain)
        if self._mutated:  # autograd notices that a tensor it may have saved changes
            increment_version([args[i] for i in self._mutated if not args[i].is_inference()])
        args = self._pack(args)
        if plain and first.is_cuda and self.repeats(*args):
            return repeat(self.name, self._values(args), self._compute, args)
        return self._compute(args)

    def _compute(self, args: Sequence[Any]) -> Any:
        given = self._checked(args)
        return (self.kernel if self.kernels and self.runs(*given) else self.function)(*given)

    @cached_property
    def kernel(self) -> Function:
        """Imported, and Triton with it, when the first CUDA tensor comes."""
        return getattr(import_module(f"octavo.ops.kernels.{self.kernels}"), self.name)

    def inlines(self, *args: Any) -> bool:
        """True if the function consists of views, allocations and kernel launches for these arguments, or
        `compiles_alike`."""
        given = self._read(args)
        return not self.mutates and (bool(self._inlines(*given)) or compiles_alike(given))

    def fill(self, *args: Any) -> Any:
        """The results, with empty tensors for None: each result of a registered operation is a tensor."""
        values = self._values(args)
        results = self._results(args, _is_plain(values))
        if not isinstance(results, tuple):
            return results
        return tuple(values[0].new_empty(0) if result is None else result for result in results)

    def _pack(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, with contiguous tensors where there is a kernel."""
        for i in self._packed:
            if (tensor := args[i]) is not None and not tensor.is_contiguous():
                args = (*args[:i], tensor.contiguous(), *args[i + 1 :])
        return ([x.contiguous() for x in args[0]], *args[1:]) if self._stacked else args

    def _fake(self, *args: Any) -> Any:
        if not PLAIN.issuperset(map(type, self._values(args))):  # not tensors on the meta device: a graph is traced
            register_lowerings()
        return self.like(*self._checked(args))

    def _checked(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the function, which takes them. A kernel writes to contiguous tensors only."""
        given = self._read(args)
        self.check(*given)
        for i, name in self._mutated.items():
            if self.kernels and not args[i].is_contiguous():
                raise ValueError(f"{self.name} writes to {name}, which must be contiguous: call .contiguous() before")
        return given

    def _read(self, args: Sequence[Any]) -> list[Any]:
        given = list(args[:-1] if self.after else args)
        for i, read in self._readers:
            given[i] = read(given[i])
        for start, kind in self._bundles:
            end = start + len(kind._fields)
            given[start:end] = [kind(*given[start:end])]
        return given


def compiles_alike(given: list[Any]) -> bool:
    """True if Inductor may compile the reference: that of E2M1, for a GPU."""
    return tree_leaves(given)[0].is_cuda and any(getattr(each, "fmt", each) is E2M1 for each in given)


def _is_plain(values: Sequence[Any]) -> bool:
    """True if only the function sees the call.

    No mode or transform is on (fake tensors, torch.func, torch.jit.trace, a profiler of FLOPs). All tensors hold
    numbers and are of no subclass, and none gets a gradient.
    """
    return (
        not _len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
        and _get_tracing_state() is None
        and PLAIN.issuperset(map(type, values))
        and not values[0].is_meta
        and not (torch.is_grad_enabled() and any(type(value) in TENSORS and value.requires_grad for value in values))
    )


# ---- The FLOPs of products and attention, for PyTorch's counter and for traces: 2 for each product of two numbers.


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **out: Any) -> int:
    """The FLOPs of attention over whole rows of scores: q [B, H, T, D], k [B, G, S, D] and v [B, G, S, V]."""
    return 2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])


def attention_backward_flops(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **out: Any) -> int:
    """The FLOPs of its gradient: five products, of which one repeats that of the scores."""
    return 2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


_PRODUCTS = ("scaled_mm", "ordered_mm", "int8_mm", "weight_only_mm", "grouped_mm", "grouped_weight_only_mm")
FLOPS: dict[str, Function] = {  # of a call, by its arguments in the schema
    # a [M, K] times b [N, K], transposed, or rows of a times one of the matrices b [E, N, K]
    **dict.fromkeys(_PRODUCTS, lambda a, b, *_, **out: 2 * a.numel() * b.shape[-2]),
    "add_product": lambda y, u, b, **out: 2 * u.numel() * b.shape[0],
    # a [N, M] and b [K, M] for dw [E, N, K], without the columns of zeros that `aligned_groups` adds
    "grouped_mm_dw": lambda a, b, *_, out_val: 2 * b.shape[0] * (a.numel() - COLUMNS * out_val.shape[:2].numel()),
    **dict.fromkeys(("cached_attention", "ordered_attention", "fp8_attention"), attention_flops),
    "fp8_attention_backward": attention_backward_flops,
}


def give_formulas() -> None:
    """Give `FLOPS` to PyTorch's counters that are on: each has a copy of its registry."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    for mode in modes:
        if type(mode).__name__ == "_FlopCounterMode":
            mode.counter.flop_registry.update(_formulas())


def _formulas() -> dict[Any, Function]:
    return {getattr(torch.ops.octavo, name): FLOPS[name] for name in FLOPS.keys() & OPERATIONS.keys()}


# ---- The checks of casts and tensors that the operations share.


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_row_cast(operation: str, cast: Cast) -> None:
    """Raise ValueError unless `cast` is by row, rounded to nearest, with float32 scales and no relative floor.

    A cast with a history has granularity tensor, so it is refused too.
    """
    if not cast.by_row or cast.rounding != "nearest" or cast.relative_floor or cast.scale == "e8m0":
        raise ValueError(
            f"{operation} takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', no relative floor and "
            f"no history, got {cast}: change the cast, or run the operation in PyTorch and use octavo.ops.quantize"
        )


def check_nearest(operation: str, cast: Cast) -> None:
    """Raise ValueError unless `cast` is by row and rounded to nearest."""
    if not cast.by_row or cast.rounding != "nearest":
        raise ValueError(f"{operation} takes a cast by row, rounded to nearest, got {cast}")


def check_matrix(operation: str, x: Tensor) -> None:
    """Raise ValueError unless `x` is a matrix of a dtype in FLOATS."""
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise ValueError(f"{operation} takes a matrix of float32, bfloat16 or float16, got {x.dtype} {list(x.shape)}")


def check_tensor(name: str, t: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `t` is None or has this shape and one of these dtypes."""
    if t is not None and (t.shape != shape or t.dtype not in dtypes):
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected} {list(shape)}, got {t.dtype} {list(t.shape)}")


# ---- The tag by which PyTorch finds compiled code on disk.
#
# PyTorch saves compiled graphs on disk, and finds one again by the names and arguments of its operations. The kernels
# that an operation launches are not part of that. So the code of a graph that was compiled before a kernel changed
# would run after the change. A tag with the version of Octavo's source prevents that.


def source_version(root: Path) -> str:
    """A string that is another one after each change of a file of Octavo; `root` is the folder of the package."""
    changed = [(str(path), path.stat().st_mtime_ns) for path in sorted(root.rglob("*.py"))]
    return f"octavo {__version__} {sha256(repr(changed).encode()).hexdigest()}"


# The graphs that this process compiles get it, behind a tag of the user.
compiler_config.cache_key_tag = " ".join(
    filter(None, (compiler_config.cache_key_tag, source_version(Path(__file__).parents[1])))
)


# ---- Our operations in Inductor: compiled code launches their kernels directly instead of calling into Python.
#
# A call of an operation costs 50 to 100 µs of the host's time, more than many kernels run, and a launch that Inductor
# makes a tenth of that. An operation stays whole while its graph is made, merged (equal casts of one tensor become one)
# and partitioned. Inductor replaces it by its launches when it lowers the graph. An operation that runs its reference,
# or has dynamic sizes, stays a call: Inductor would compile a reference into code that rounds differently. That of E2M1
# is compiled: without a kernel it makes some forty passes over a tensor, and it rounds alike everywhere, since each
# division is a `quotient`.
#
# Inductor compiles the kernels again, with the options that it uses for its own. So a kernel that must not contract a
# product and a sum into one instruction says so itself (`device_math.add`), and kernels take no float arguments but
# constants (Inductor would pass a float64).
#
# Registering a lowering also avoids a slow path of torch 2.11 and 2.12. There, for each operation that it does not
# know, Inductor writes a log text with its arguments, their arguments, and so on down to the graph's inputs, which
# takes hours in a deep model. PyTorch's own scaled GEMM is such an operation, so it is registered too.


# With this, Inductor launches the kernels of users from C++, as it does its own. The variable must be set before the
# first compilation, which starts the processes that compile. Inductor may have read it already.
_STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
if f"TORCHINDUCTOR_{_STATIC_LAUNCH.upper()}" not in os.environ:
    os.environ[f"TORCHINDUCTOR_{_STATIC_LAUNCH.upper()}"] = "1"
    if hasattr(config := sys.modules.get("torch._inductor.config"), _STATIC_LAUNCH):
        setattr(config, _STATIC_LAUNCH, True)

OPERATIONS: dict[str, tuple[Function, Callable[..., bool]]] = {}
_lowering = False
# The launches of operations, as graphs: those with equal arguments, as in the blocks of a model, share one.
_launches: WeakKeyDictionary[Any, dict[tuple[Any, ...], torch.fx.GraphModule]] = WeakKeyDictionary()
_accesses: dict[tuple[Any, ...], Any] = {}  # to the arguments of a kernel, as PyTorch finds them


def operation(**options: Any) -> Callable[[Callable[..., Result]], Operation[Result]]:
    """Register a function as the operation `octavo::` of its name, and return what calls it: always by position.

    The function is the reference, `NAME_reference`, or one called `_NAME` that chooses an implementation. Its signature
    is the schema, in which nothing has a default. There a Cast (given as its `spec`), a Granularity and a Format (given
    by their names) are strings, and a NamedTuple stands for its fields. The first argument is a tensor, a list of
    tensors, or a NamedTuple that begins with a tensor. A result may be None: a direct call gives None, the registered
    operation an empty tensor.

    Args:
        like: gives the results without values, for the same arguments as the function; the next three take these too.
            Of a size it must not take `len`, which makes a constant of it in compiled code.
        check: raises ValueError for what the operation does not take.
        runs: True if the kernel runs, the function NAME in the file of `octavo.ops.kernels` with this file's name.
        inlines: True if the call consists only of views, allocations and kernel launches, so that Inductor may inline
            it. By default `runs`.
        mutates: the names of the arguments that the function writes to. Inductor does not inline such an operation.
        after: the schema ends with a tensor `after`, which is not read (`octavo.ops.transpose`).
        strided: the names of arguments that reference and kernel get as they are. The others are made contiguous, and
            those that are written to must be.
        repeats: False for arguments, those of the schema, of which a library or other operations compute the results.
            Such a call is not recorded (`octavo.ops.launching.repeat`): that would keep its memory until it ends.
    """
    return lambda function: Operation(function, **options)


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

    if counting := sys.modules.get("torch.utils.flop_counter"):  # not imported here, as it imports Triton: 0.2 s
        counting.flop_registry.update(_formulas())
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
    Attention is among these, even if it drops nothing. Restoring the state takes 80 µs of the host's time a call."""
    from torch._inductor.lowering import lowerings

    if draws_numbers(op, args, kwargs):
        return call(op, *args, **kwargs)
    return lowerings[op](*args, **{name: value for name, value in kwargs.items() if name != "rng_state"})


def draws_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a random operation draws numbers for these arguments; attention that drops nothing does not."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _place(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
    """The arguments of an operation, in memory and with the strides of the traced ones. An argument that several
    operations take, such as a scale of ones, is thus computed once, and not for each of them."""
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
    dynamic = any(isinstance(size, torch.SymInt) for leaf in leaves for size in getattr(leaf, "shape", [leaf]))
    if dynamic or not runs_kernels(*fakes):
        return call(*args)

    known = _launches.setdefault(V.graph, {})
    facts = [(tuple(t.shape), t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves]
    key = (call, spec, *facts)
    if key not in known:
        known[key] = _trace(function, leaves, where, spec)
    launches, inputs = known[key], tree_flatten(args)[0]
    with _analyses_cached():
        for i in where:
            inputs[i].realize()  # a compiled reference reads the numbers in their dtype
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

    global _lowering
    mode = detect_fake_mode(leaves)
    assert mode is not None
    _lowering = True
    try:
        with mode:
            return make_fx(run, select_decomp_table())(*(leaves[i] for i in where))
    finally:
        _lowering = False


@contextmanager
def _analyses_cached() -> Iterator[None]:
    """Inside, PyTorch finds out once a kernel which arguments it reads and writes, and not twice at each launch. For
    that it translates the kernel to Triton's intermediate representation, which takes some 20 ms."""
    from torch._higher_order_ops import triton_kernel_wrap

    names = ("identify_mutated_tensors", "identify_accessed_tensors")  # of the function until torch 2.12, and from then
    name = next(name for name in names if hasattr(triton_kernel_wrap, name))
    analyse = getattr(triton_kernel_wrap, name)

    def analyse_once(kernel: Any, args: dict[str, Any], *rest: Any) -> Any:
        own = kernel if hasattr(kernel, "params") else kernel.fn  # of an autotuner with one configuration
        constants = {parameter.name for parameter in own.params if parameter.is_constexpr}
        # The dtype of a tensor decides whether a kernel writes to it.
        kinds = {name: arg if name in constants else getattr(arg, "dtype", type(arg)) for name, arg in args.items()}
        key = (id(own), *kinds.items())
        if key not in _accesses:
            _accesses[key] = analyse(kernel, args, *rest)
        return _accesses[key]

    setattr(triton_kernel_wrap, name, analyse_once)
    try:
        yield
    finally:
        setattr(triton_kernel_wrap, name, analyse)
