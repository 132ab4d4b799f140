"""Check a live model of any library: what its linear layers compute, and the tensors that they compute with.

    y[T,N] = x @ w^T + b         dx[T,K] = dy @ w          w: dequantized, in float32 (`live_weights`)
    u[t,n] = sqrt(sum_k (x[t,k] w[n,k])^2)                 the size of a sum of products with random signs
    error  = worst n of sqrt(sum_t (y - y_ref)^2 / sum_t u^2), and of dx alike

Where products cancel y is small, and operands in eight bits give it a large relative error. Against u the error is that
of the operands: 0.04 in e4m3, and about 1 where the layer multiplied another weight, or zeros.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.hf.meta_model import arguments_of, random_inputs
from octavo.inspection.dtype_report import Table, as_text, patterns_of
from octavo.nn.linear import RecipeLayer
from octavo.nn.module_tools import check_module
from octavo.tracing import compute_dtype, floating, flops_of, kind_of, names_of
from octavo.util import plural
from octavo.verification.live_weights import Fault, Held, held, weight_faults

_REMEDIES = {
    "scale": "load the scale from the folder of the weight; with source, check compares both",
    "file": "load the tensor again, by a loader that knows the format of the folder",
    "y": "refresh the copy of the weight that the layer multiplies, or the scale that it applies",
    "dx": "make the transposed copy of the weight again after loading",
    "gradient": "give the layer a backward pass (dx = dy @ w), or train the model dequantized",
    "precision": "convert the model itself, such as by octavo.convert(model), and check it again",
}
_ROWS = 256  # of x, y, dy and dx that are compared
_SMALL = 2**20  # elements of a buffer that a pass may change: statistics and scales, no weights


@dataclass
class LiveReport:
    """What is wrong with a live model, worst first; printed, it is a table."""

    faults: list[Fault]
    remarks: list[str]
    verdict: str  # the numbers of faults and of layers compared, and the dtypes of products

    @property
    def ok(self) -> bool:
        return not self.faults

    def table(self) -> Table:
        """The faults, each with its remedy."""
        rows = [(f.kind, f.where, str(f.count), f"{f.error:.2g}", f.message, _REMEDIES[f.kind]) for f in self.faults]
        columns = ("kind", "where", "count", "error", "what is wrong", "remedy")
        return Table("faults, worst first", columns, rows, ("count", "error"), columns[-2:])

    def __repr__(self) -> str:
        return "\n".join([*([] if self.ok else [as_text(self.table())]), *self.remarks, self.verdict])


def check(
    model: nn.Module,
    source: str | os.PathLike[str] | None = None,
    batch: Any = None,
    *,
    precision: Literal["fp8"] | None = None,
) -> LiveReport:
    """Find what is silently wrong with a live model of any library, by one forward and backward pass.

    It compares y and dx of each linear layer with its dequantized weight, eight-bit weights with their scales, and
    tensors in memory with the folder's. It follows gradients, and counts the dtypes multiplied. The model stays as it
    is. What another module computes from a layer's weight is not compared.

    Args:
        model: not sharded, in the mode in which it is used. Lost gradients are a fault in training alone.
        source: the folder that it was loaded from, if it was not trained since.
        batch: a tensor, a tuple, or a dictionary of keywords. None gives a model of transformers random inputs.
        precision: "fp8" if products must run in it. accelerate's environment variable says so too.

    Returns:
        The faults, worst first, each with its remedy; `print` it.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it is sharded, or needs a batch; the folder is damaged (ArtifactError); another precision.

    Example:

        print(octavo.check(model, "models/qwen-fp8"))
    """
    check_module(model, "check")
    if precision not in (None, "fp8"):
        raise ValueError(f'precision must be "fp8" or None, got {precision!r}')
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ValueError("check takes a model that is not sharded: give the model before fully_shard")
    run = _Run(model)
    run.step(*_arguments(model, batch))
    found = [*weight_faults(model, None if source is None else Path(source), run.remarks), *run.faults()]
    if "fp8" in (precision, os.environ.get("ACCELERATE_MIXED_PRECISION")) and not run.flops["FP8"]:
        ran = " and ".join(run.flops) or "no dtype"
        found.append(
            Fault("precision", "(model)", f"FP8 was asked for, and no product ran in it: all ran in {ran}", 1.0)
        )
    groups: dict[tuple[str, str], list[Fault]] = {}
    patterns = patterns_of(model)
    for fault in found:
        name, _, leaf = fault.where.rpartition(".")
        groups.setdefault((fault.kind, f"{patterns.get(name, name)}.{leaf}"), []).append(fault)
    worst = [replace(max(group, key=lambda each: each.error), count=len(group)) for group in groups.values()]
    return LiveReport(sorted(worst, key=lambda each: -each.error), run.remarks, run.verdict(len(worst)))


def _arguments(model: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if batch is None and not hasattr(model, "config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers, whose inputs are known: give a batch")
    if batch is None:
        inputs = random_inputs(model, getattr(model.config, "max_position_embeddings", 32) or 32)
        batch = arguments_of(model, inputs.to(next(model.parameters(), inputs).device))
    if hasattr(batch, "keys"):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


# ---- One pass. Hooks compare the y of each linear layer when it runs, and its dx when the gradient comes.


@dataclass
class _Layer:
    """What was seen of a linear layer, over its calls."""

    module: nn.Module
    allowed: float = 0.0  # 0 until a call is compared
    y_error: float = 0.0
    dx_error: float = 0.0
    dx_size: float = 1.0  # |dx| / |dx_ref|
    gradients: int = 0  # of x
    lost: bool = False  # x has a gradient, and y has none
    waiting: list[list[Tensor]] = field(default_factory=list)  # the dy of each call, until its dx comes


class _Run(TorchDispatchMode):
    """A forward and backward pass of a model, compared layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.remarks, self.flops = model, list[str](), Counter[str]()
        self.layers = {name: _Layer(module) for name, module in model.named_modules() if _is_linear(module)}
        self._comparing = False

    def step(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        with ExitStack() as contexts:
            contexts.enter_context(_kept(self.model))
            for layer in self.layers.values():
                contexts.enter_context(layer.module.register_forward_pre_hook(_separate))
                contexts.enter_context(layer.module.register_forward_hook(partial(self._leave, layer)))
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(self)
            output = self.model(*args, **keywords)
            values = list(output.values()) if hasattr(output, "keys") else output
            found = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]
            try:
                torch.autograd.backward(found, [torch.randn_like(t) for t in found])
            except RuntimeError as error:  # it is not silent: the model is for inference alone
                self.remarks.append(f"the backward pass fails: {str(error).splitlines()[0]}")
                for layer in self.layers.values():
                    layer.waiting.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in (Tensor, nn.Parameter) for each in types):  # its own operations come here next
            return NotImplemented
        keywords = kwargs or {}
        out, name = func(*args, **keywords), func.overloadpacket.__name__
        integers = name in ("_int_mm", "int8_mm")
        if (integers or kind_of(name, func.namespace) == "product") and not self._comparing:
            dtype = "INT8" if integers else compute_dtype("product", names_of(floating((args, keywords))), ())
            flops = 2 * args[0].numel() * out.shape[-1] if integers else flops_of(func, "product", args, keywords, out)
            self.flops[dtype] += flops
        return out

    def _leave(self, layer: _Layer, module: nn.Module, args: Any, output: Any) -> None:
        x, y = args[0] if args else None, output[0] if isinstance(output, tuple) else output
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not x.numel() or not y.is_floating_point():
            return
        with self._apart():
            w, eight_bit, _ = _linear_weight(module)
            if (x.shape[-1], y.shape) != (w.shape[1], (*x.shape[:-1], w.shape[0])):
                return
            rows, bias = _rows(x), getattr(module, "bias", None)
            expected = rows @ w.mT + (bias.float() if isinstance(bias, Tensor) else 0.0)  # [T,K] @ [N,K]^T
            scaled = any("scale" in name for name in (*module._parameters, *module._buffers))
            narrow = eight_bit or scaled or isinstance(module, RecipeLayer) or "8" in type(module).__name__
            allowed = 0.1 if narrow else 0.01 if x.dtype == y.dtype == torch.float32 else 0.03  # TF32 has 10 bits
            layer.allowed = max(layer.allowed, allowed + 2 * allowed / len(rows) ** 0.5)  # the worst of few is far off
            layer.y_error = max(layer.y_error, _error(_rows(y), expected, rows, w))
        layer.lost |= x.requires_grad and not y.requires_grad
        if x.requires_grad and y.requires_grad:
            dy: list[Tensor] = []
            layer.waiting.append(dy)
            y.register_hook(dy.append)  # type: ignore[no-untyped-call]
            x.register_hook(partial(self._compare_dx, layer, dy))  # type: ignore[no-untyped-call]

    def _compare_dx(self, layer: _Layer, dy: list[Tensor], dx: Tensor) -> None:
        layer.gradients += 1
        with self._apart():
            w, rows, found = _linear_weight(layer.module).weight, _rows(dy.pop()), _rows(dx)
            expected = rows @ w  # [T,N] @ [N,K]
            layer.dx_error = max(layer.dx_error, _error(found, expected, rows, w.mT))
            layer.dx_size = float(found.norm() / expected.norm().clamp(min=1e-30))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Products in the context are of the comparison, not of the model."""
        self._comparing = True
        with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
        self._comparing = False

    def faults(self) -> Iterator[Fault]:
        """The layers that compute something else than their weights say, or lose gradients."""
        losing = []
        for name, layer in self.layers.items():
            if layer.y_error > layer.allowed:
                message = "y is not x @ w^T + b of the weight that it holds, dequantized"
                yield Fault("y", name, f"{message} (allowed {layer.allowed:.2g})", layer.y_error)
            if layer.dx_error > layer.allowed:
                near = "near zero" if layer.dx_size < 0.1 else "not dy @ w"
                message = f"dx is {near} ({layer.dx_size:.2g} of its size): a copy of the weight is stale"
                yield Fault("dx", name, message, layer.dx_error)
            if layer.lost or any(layer.waiting):
                losing.append(name)
                if layer.module.training:
                    yield Fault("gradient", name, "its input loses its gradient here: earlier layers learn less", 1.0)
        if losing:
            self.remarks.append(f"{losing[0]} ({len(losing)} such) passes no gradient on")

    def verdict(self, faults: int) -> str:
        seen, total = [layer for layer in self.layers.values() if layer.allowed], max(self.flops.total(), 1)
        shares = ", ".join(f"{dtype} {flops / total:.0%}" for dtype, flops in self.flops.most_common())
        compared = f"y of {plural(len(seen), 'linear layer')} and dx of {sum(bool(each.gradients) for each in seen)}"
        return f"{plural(faults, 'fault')}; {compared} compared; products in {shares or 'no dtype'}"


def _is_linear(module: nn.Module) -> bool:
    """True for a layer that should compute x @ w^T + b, of any library: by its class, or by the name of that."""
    name, weight = type(module).__name__, getattr(module, "weight", None)
    if hasattr(module, "base_layer") or not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    return isinstance(module, nn.Linear) or (name.endswith(("Linear", "Conv1D")) and "Norm" not in name)


def _linear_weight(module: nn.Module) -> Held:
    """The weight [N, K] of a linear layer. GPT-2's is stored as [K, N]."""
    found = held(module)
    return found._replace(weight=found.weight.mT) if type(module).__name__ == "Conv1D" else found


def _separate(module: nn.Module, args: Any) -> Any:
    """Give the layer a view of its input, whose gradient is the part of this layer alone."""
    if args and isinstance(args[0], Tensor) and args[0].requires_grad:
        return (args[0].view_as(args[0]), *args[1:])
    return None


def _rows(x: Tensor) -> Tensor:
    """The first rows of x [..., K], float32, as they are now."""
    return x.detach().reshape(-1, x.shape[-1])[:_ROWS].float()


def _error(y: Tensor, expected: Tensor, x: Tensor, w: Tensor) -> float:
    """The error of the worst column of y [T, N], which should be x [T, K] @ w [N, K]^T and a bias."""
    size = (x.square() @ w.square().mT).sum(0)  # [T,K] @ [N,K]^T
    error = (y - expected).square().sum(0) / size.clamp(min=1e-30)
    return float(error.where(size > 0, 0.0).nan_to_num(nan=torch.inf).max().sqrt())


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Gradients, small buffers and random numbers stay; a gradient of the pass is dropped when it is complete."""
    grads = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    buffers = [(b, b.clone()) for b in model.buffers() if b.numel() <= _SMALL]
    with ExitStack() as contexts, torch.random.fork_rng(), torch.no_grad():
        for p, grad in grads:
            contexts.callback(setattr, p, "grad", grad)
            contexts.enter_context(p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))  # type: ignore[no-untyped-call]
            p.grad = None
        for buffer, value in buffers:
            contexts.callback(buffer.copy_, value)
        yield
