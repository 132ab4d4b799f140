"""A linear layer that computes with its packed weight.

    y[T,N] = x_q[T,K] @ weight[N,K]^T  * scales  + bias[N]

x is quantized in each call, as the scheme says (`octavo.artifact.packed.scheme`), or keeps its dtype where the GEMM is
weight-only (`octavo.runtime.gemm_path`). The weight is a constant: x has a gradient (`octavo.runtime.packed_gradient`),
the weight none.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE
from octavo.artifact.packed.scheme import FUSED, STATIC, STATIC_INPUTS, Scheme
from octavo.int8 import int8_mm
from octavo.nn.layer_limits import check_width
from octavo.nn.linear import ROUNDED, compute_dtype
from octavo.nn.precomputed import PrecomputedProjections
from octavo.numerics import Cast, QTensor, scale_from_amax
from octavo.ops import quantize, quantize_scaled, scaled_mm, weight_only_mm
from octavo.runtime.gemm_path import input_cast
from octavo.runtime.packed_gradient import PackedProduct, wants_gradient


class PackedModule(nn.Module):
    """A module whose buffers hold eight-bit weights and their scales.

    It moves between devices, but keeps its dtypes when a model is cast as a whole: `model.half()` would widen the
    weights and round the scales.
    """

    _weight: tuple[Tensor, Tensor, QTensor] | None = None

    def cached_weight(self, data: Tensor, scale: Tensor, make: Callable[[Tensor, Tensor], QTensor]) -> QTensor:
        """make(data, scale), cached while the buffers are these tensors: its checks take as long as a launch."""
        if torch.compiler.is_compiling():
            return make(data, scale)
        known = self._weight
        if known is not None and known[0] is data and known[1] is scale:
            return known[2]
        made = make(data, scale)
        if made.scale.data_ptr() == scale.data_ptr():  # a copy would not see new numbers in the buffer
            self.__dict__["_weight"] = data, scale, made
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.__dict__.pop("_weight", None)  # it would hold the former buffers
        before = {name: t for name, t in self._buffers.items() if t is not None and name != "bias"}
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, t in before.items():
            after = self._buffers[name]
            if after is not None and after.dtype != t.dtype:
                self._buffers[name] = t.to(after.device)
        return result


class PackedLinear(PackedModule):
    """x [..., K] to y [..., N] in x's dtype, or in that of autocast; any rank, zero rows included.

    The gradient of x is computed; the weight is not trained.

    Args:
        linear: the layer that it replaces, for the sizes and the device.
        scheme: of the packing.
        name: of the layer in its model, for messages.

    Buffers:
        weight: e4m3, or int8 in the scheme of that name, [N, K].
        weight_scale: of the shape and dtype that `scheme` states.
        input_scale: float32 [1] if the scheme is static, or None.
        bias: bfloat16 [N], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, scheme: Scheme, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        n, k = linear.weight.shape
        with torch.device(linear.weight.device):
            self.register_buffer("weight", torch.empty(n, k, dtype=scheme.weight.fmt.dtype))
            self.register_buffer("weight_scale", scheme.empty_scale(n, k))
            self.register_buffer("input_scale", torch.empty(1) if scheme.static else None)
            self.register_buffer("bias", None if linear.bias is None else torch.empty(n, dtype=UNQUANTIZED_DTYPE))

    @property
    def is_fusable(self) -> bool:
        """Whether the fused operations take the scheme."""
        return self.scheme.name in FUSED

    @property
    def input_cast(self) -> Cast | None:
        """The cast of x on the device of the weight; None if x keeps its dtype."""
        weight: Any = self._buffers["weight"]
        return input_cast(self.scheme, weight.device)

    def forward(self, x: Tensor | PrecomputedProjections) -> Tensor:
        if isinstance(x, PrecomputedProjections):
            return x.output_of(self)
        if not torch.compiler.is_compiling():
            check_width(self, x, (self.out_features, self.in_features))
        dtype = compute_dtype(x)
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=dtype)
        w_q = self.packed_weight()

        def product(x: Tensor) -> Tensor:
            rows = self.operand(x.reshape(-1, x.shape[-1]))
            return self.product(rows, w_q, dtype).view(*x.shape[:-1], self.out_features)

        if not wants_gradient(x):
            return product(x)
        y: Tensor = PackedProduct.apply(x, w_q.data, w_q.scale, w_q, product, self.input_cast is None)  # type: ignore[no-untyped-call]
        return y

    def operand(self, x: Tensor) -> QTensor | Tensor:
        """x [T, K] as the GEMM takes it: cast by its own amax or by the scale that is stored, or as it is."""
        cast = self.input_cast
        if cast is None:
            return x
        scale = self._buffers["input_scale"]
        return quantize(x, cast) if scale is None else quantize_scaled(x, scale.unsqueeze(1), cast)[0]

    def packed_weight(self) -> QTensor:
        """The weight [N, K]."""
        buffers: Any = self._buffers  # faster than by attribute, as in `octavo.nn.norm_linear.child`
        return self.cached_weight(buffers["weight"], buffers["weight_scale"], self.scheme.packed_weight)

    def product(self, x: QTensor | Tensor, w_q: QTensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """y [T, N] of the input [T, K], quantized or not, and the weight [N, K]; plus a residual [T, N]."""
        return packed_product(x, w_q, self.bias, dtype, residual)

    @property
    def freezable(self) -> bool:
        """Whether the scale of the input is computed in each call."""
        return not self.scheme.static

    @property
    def input_limit(self) -> Tensor | None:
        """The largest magnitude of x, 0-dim, that the stored scale holds; None where the scale is not stored."""
        scale, cast = self.input_scale, self.scheme.inputs
        return None if scale is None or cast is None else scale.view(()) * cast.fmt.max * ROUNDED

    def freeze_input(self, amax: Tensor) -> Tensor:
        """Become a layer of the scheme static, whose scale of the input follows from `amax`, 0-dim; returns it, [1]."""
        if self.scheme.weight != STATIC.weight:
            q = quantize(self.packed_weight().dequantize(), STATIC.weight)
            self.weight, self.weight_scale = q.data, q.scale.reshape(1)
        self.scheme = STATIC
        self.input_scale = scale_from_amax(amax, STATIC_INPUTS.fmt).reshape(1).to(self.weight_scale.device)
        return self.input_scale.clone()

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, scheme={self.scheme.name}, frozen"


def packed_product(
    x: QTensor | Tensor, w_q: QTensor, bias: Tensor | None, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """y [T, N] in `dtype` of the input x [T, K] and a packed weight [N, K]; weight-only if x is not quantized."""
    if isinstance(x, Tensor):
        return weight_only_mm(x.to(dtype), w_q, bias=bias, residual=residual)  # [T,K] @ [N,K]^T
    if w_q.format.name == "int8":
        return int8_mm(x, w_q, bias=bias, residual=residual, out_dtype=dtype)  # [T,K] @ [N,K]^T
    return scaled_mm(x, w_q, bias=bias, residual=residual, out_dtype=dtype, fast_accumulation=True)  # [T,K] @ [N,K]^T


def swap_linears(model: nn.Module, packed: Mapping[str, Scheme]) -> None:
    """Replace each named linear layer by an empty `PackedLinear` of its scheme."""
    for name, scheme in packed.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, PackedLinear(linear, scheme, name))
