"""Check a live model of any library: what its linear layers compute, and the tensors that they compute with.

    w[N,K] = data * scale        one scale a block, or as a subclass of Tensor (torchao, Transformer Engine) dequantizes
    y[T,N] = x @ w^T + b         dx[T,K] = dy @ w          in float32
    u[t,n] = sqrt(sum_k (x[t,k] w[n,k])^2)                 the size of a sum of products with random signs
    error  = worst n of sqrt(sum_t (y - y_ref)^2 / sum_t u^2), and of dx alike

Where products cancel y is small, and operands in eight bits give it a large relative error. Against u the error is that
of the operands: 0.04 in e4m3, and about 1 where the layer multiplied another weight, or zeros.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.checkpoint.files import ArtifactError
from octavo.comparison import Call, has_gradient, seen_calls
from octavo.hf.meta_model import arguments_of, random_inputs, stated_positions, transformers_meta_model
from octavo.inspection.dtype_report import patterns_of
from octavo.nn.linear import RecipeLayer
from octavo.nn.module_tools import call_arguments, check_initialized, check_module, plain_name
from octavo.tracing import compute_dtype, floating, flops_of, kind_of, names_of
from octavo.util import Table, plural
from octavo.verification.layer_spec import LayerSpec, PackedLayers, numbers_of, read_specs, scale_values, widen
from octavo.verification.stored_files import Finding, read_files

_REMEDIES = {
    "scale": "load the scale from the folder of the weight; with source, check compares both",
    "file": "load the tensor again, by a loader that knows the format of the folder",
    "y": "refresh the copy and the scale that the layer multiplies; if small numbers underflow, take scales by row",
    "dx": "make the transposed copy of the weight again after loading, or take scales by row, as for y",
    "gradient": "give the layer a backward pass (dx = dy @ w), or train the model dequantized",
    "precision": "convert the model itself, such as by octavo.convert(model), and check it again",
}
_ROWS = 256  # of x, y, dy and dx that are compared
_SMALL = 2**20  # elements of a buffer that a pass may change: statistics and scales, no weights


@dataclass(frozen=True)
class Fault(Finding):
    """Something wrong with a live model; `kind` is a key of `_REMEDIES`."""

    error: float  # of y, dx or w, relative; inf where nothing can be right
    count: int = 1  # of repeated modules


@dataclass
class LiveReport:
    """The faults of a live model, worst first; printed, it is a table."""

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
        return "\n".join([*([] if self.ok else [str(self.table())]), *self.remarks, self.verdict])


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
    is. A layer that another module computes, without a call, is not compared.

    Args:
        model: not sharded, in the mode in which it is used. Lost gradients are a fault in training alone.
        source: the folder that it was loaded from, if it was not trained since.
        batch: a tensor, a tuple, or a dictionary of keywords. None gives a model of transformers random inputs.
        precision: "fp8" if products must run in it. accelerate's environment variable says so too.

    Returns:
        The faults, worst first, each with its remedy; `print` it.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it is sharded, needs a batch, cannot run; the folder is damaged (ArtifactError); another precision.

    Example:

        print(octavo.check(model, "models/qwen-fp8"))
    """
    check_module(model, "check")
    if precision not in (None, "fp8"):
        raise ValueError(f'precision must be "fp8" or None, got {precision!r}')
    check_initialized(model)
    if any(p.is_meta or hasattr(p, "device_mesh") for p in model.parameters()):
        raise ValueError("check takes a model with numbers that is not sharded: load it, or check before fully_shard")
    if batch is None:
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            kind = type(model).__name__
            raise ValueError(f"{kind} is no model of transformers, whose inputs are known: give batch=")
        inputs = random_inputs(model, stated_positions(model))
        batch = arguments_of(model, inputs.to(next(model.parameters(), inputs).device))
    run = _Run(model)
    run.step(*call_arguments(batch))
    found = [*_weight_faults(model, None if source is None else Path(source), run.remarks), *run.faults()]
    if "fp8" in (precision, os.environ.get("ACCELERATE_MIXED_PRECISION")) and not run.flops["FP8"]:
        ran = " and ".join(run.flops) or "no dtype"
        found.append(Fault("precision", "(model)", f"FP8 was asked for, and all products ran in {ran}", 1.0))
    groups: dict[tuple[str, str], list[Fault]] = {}
    patterns = patterns_of(model)
    for fault in found:
        name, _, leaf = fault.where.rpartition(".")
        groups.setdefault((fault.kind, f"{patterns.get(name, name)}.{leaf}"), []).append(fault)
    worst = [replace(max(group, key=lambda each: each.error), count=len(group)) for group in groups.values()]
    return LiveReport(sorted(worst, key=lambda each: -each.error), run.remarks, run.verdict(len(worst)))


@dataclass
class _Layer:
    """A linear layer, and the worst of its calls."""

    module: nn.Module
    allowed: float = 0.0  # 0 until a call is compared
    y_error: float = 0.0
    dx_error: float = 0.0
    dx_size: float = 1.0  # |dx| / |dx_ref|
    gradients: int = 0  # of x
    lost: bool = False  # x has a gradient, and y has none
    waiting: dict[Call, Tensor | None] = field(default_factory=dict)  # the dy of calls with y, until their dx comes


class _Run(TorchDispatchMode):
    """A forward and backward pass of a model, compared layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.remarks, self.flops = model, list[str](), Counter[str]()
        self.layers = {name: _Layer(module) for name, module in model.named_modules() if _is_linear(module)}
        named = [(name, m) for name, m in model.named_modules() if type(m).__name__.endswith("Linear")]
        weights = {name: getattr(module, "weight", None) for name, module in named}
        if hidden := [name for name, weight in weights.items() if weight is None or not weight.numel()]:
            self.remarks.append(f"{hidden[0]} ({len(hidden)} such) holds no weight to read: it was not compared")
        self._comparing = False

    def step(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        modules = {name: layer.module for name, layer in self.layers.items()}
        with _kept(self.model), seen_calls(modules, self._see), torch.enable_grad(), self:
            try:
                output = self.model(*args, **keywords)
            except Exception as error:  # a model raises anything
                given = [f"{t.dtype} {list(t.shape)}" for t in tree_leaves((args, keywords)) if isinstance(t, Tensor)]
                held = dict.fromkeys(f"{p.dtype} on {p.device}" for p in self.model.parameters())
                raise ValueError(
                    f"{type(self.model).__name__} ({', '.join(held)}) cannot run on the inputs {', '.join(given)} "
                    f"({type(error).__name__}: {error}): give another batch, or check the model in float32 or on a GPU"
                ) from error
            values = list(output.values()) if hasattr(output, "keys") else output
            found = [t for t in tree_leaves(values) if has_gradient(t)]
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
        if kind_of(name, func.namespace) == "product" and not self._comparing:
            dtype = compute_dtype(name, "product", *(names_of(floating(each)) for each in ((args, keywords), out)))
            self.flops[dtype] += flops_of(func, "product", args, keywords, out)
        return out

    def _see(self, call: Call, tensor: str, value: Tensor) -> None:
        layer = self.layers[call.name]
        if tensor == "y":
            self._compare_y(layer, call, value)
        elif tensor == "dy" and call in layer.waiting:
            layer.waiting[call] = value
        elif tensor == "dx" and (dy := layer.waiting.pop(call, None)) is not None:
            self._compare_dx(layer, dy, value)

    def _compare_y(self, layer: _Layer, call: Call, y: Tensor) -> None:
        module, x = layer.module, call.args[0] if call.args else None
        if not isinstance(x, Tensor) or not x.numel() or not y.is_floating_point():
            return
        with self._apart():
            w, eight_bit = _linear_weight(module)
            if (x.shape[-1], y.shape) != (w.shape[1], (*x.shape[:-1], w.shape[0])):
                return
            rows, bias = _rows(x), getattr(module, "bias", None)
            expected = rows @ w.mT + (bias.float() if isinstance(bias, Tensor) else 0.0)  # [T,K] @ [N,K]^T
            scaled = any("scale" in name for name in (*module._parameters, *module._buffers))
            narrow = eight_bit or scaled or isinstance(module, RecipeLayer) or "8" in type(module).__name__
            allowed = 0.25 if narrow else 0.01 if x.dtype == y.dtype == torch.float32 else 0.03  # TF32 has 10 bits
            if isinstance(module, RecipeLayer) and module.recipe.has_four_bits:
                allowed = 0.4
            layer.allowed = max(layer.allowed, allowed + 2 * allowed / len(rows) ** 0.5)  # the worst of few is far off
            layer.y_error = max(layer.y_error, _error(_rows(y), expected, rows, w))
        # The model calls a layer without gradients on purpose where it only chooses by its outputs (DeepSeek-V3.2).
        layer.lost |= torch.is_grad_enabled() and x.requires_grad and not y.requires_grad
        if x.requires_grad:
            layer.waiting[call] = None

    def _compare_dx(self, layer: _Layer, dy: Tensor, dx: Tensor) -> None:
        layer.gradients += 1
        with self._apart():
            (w, _), rows, found = _linear_weight(layer.module), _rows(dy), _rows(dx)
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
            if layer.lost or any(dy is not None for dy in layer.waiting.values()):
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
    if hasattr(module, "base_layer") or not isinstance(weight, Tensor) or weight.ndim != 2 or "Router" in name:
        return False  # the router of Llama 4 is a subclass that gives scores
    return isinstance(module, nn.Linear) or (name.endswith(("Linear", "Conv1D")) and "Norm" not in name)


def _linear_weight(module: nn.Module) -> tuple[Tensor, bool]:
    """The weight [N, K] of a linear layer, and True if it is eight-bit. GPT-2's is stored as [K, N]."""
    weight, eight_bit, _ = _held(module)
    return weight.mT if type(module).__name__ == "Conv1D" else weight, eight_bit


def _rows(x: Tensor) -> Tensor:
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
    with ExitStack() as contexts, torch.random.fork_rng():
        for p, grad in grads:
            contexts.callback(setattr, p, "grad", grad)
            contexts.enter_context(p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))  # type: ignore[no-untyped-call]
            p.grad = None
        for buffer, value in buffers:
            contexts.callback(buffer.copy_, value)
        yield


# ---- The numbers that weights stand for, and the tensors of the folder that they should come from.


_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8)
_SCALES = ("{}_scale_inv", "{}_scale", "scale", "scales")  # of the weight `{}`; they multiply
_LARGE = 240  # bytes reach this, and most 448; weights do not
_SAME, _CAST = 2.0**-7, 0.1  # |w - w_file| / |w_file|, of the worst row: rounded to BF16; of the whole: cast since


def _held(module: nn.Module, leaf: str = "weight") -> tuple[Tensor, bool, str]:
    """The numbers of a tensor, float32 [..., N, K]; True if it is eight-bit; what is wrong with its scale, or ""."""
    tensor = getattr(module, leaf).detach()
    if hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "dequantize"):
        scales = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0] if "scale" in name]
        return tensor.dequantize().float(), True, next(filter(None, map(_wrong_scale, scales)), "")
    if tensor.dtype in _EIGHT_BITS:
        if tensor.ndim == 2 and tensor.stride(0) == 1 < tensor.stride(1):  # vLLM's [K, N] is a view of [N, K]
            tensor = tensor.mT
        known = (getattr(module, name.format(leaf), None) for name in _SCALES)
        return _widened(tensor, next((scale for scale in known if isinstance(scale, Tensor)), None))
    weight = tensor.float()
    large = tensor.is_floating_point() and weight.ndim > 1 and weight.numel() and float(weight.abs().max()) >= _LARGE
    alone = large and torch.equal(weight, weight.to(torch.float8_e4m3fn).float())
    return weight, False, "has the bytes of e4m3, up to 240 and more, without their scales" if alone else ""


def _widened(data: Tensor, scale: Tensor | None) -> tuple[Tensor, bool, str]:
    """The same for eight-bit data and its scale. The shape of the scale says which blocks share one."""
    numbers = numbers_of(data)
    if scale is None:
        return numbers, True, f"is {data.dtype} and has no scale: its bytes alone are multiplied"
    if data.ndim == 3:  # a stack of experts: their rows, one below the other
        weight, _, wrong = _widened(data.flatten(0, 1), scale.flatten(0, 1))
        return weight.view(data.shape), True, wrong
    values = scale_values(scale.detach(), LayerSpec())
    rows, columns = (_block(size, count) for size, count in zip(data.shape, values.shape, strict=True))
    if rows < 0 or columns < 0:
        return numbers, True, f"is {list(data.shape)}, and its scale {list(scale.shape)} fits no block of it"
    wrong = _wrong_scale(values)
    if not wrong and bool((values == 1).all()) and data.is_floating_point() and float(numbers.abs().max()) >= _LARGE:
        wrong = "has scales that are all 1, beside bytes up to 240 and more: they were never loaded"
    return widen(data, scale.detach(), LayerSpec(rows, columns)), True, wrong


def _wrong_scale(scale: Tensor) -> str:
    right = bool((scale.isfinite() & (scale > 0)).all()) if scale.dtype != torch.float8_e8m0fnu else True
    return "" if right else "has a scale that is NaN, infinite, zero or negative"


def _block(size: int, count: int) -> int:
    """The elements that share a scale, of `size` with `count` scales: 0 for all; -1 if no block fits."""
    if count in (1, size):
        return int(1 < count == size)
    powers = (1 << bits for bits in range(1, 15))
    return next((block for block in powers if -(-size // block) == count), -1 if size % count else size // count)


def _weight_faults(model: nn.Module, folder: Path | None, remarks: list[str]) -> Iterator[Fault]:
    """Weights whose scale is missing, does not fit or cannot be right, and tensors that are not those of the folder."""
    read, eight_bit = ({}, set[str]()) if folder is None else _readers(folder)
    compared, alone = set[int](), dict[str, int]()
    for module_name, module in model.named_modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{module_name}.{leaf}".lstrip(".")
            if tensor is None or not tensor.numel() or "scale" in leaf:
                continue
            if not (tensor.is_floating_point() or tensor.dtype in _EIGHT_BITS):
                continue
            known = "" if ".modules_to_save." in name else plain_name(name)  # PEFT trains that copy
            weight, narrow, wrong = _held(module, leaf)
            if wrong and tensor.ndim > 1:
                yield Fault("scale", name, wrong, torch.inf)
            if known in read:
                compared.add(id(tensor))
                near = _CAST if narrow and known not in eight_bit else _SAME
                yield from (Fault("file", name, *found) for found in _differences(weight.cpu(), read[known](), near))
            elif read and tensor.ndim > 1 and leaf not in module._non_persistent_buffers_set:
                alone[name] = id(tensor)
    if left := [name for name, tensor_id in alone.items() if tensor_id not in compared]:  # a tied one has another name
        remarks.append(f"{left[0]} ({len(left)} such) has no counterpart in the folder: it was not compared")


def _readers(folder: Path) -> tuple[dict[str, Callable[[], Tensor]], set[str]]:
    """A function that reads each tensor of a folder, widened, by transformers' name; and the names in eight bits."""
    files = read_files(folder)
    if files.findings:
        raise ArtifactError(f"{folder / files.findings[0].where} {files.findings[0].message}: see octavo verify")
    packed = [name for name, dtype in files.dtypes.items() if dtype in ("F8_E4M3", "I8") and name.endswith(".weight")]
    specs, _ = read_specs(files.settings, [name.removesuffix(".weight") for name in packed]) if packed else ({}, None)
    get: Any = PackedLayers(files, {name: spec for name, spec in specs.items() if spec}, "cpu").get
    names = list(files.shapes)
    with suppress(ArtifactError, ImportError):  # not of transformers: the model has the names of the files
        experts = transformers_meta_model(files.config, folder).experts
        get, names = experts.by_model_names(get, names) if experts.stacks else (get, names)
    stacks = set(names) - files.shapes.keys() if packed else set[str]()
    return {name: partial(get, name) for name in names}, {*packed, *stacks}


def _differences(w: Tensor, truth: Tensor, near: float) -> Iterator[tuple[str, float]]:
    """A sentence on a tensor that is not the folder's, and |w - w_file| / |w_file|; one for each matrix of a stack."""
    truth = truth.float()
    norm = partial(torch.linalg.vector_norm, dim=-1 if near == _SAME and w.ndim == 2 else None)
    error = float((norm(w - truth) / norm(truth).clamp(min=1e-30)).max()) if w.shape == truth.shape else torch.inf
    if not error < torch.inf:
        yield f"is {list(w.shape)}, or not finite; it is {list(truth.shape)} in the folder", torch.inf
    elif w.ndim == 3:
        for i, pair in enumerate(zip(w, truth, strict=True)):
            yield from ((f"matrix {i} {what}", error) for what, error in _differences(*pair, near))
    elif error > near:
        factor = float((w * truth).sum() / truth.square().sum().clamp(min=1e-30))
        cosine = factor * float(truth.norm() / w.norm().clamp(min=1e-30))
        if abs(cosine) < 0.5:
            yield f"has nothing of the folder's (cosine {cosine:.2f}): never loaded, it is random or zero", error
        else:
            lost = "a scale is lost, or it was trained or merged since"
            yield f"is {factor:.4g} times the folder's (cosine {cosine:.3f}): {lost}", error
