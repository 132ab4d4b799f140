"""The experts of a mixture, computed with their packed matrices.

    n_q = quantize(x[token of the row])                     rows M, sorted by expert
    u[M,2F] = n_q @ w_in[e]^T;  h_q = quantize(silu(gate) * up);  y[M,K] = h_q @ w_out[e]^T
    out[t] = sum over s of weight[t,s] * y[row of slot s]

The operations of the scheme `channel`, and their order, are those of training (`octavo.nn.experts`). All
experts run as one grouped GEMM, of eight-bit inputs or weight-only (`octavo.inference.packed_linear`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.checkpoint.files import ShardReader
from octavo.checkpoint.layouts import EXPERT_DTYPE, UNQUANTIZED_DTYPE, Packing
from octavo.checkpoint.scheme import CHANNEL, INPUT_SCALE_NAME, SCALE_NAME, Scheme, check_scale
from octavo.hf.meta_model import MetaModel
from octavo.inference.packed_linear import PackedModule, input_cast, wants_gradient
from octavo.nn.conversion import find_experts
from octavo.nn.experts import Experts, check_routing, plain_experts
from octavo.nn.linear import compute_dtype
from octavo.nn.module_tools import differentiable_once
from octavo.numerics import ROW, TENSOR, Cast, QTensor
from octavo.ops import (
    Rows,
    activation_quantize,
    combine,
    find_grouped_backend,
    gather_quantize,
    group_of_rows,
    grouped_mm,
    grouped_weight_only_mm,
    quantize,
    requantize,
    sort_by_expert,
)
from octavo.ops.grouped_gemm import ALIGNMENT
from octavo.rates.measured import slower_experts_note
from octavo.recipe import ROW_X
from octavo.util import plural


class PackedGroupedLinear(PackedModule):
    """y[m] = x[m] @ w[e]^T for the rows m of expert e, with packed matrices of one scheme.

    Its sizes and device are those of the stack [E, N, K] that it replaces. Buffers: weight, e4m3 [E, N, K];
    weight_scale, [E, ...], by row where the scheme has one scale for a matrix; input_scale, float32 [E], None unless
    the scheme is static.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme
        e, n, k = weight.shape
        scale = torch.empty(n, 1) if scales_by_row(scheme) else scheme.empty_scale(n, k)
        with torch.device(weight.device):
            self.register_buffer("weight", torch.empty(e, n, k, dtype=EXPERT_DTYPE))
            self.register_buffer("weight_scale", torch.empty(e, *scale.shape, dtype=scale.dtype))
            self.register_buffer("input_scale", torch.empty(e) if scheme.static else None)

    @property
    def by_row(self) -> bool:
        """Whether the input is cast by row, as the fused operations cast it."""
        return scales_by_row(self.scheme) and not self.scheme.static and self._input_cast is not None

    @property
    def _input_cast(self) -> Cast | None:
        return expert_input_cast(self.scheme, self.weight, self.weight.device)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """y [M, N] of x [M, K] in the dtype of x; `offsets` int32 [E]: where each group of rows ends."""
        cast = self._input_cast
        if cast is None:
            return grouped_weight_only_mm(x, self._packed(self.weight, self.weight_scale), offsets)  # [M_e,K] @ [N,K]^T
        if self.input_scale is None:
            return self.product(quantize(x, cast), offsets, x.dtype)
        expert = group_of_rows(offsets, len(x)).clamp(max=len(offsets) - 1)
        return self.product(requantize([x], self.input_scale[expert].unsqueeze(1), ROW_X), offsets, x.dtype)

    def product(self, x_q: QTensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """y [M, N] of the quantized input [M, K]."""
        w_q = self._packed(self.weight, self.weight_scale)
        return grouped_mm(x_q, w_q, offsets, out_dtype=dtype, fast_accumulation=True)  # [M_e,K] @ [N,K]^T

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrices [E, N, K] as numbers."""
        matrices = zip(self.weight, self.weight_scale, strict=True)
        return torch.stack([self._packed(*matrix).dequantize(dtype) for matrix in matrices])

    def _packed(self, data: Tensor, scale: Tensor) -> QTensor:
        if scales_by_row(self.scheme):
            return QTensor(data, scale, CHANNEL.weight.fmt, ROW)
        return self.scheme.packed_weight(data, scale)

    def extra_repr(self) -> str:
        e, n, k = self.weight.shape
        return f"groups={e}, in_features={k}, out_features={n}, scheme={self.scheme.name}, frozen"


def scales_by_row(scheme: Scheme) -> bool:
    """Whether the matrices of `scheme` are stacked with a scale for each row, instead of scales that vary along K."""
    return scheme.weight.granularity in (ROW, TENSOR)


def expert_input_cast(scheme: Scheme, weight: Tensor, device: torch.device) -> Cast | None:
    """The cast of the input of matrices [E, N, K] on `device`; None if it keeps its dtype, as where the device has no
    grouped GEMM of these sizes."""
    cast = input_cast(scheme, device)
    if cast is None or device.type != "cuda":
        return cast
    aligned = not any(size % ALIGNMENT for size in weight.shape[1:])
    granularities = (ROW, ROW) if scales_by_row(scheme) else (cast.granularity, scheme.weight.granularity)
    backend = find_grouped_backend(device, (cast.format, scheme.weight.format), *granularities)
    return cast if aligned and backend.name != "none" else None


class PackedExperts(nn.Module):
    """The experts of a layer: `octavo.nn.Experts`, or those of transformers with its parameters, when packed.

    The gradients of x and of the router's weights are those of the experts in high precision. The experts are not
    trained.
    """

    def __init__(self, gate_up_proj: PackedGroupedLinear, down_proj: PackedGroupedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `octavo.nn.Experts.forward`."""
        x, weight = hidden_states, top_k_weights
        check_routing(x, top_k_index, weight)
        if x.numel() == 0:
            return x.to(compute_dtype(x))
        if not wants_gradient(x, weight):
            return self.compute(x, top_k_index, weight)
        out: Tensor = _FrozenExperts.apply(x, weight, top_k_index, self)  # type: ignore[no-untyped-call]
        return out

    def compute(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows = sort_by_expert(index, len(self.down_proj.weight))
        u = self._inner(x, rows)
        if self.down_proj.by_row:
            h_q = activation_quantize(u, "swiglu", ROW_X)
            y = self.down_proj.product(h_q, rows.offsets, u.dtype)
        else:
            gate, up = u.chunk(2, 1)
            y = self.down_proj(F.silu(gate) * up, rows.offsets)
        return combine(y, rows.row, weight.float())

    def _inner(self, x: Tensor, rows: Rows) -> Tensor:
        """u [M, 2F] of the tokens x [T, K]."""
        dtype, top_k = compute_dtype(x), rows.row.shape[1]
        if not self.gate_up_proj.by_row:
            return self.gate_up_proj(x.to(dtype)[rows.slot // top_k], rows.offsets)  # type: ignore[no-any-return]
        n_q = gather_quantize(x, ROW_X, slot=rows.slot, top_k=top_k)
        return self.gate_up_proj.product(n_q, rows.offsets, dtype)


class _FrozenExperts(torch.autograd.Function):
    """The packed experts, with the gradients of x and of the router's weights by their widened matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: Tensor, experts: PackedExperts) -> Tensor:
        ctx.save_for_backward(x, weight, index)
        ctx.experts = experts
        return experts.compute(x, index, weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        experts: PackedExperts = ctx.experts
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        w_in, w_out = (m.dequantize(dout.dtype) for m in (experts.gate_up_proj, experts.down_proj))
        with torch.enable_grad():
            out = plain_experts(leaves[0].to(dout.dtype), leaves[1], sort_by_expert(index, len(w_out)), w_in, w_out)
        dx, dweight = torch.autograd.grad(out, leaves, dout)
        return dx, dweight, None, None


# ---- Reading the packed experts of a folder: the files hold each matrix by itself, and the model takes stacks of them.


class ExpertLoading:
    """The packed experts of a folder, on their way into a model that will run on `device`.

    A layer of experts runs in FP8 if all its matrices are packed, those of a stack by one scheme. The matrices of other
    layers are widened to BF16, with a warning. `names` are those of the matrices in eight bits, as in the files.
    """

    def __init__(self, meta_model: MetaModel, reader: ShardReader, device: torch.device) -> None:
        self._model, self._files, self._device = meta_model.model, meta_model.experts, device
        parts = {} if self._files is None else self._files.parts_of_stacks
        self._parts = {stack: [name.removesuffix(".weight") for name in names] for stack, names in parts.items()}
        specs = {name: reader.specs.get(f"{name}.weight") for names in self._parts.values() for name in names}
        self.names = [name for name, spec in specs.items() if spec is not None and spec.dtype == EXPERT_DTYPE]
        self._schemes: dict[str, Scheme] = {}  # of the matrices
        self._stacks: dict[str, Scheme] = {}  # of the stacks that run in FP8, by their names in the model
        self.required: dict[str, Tensor] = {}  # what the files must have for these, on the meta device
        self._reasons: list[str] = []  # why others do not
        self._weight_only: list[str] = []  # the modules whose inputs are not quantized although their schemes do so

    def swap(self, packing: Packing) -> None:
        """Replace each module of experts that runs in FP8 by an empty `PackedExperts`."""
        self._schemes = {name: packing.schemes[name] for name in self.names if name in packing.schemes}
        for name, module in find_experts(self._model).items() if self._schemes else ():
            stacks: dict[str, Any] = {f"{name}.{leaf}": getattr(module, leaf, None) for leaf in Experts.matrices}
            reasons = [reason for stack, weight in stacks.items() if (reason := self._reason(stack, weight))]
            self._reasons += reasons
            if reasons:
                continue
            found = {stack: self._schemes[self._parts[stack][0]] for stack in stacks}
            for stack, scheme in found.items():
                self._require(stack, stacks[stack], scheme)
            casts = [expert_input_cast(scheme, stacks[stack], self._device) for stack, scheme in found.items()]
            if casts != [scheme.inputs for scheme in found.values()]:
                self._weight_only.append(name)
            layers = [PackedGroupedLinear(stacks[stack], scheme) for stack, scheme in found.items()]
            self._model.set_submodule(name, PackedExperts(*layers))
            self._stacks |= found

    def _require(self, stack: str, weight: Tensor, scheme: Scheme) -> None:
        with torch.device("meta"):
            n, k = self._rows(stack, weight), weight.shape[2]
            tensors = {"weight": torch.empty(n, k, dtype=EXPERT_DTYPE), SCALE_NAME: scheme.empty_scale(n, k)}
            if scheme.static:
                tensors[INPUT_SCALE_NAME] = torch.empty(1)
        self.required |= {f"{name}.{leaf}": t for name in self._parts[stack] for leaf, t in tensors.items()}

    def _reason(self, stack: str, weight: Any) -> str:
        """Why a stack [E, N, K] does not run in FP8, or ""."""
        parts = self._parts.get(stack, [])
        schemes = {scheme.name: scheme for name in parts if (scheme := self._schemes.get(name)) is not None}
        if not schemes or any(name not in self._schemes for name in parts):
            return "other matrices of its stack are in BF16"
        if len(schemes) > 1:
            return f"the matrices of its stack have several schemes ({', '.join(schemes)})"
        ((name, scheme),) = schemes.items()
        if self._rows(stack, weight) % (scheme.weight.granularity.rows or 1):
            return f"its rows do not divide into the blocks of the scheme {name}"
        return ""

    def _rows(self, stack: str, weight: Tensor) -> int:
        """The rows of one matrix in the files: a stack may hold two for each expert."""
        return weight.shape[0] * weight.shape[1] // len(self._parts[stack])

    def is_packed(self, name: str) -> bool:
        """Whether `name` is a tensor of the model that belongs to a `PackedExperts`."""
        return name.rpartition(".")[0] in self._stacks

    def widen(self, tensors: dict[str, Tensor]) -> None:
        """Widen the matrices that do not run in FP8 to BF16, in place, and warn of what runs in another way."""
        if self._weight_only:
            count = plural(len(self._weight_only), "such layer")
            warnings.warn(
                f"{self._weight_only[0]} ({count}) computes with inputs that are not quantized: {self._device} has no "
                "FP8 GEMM for its experts",
                stacklevel=3,
            )
        wide = [name for name in self.names if f"{name}.weight" not in self.required]
        widen_layers(tensors, wide, self._schemes)  # `check_tensors` reports what is missing
        if wide:
            reason = self._reasons[0] if self._reasons else "Octavo does not know the class of its module"
            warnings.warn(
                f"{wide[0]} ({len(wide)} such layers) is an expert in FP8: its weight is widened to BF16, since "
                f"{reason}",
                stacklevel=3,
            )

    def slower_note(self) -> str:
        """That experts were measured to be slower than BF16 on the device; "" if not, or if nothing is known."""
        for stack, scheme in self._stacks.items():  # the first of a module is that of gate and up
            weight: Any = self._model.get_submodule(stack).weight
            if note := slower_experts_note(scheme, (weight.shape[1], weight.shape[2]), self._device):
                return note
        return ""

    def stack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of each `PackedExperts`, from the matrices in `tensors`, which are removed there."""
        found = [self._buffers(stack, scheme, tensors) for stack, scheme in self._stacks.items()]
        for name in self.required:
            del tensors[name]
        return {name: t for each in found for name, t in each.items()}

    def _buffers(self, stack: str, scheme: Scheme, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        def stacked(leaf: str, read: Callable[[Tensor], Tensor]) -> Tensor:
            assert self._files is not None
            return self._files.stack(stack, lambda part: read(tensors[f"{part.removesuffix('.weight')}.{leaf}"]))

        rows = len(self.required[f"{self._parts[stack][0]}.weight"])
        # as bytes: torch.cat lacks float8 dtypes on some devices
        data = stacked("weight", lambda t: t.view(torch.uint8)).view(EXPERT_DTYPE)
        scale = stacked(SCALE_NAME, lambda t: t.view(1, 1).expand(rows, 1) if t.ndim == 1 else t)  # by row
        found = {f"{stack}.weight": data, f"{stack}.weight_scale": scale}
        if scheme.static:  # gate and up read one input
            found[f"{stack}.input_scale"] = stacked(INPUT_SCALE_NAME, lambda t: t.view(1, 1)).amax((1, 2))
        return found


# ---- Packed layers whose weights are widened to BF16 when a folder is opened, because they do not run in eight bits.


def widen_layers(tensors: dict[str, Tensor], names: Sequence[str], schemes: Mapping[str, Scheme]) -> None:
    """Dequantize the packed layers `names` to BF16, in place, and drop their scales. A layer that lacks its weight or
    its scale is left as it is; an ArtifactError if a scale is not positive and finite."""
    for name in names:
        weight, scale_name = tensors.get(f"{name}.weight"), f"{name}.{SCALE_NAME}"
        if weight is None or name not in schemes or scale_name not in tensors:
            continue
        scale = tensors.pop(scale_name)
        check_scale(scale_name, scale, Path(name))
        tensors.pop(f"{name}.{INPUT_SCALE_NAME}", None)
        tensors[f"{name}.weight"] = schemes[name].packed_weight(weight, scale).dequantize(UNQUANTIZED_DTYPE)
