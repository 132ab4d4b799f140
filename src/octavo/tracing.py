"""The tracer: one forward and backward pass on fake tensors, recorded operation by operation.

Two views read its records: `octavo.nn.conversion_report` the FLOPs by parameter, and `octavo.inspection.dtype_report`
the dtypes by operation.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from octavo.ops.registration import FLOPS, attention_backward_flops, attention_flops

# ---- The arithmetic of an operation: its kind, its FLOPs, the dtype that it computes in, and the dtype of its sums.


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NAMES = {
    torch.float64: "FP64",
    torch.float32: "FP32",
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    **dict.fromkeys(FP8, "FP8"),
    torch.float8_e8m0fnu: "E8M0",
}
WIDTHS = ("FP64", "FP32", "BF16", "FP16", "FP8", "INT8")  # the widest first

_INTEGERS = ("_int_mm", "int8_mm")
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm", "_grouped_mm", "_int_mm"}
_PRODUCTS |= {"_scaled_grouped_mm", "_addmm_activation", "addbmm", "addr", "vdot"}
_PRODUCTS |= {name for name in FLOPS if "attention" not in name}  # of Octavo
_SUMS = {
    "sum", "mean", "var", "var_mean", "std", "std_mean", "prod", "logsumexp", "norm", "linalg_vector_norm",
    "native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm", "cumsum", "cumprod", "softmax",
    "_softmax", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "norm_quantize", "norm_backward",
    "activation_backward", "embedding_dense_backward", "_safe_softmax",
}  # fmt: skip
_COPIES = {"clone", "copy_", "cat", "stack", "embedding", "index", "index_select", "gather", "slice_backward"}
_COPIES |= {"select_backward", "transpose", "constant_pad_nd", "index_put", "scatter", "roll", "repeat", "fill_"}
_CASTS = {"_to_copy", "convert_element_type"}


def kind_of(name: str, namespace: str) -> str:
    """The kind of the operation `name`: product, convolution, attention, sum, cast, copy or elementwise."""
    if name in _PRODUCTS:
        return "product"
    if "convolution" in name or name.startswith("conv"):
        return "convolution"
    if "attention" in name or name in ("_transformer_encoder_layer_fwd", "append_kv"):
        return "attention"
    if name in _CASTS or (namespace == "octavo" and "quantize" in name and "norm" not in name) or "_scales" in name:
        return "cast"
    if name.removesuffix("_backward_data").removesuffix("_backward") in _SUMS or name in _SUMS:
        return "sum"
    return "copy" if name in _COPIES else "elementwise"


def floating(values: Any) -> list[Tensor]:
    """The floating tensors among the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dtype in NAMES]


def names_of(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The dtypes of tensors, each once, the widest first; formats of scales (E8M0) are left out."""
    found = {NAMES[t.dtype] for t in tensors}
    return tuple(name for name in WIDTHS if name in found)


def compute_dtype(name: str, kind: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """The dtype that an operation computes in: the operands' of a product, else the widest of inputs and outputs."""
    if name in _INTEGERS:
        return "INT8"
    if kind in ("product", "convolution", "attention") and inputs:
        return outputs[0] if "weight_only" in name else inputs[-1]  # not that of scales, or of the sums of a softmax
    return next((name for name in WIDTHS if name in (*inputs, *outputs)), "")


def flops_of(func: Any, kind: str, args: Any, keywords: Any, out: Any) -> int:
    """The FLOPs of a product, convolution or attention, by the formula of Octavo or of torch; 0 of other operations."""
    from torch.utils.flop_counter import flop_registry  # here: it imports much

    if kind not in ("product", "convolution", "attention"):
        return 0
    ours = FLOPS.get(func.overloadpacket.__name__) if func.namespace == "octavo" else None
    formula = ours or flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **keywords, out_val=out))
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if kind == "product":
        if [t.ndim for t in tensors[:2]] == [2, 2] and "grouped" in str(func):  # [K, T] x [T, N], T cut into groups
            return 2 * tensors[0].numel() * tensors[1].shape[-1]
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return 2 * results[0].numel() * tensors[0].shape[-1] if results and tensors else 0
    if any(name in str(func) for name in ("_for_cpu", "_fused_attention")):
        return (attention_backward_flops if "backward" in str(func) else attention_flops)(*tensors)
    return 0


@contextmanager
def _clear_errors(model: nn.Module) -> Iterator[None]:
    """Say in an error that it comes from a trace of `model`; PyTorch logs none of its own about fake tensors."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    logger, name = logging.getLogger("torch._subclasses.fake_tensor"), type(model).__name__
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{name} cannot be traced: its code depends on the values of a tensor ({error}), and a trace has shapes "
            "only. Give it inputs for which it looks at no values (no mask, fixed lengths), or trace a part of it"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(f"{name} fails in a trace with these inputs and dtypes: {error}") from error
    finally:
        logger.disabled = disabled


# ---- The tracer: each operation with its module, dtypes, FLOPs and parameters.
#
# A dispatch mode sees every operation after autograd and autocast, so the tensors that it gets have the dtypes that the
# operation runs in. Hooks know the module in the forward pass. In the backward pass the current autograd node does: its
# sequence number is that of the operation of the forward pass whose gradient it computes.


PHASES = ("forward", "recomputation", "backward")

# Operations without arithmetic: they make tensors, or show the same numbers in another shape.
_SHAPES = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "empty_like", "empty", "new_empty"}
_SHAPES |= {"empty_strided", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full"}
_SHAPES |= {"full_like", "arange", "scalar_tensor", "device", "fill_", "zero_"}


@dataclass(frozen=True)
class Operation:
    """One operation that ran in a forward or backward pass."""

    name: str  # in PyTorch's dispatcher, such as "mm"
    module: str  # that called it, or the operation whose gradient it computes; "" is the model itself and the loss
    phase: str  # "forward", "recomputation" (of activation checkpointing) or "backward"
    kind: str  # "product", "convolution", "attention", "sum", "elementwise", "copy" or "cast"
    inputs: tuple[str, ...]  # the dtypes of the floating tensors, the widest first: "FP32", "BF16", "FP16", "FP8"
    outputs: tuple[str, ...]  # alike
    computes_in: str  # the dtype of the operands of a product, else the widest of inputs and outputs
    adds_in: str  # the dtype of the partial sums on a GPU; "" for an operation that adds nothing up
    flops: int  # 2 for a multiplication and an addition; 0 unless a product, a convolution or attention
    reason: str  # why it runs in this dtype
    parameters: tuple[str, ...] = ()  # the names of the parameters that it reads
    weight: tuple[str, ...] = ()  # the names of those, stacked if there are several, that are an operand of the product
    rows: int = 0  # that `weight` is multiplied by; positions of the output in a convolution
    count: int = 1  # of equal operations of repeated modules, where one stands for all


class _Owner(NamedTuple):
    """The module, the operation of the forward pass and the parameters that an autograd node belongs to."""

    module: str = ""
    operation: str = ""
    parameters: tuple[str, ...] = ()


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which `model` runs on fake tensors of the CPU, which have shapes and dtypes, and no memory: on
    `tensors`, its parameters and buffers by all their names, and on arguments from `fake`. It records the `operations`,
    and the names of the modules that are `called`. In the context `autocast` it casts as on a GPU, to the dtype `to`;
    None leaves it off. Views, casts and quantized bytes of a parameter stand for it. A ValueError if one is sharded."""

    def __init__(self, model: nn.Module, to: torch.dtype | None) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # here: it imports sympy

        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._autocast = model, GpuAutocast(to)
        self.autocast = partial(torch.autocast, "cpu", to or torch.bfloat16, enabled=to is not None)
        self._fakes, self._class = FakeTensorMode(allow_non_fake_inputs=True), FakeTensor
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor too: while it lives, its id is its own
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if hasattr(parameter, "device_mesh"):
                raise ValueError(
                    f"a trace takes a model that is not sharded, and {name} is a DTensor: give the model before "
                    "fully_shard, on the meta device if it is large"
                )
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = self.fake(dict(named))
        self.operations: list[Operation] = []
        self.called: set[str] = set()
        self._parameters: dict[int, tuple[str, ...]] = {id(self.tensors[n]): (n,) for n, _ in model.named_parameters()}
        self._derived: list[Any] = []  # what stands for parameters: alive, so that no other tensor gets its id
        self._stack: list[str] = []
        self._owners: dict[int, _Owner] = {}  # by the sequence number of the autograd node

    def __enter__(self) -> Self:
        self._hooks = ExitStack()
        for context in (_clear_errors(self._model), self._autocast.kernels(), self._fakes):
            self._hooks.enter_context(context)
        for name, module in self._model.named_modules():
            # Calls are counted by a stack: a hook that is always called takes the name off again, when recomputation
            # stops early too.
            self._hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            self._hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def fake(self, value: Any, *, meta: bool = False) -> Any:
        """`value` with the same fake tensor for each same tensor in it, of any device; with `meta` for those of the
        meta device that are none, as an attribute of a module."""

        def of(leaf: Any) -> Any:
            plain = isinstance(leaf, Tensor) and (not meta or (leaf.is_meta and not isinstance(leaf, self._class)))
            if plain and id(leaf) not in self._known:
                fake: Tensor = self._class(self._fakes, leaf.detach().to("meta"), torch.device("cpu"))
                if isinstance(leaf, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=leaf.requires_grad)
                elif leaf.requires_grad:
                    fake.requires_grad_()
                self._known[id(leaf)] = leaf, fake
            return self._known[id(leaf)][1] if plain else leaf

        return tree_map(of, value)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)
        self.called.add(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, keywords = self.fake((args, kwargs or {}), meta=True)
        taken = args
        if func.overloadpacket.__name__ == "_grouped_mm":  # its fake implementation takes BF16 alone
            taken = tree_map(lambda x: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x, args)
        out = func(*taken, **keywords)
        if func.namespace != "prim":
            self._record(func, args, keywords, out)
        return out

    def _record(self, func: Any, args: Any, keywords: Any, out: Any) -> None:
        name, namespace = func.overloadpacket.__name__, func.namespace
        kind, takes, gives = kind_of(name, namespace), floating((args, keywords)), floating(out)
        read = [t for t in takes if id(t) in self._parameters]
        parameters = tuple(dict.fromkeys(p for t in read for p in self._parameters[id(t)]))
        owner, phase = self._place(name, parameters)
        # A copy of parameters alone stands for them; a cast has scales among its inputs.
        copied = func.is_view or (kind == "copy" and len(read) == len(takes) and name != "embedding")
        if read and (copied or kind == "cast"):
            self._derived.append(out)
            self._parameters |= {id(leaf): parameters for leaf in tree_leaves(out)}
        if func.is_view or name in _SHAPES or not (takes or gives):
            return
        inputs, outputs = names_of(takes), names_of(gives)
        computed = compute_dtype(name, kind, inputs, outputs)
        flops = flops_of(func, kind, args, keywords, out)
        operand = self._operand(name, args) if flops else None
        if "FP8" in (*inputs, *outputs):
            reason = _BY_RECIPE.get(kind, "the recipe: operands in FP8")
        elif phase == "backward":
            reason = _backward_reason(kind, inputs, outputs, owner.operation)
        elif (decision := self._autocast.decision) is not None:
            reason = _by_autocast(kind, inputs, outputs, computed, decision)
        else:
            wide = any(t.dtype == torch.float32 for t in read)
            reason = _by_model(kind, inputs, self._autocast.dtype, reads_fp32=wide)
        if phase == "backward":
            parameters = parameters or owner.parameters
        weight = () if operand is None else self._parameters[id(operand)]
        rows = 0 if operand is None else flops // (2 * max(operand.numel(), 1))
        # Products and reductions of PyTorch add up in FP32 on a GPU. cuBLAS may round partial sums of a product that it
        # splits along K (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction). Hopper's tensor cores keep
        # about 14 bits in an FP8 sum, which is added to an FP32 sum from time to time.
        adds = "" if kind in ("copy", "cast", "elementwise") or not computed else "FP32"
        adds = "FP64" if adds and computed == "FP64" else adds
        of_pass = name, owner.module, phase, kind, inputs, outputs
        self.operations.append(Operation(*of_pass, computed, adds, flops, reason, parameters, weight, rows))

    def _operand(self, name: str, args: Any) -> Tensor | None:
        """The operand of a product that stands for parameters: the last one, as layers multiply x by w."""
        operands = args[1:] if name.startswith(("add", "badd", "_addmm")) else args
        operands = operands[1:2] if "conv" in name else operands[:2]
        known = [t for t in operands if isinstance(t, Tensor) and id(t) in self._parameters]
        return known[-1] if known else None

    def _place(self, name: str, parameters: tuple[str, ...]) -> tuple[_Owner, str]:
        """The owner and the phase of the operation `name`, which reads `parameters`. The engine of autograd turns
        gradients off, and recomputation turns them on again, except in the forward of a torch.autograd.Function, which
        a module calls."""
        node: Any = torch._C._current_autograd_node()
        known = _Owner() if node is None else self._owners.get(node._sequence_nr(), _Owner())
        if node is not None and not self._stack and not torch.is_grad_enabled():
            # The node of a torch.autograd.Function stands for all that its forward runs.
            is_function = isinstance(node, torch._C._FunctionBase)
            return known._replace(operation=node.name()) if is_function else known, "backward"
        if self._stack:
            module = self._stack[-1]
        else:  # the innermost repeated block: "layers.3" of "layers.3.attention.q"
            block = re.match(r"(.*\.)?\d+(?=\.|$)", known.module)
            module = block[0] if block else known.module
        decision = self._autocast.decision
        owner = _Owner(module, name if decision is None else decision.operation, parameters)
        # Autograd has made the node of this operation just before. One without a gradient has no node of its own.
        self._owners.setdefault(torch.autograd._get_sequence_nr() - 1, owner)  # type: ignore[attr-defined]
        return owner, "forward" if node is None else "recomputation"


# ---- The operations that `torch.autocast` casts on a GPU, grouped by the dtype of their inputs.
#
# Autocast knows an operation by its name in the dispatcher ("softmax.int"), and casts floating tensors, float64
# excepted:
#
#     lower    inputs to BF16 or FP16: matrix products, convolutions and attention
#     fp32     inputs to FP32: powers, exponentials, norms and losses, whose sums and ranges 8 or 11 bits do not hold
#     result   nothing, but the result is computed in FP32: softmax and sums, which have an argument for it
#     promote  all inputs to the widest dtype among them
#
# Operations in none of the lists run in the dtype of their inputs; PyTorch widens an input if two dtypes meet.
#
# Source: the lists of ATen/autocast_mode.h, which comes with PyTorch and is read here, and a few operations that
# ATen/autocast_mode.cpp registers one by one.


Policy = Literal["lower", "fp32", "result", "promote"]
_LISTS: dict[str, Policy] = {
    "LOWER_PRECISION_FP": "lower", "FP32": "fp32", "FP32_SET_OPT_DTYPE": "result", "PROMOTE": "promote",
}  # fmt: skip
_OTHERS: dict[str, Policy] = {
    "cudnn_convolution": "lower", "cudnn_convolution_transpose": "lower", "_cudnn_rnn": "lower",
    "norm.Scalar": "fp32", "norm.ScalarOpt_dim": "fp32", "norm.names_ScalarOpt_dim": "fp32",
}  # fmt: skip


@cache
def autocast_policies() -> dict[str, Policy]:
    """The policy of each operation that autocast casts on a GPU."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not path.is_file():
        raise RuntimeError(f"{path} has the lists of autocast and is missing: install PyTorch with its headers")
    header, found = path.read_text(), dict(_OTHERS)
    for name, policy in _LISTS.items():
        _, _, entries = header.partition(f"#define AT_FORALL_{name}(_)")
        for entry in re.findall(r"_\((\w+)(?:, (\w+))?\)", entries.partition("\n\n")[0]):
            found[".".join(filter(None, entry))] = policy
    return found


# ---- Autocast as it is on a GPU, for fake tensors of the CPU.
#
# A trace runs on fake tensors. Where PyTorch has no CUDA, fake tensors of a GPU take no part in autograd, so the
# tensors of a trace are the CPU's, and autocast has other lists for a CPU. During a trace the kernels below replace
# those of autocast on the CPU. They cast by the lists of the GPU, and record the operation that they cast for, so that
# a trace knows the reason of each dtype.
#
# Autocast casts a weight once and uses it again where a layer is called twice. These kernels cast it at each call.


class Decision(NamedTuple):
    """The treatment by autocast of the operation that runs now."""

    operation: str  # as the model calls it, such as "softmax"
    policy: Policy


class GpuAutocast:
    """Autocast of a GPU for tensors of the CPU. Products run in `dtype`, BF16 or FP16; None leaves autocast off."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.decision: Decision | None = None  # about the innermost operation that autocast handles

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within the block, autocast on the CPU casts as on a GPU."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():  # PyTorch warns that kernels are replaced, which is the purpose
                warnings.simplefilter("ignore")
                every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
                for name in (name.removeprefix("aten::") for name in every):
                    if _handles(name, "AutocastCUDA") or _handles(name, "AutocastCPU"):
                        library.impl(name, self._kernel(name), "AutocastCPU")
            yield
        finally:
            library._destroy()

    def _kernel(self, name: str) -> Callable[..., Any]:
        base, _, overload = name.partition(".")
        operation: Any = getattr(getattr(torch.ops.aten, base), overload or "default")
        # Versions of PyTorch differ in a few operations, so the kernels of this one decide.
        policy = autocast_policies().get(name) if _handles(name, "AutocastCUDA") else None
        if policy is None and operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            # Only the CPU's autocast handles it: on a GPU, its parts are cast.
            return operation.decompose

        autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

        def run(*args: Any, **keywords: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(autocast):
                if policy is None:
                    return operation(*args, **keywords)
                before, self.decision = self.decision, Decision(base, policy)
                try:
                    args, keywords = self._cast(operation, policy, args, keywords)
                    return operation(*args, **keywords)
                finally:
                    self.decision = before

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
    return args[:at], {**keywords, "dtype": torch.float32}  # no argument by position comes after it


# ---- Why an operation runs in its dtype, in a sentence.


_BY_RECIPE = {"cast": "the recipe casts it to FP8", "copy": "the recipe moves FP8 bytes"}


def _by_model(kind: str, inputs: Sequence[str], autocast: torch.dtype | None, *, reads_fp32: bool) -> str:
    """The reason where no autocast casts. `reads_fp32`: a parameter in FP32 is among the inputs."""
    if kind == "cast":
        return "the model casts it"
    where = "no autocast" if autocast is None else "autocast leaves it alone"
    if len(inputs) > 1:
        return f"{where}: the widest dtype of the inputs, {'a parameter in FP32' if reads_fp32 else inputs[0]}"
    return f"{where}: the dtype of the inputs{', a parameter in FP32 among them' if reads_fp32 else ''}"


def _by_autocast(kind: str, inputs: Sequence[str], outputs: Sequence[str], computed: str, decision: Decision) -> str:
    name = decision.operation
    if kind == "cast" and inputs != outputs:
        return f"autocast casts an input of {name}"
    if decision.policy == "lower" and computed == "FP32":
        return f"part of {name} as a CPU computes it; a GPU has one kernel"
    if decision.policy == "lower":
        return f"autocast runs {name} in {computed}"
    if decision.policy == "promote":
        return f"autocast runs {name} in the widest dtype of its inputs"
    if computed != "FP32":
        return f"{name} is called with a dtype, which autocast leaves"
    return f"autocast runs {name} in FP32"


def _backward_reason(kind: str, inputs: Sequence[str], outputs: Sequence[str], forward: str) -> str:
    """The reason in a backward pass, in which autocast is off: gradients have the dtypes of the forward pass. `forward`
    is the operation whose gradient it computes; "" if several ones, or none, are known."""
    if kind == "cast" and inputs and outputs and inputs != outputs:
        return f"gradient of a cast to {inputs[0]}"
    return f"gradient of {forward}, in the dtype that it ran in" if forward else "adds up gradients, in their dtype"
