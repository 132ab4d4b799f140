"""A linear layer that computes with its packed weight.

    y[T,N] = x_q[T,K] @ weight[N,K]^T  * scales  + bias[N]

x is quantized in each call, as the scheme says (`octavo.artifact.packed.scheme`). On a machine with an FP8 GEMM the
weight is never widened. The weight is a constant: x has a gradient (`octavo.runtime.packed_gradient`), the weight none.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE, WEIGHT_DTYPE
from octavo.artifact.packed.scheme import CHANNEL, STATIC, Scheme
from octavo.nn.linear import ROUNDED, compute_dtype
from octavo.nn.precomputed import PrecomputedProjections
from octavo.numerics import TENSOR, QTensor, scale_from_amax
from octavo.ops import quantize, scaled_mm
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

    Buffers:
        weight: e4m3 [N, K].
        weight_scale: of the shape and dtype that `scheme` states.
        input_scale: float32 [1] if the scheme is static, or None.
        bias: bfloat16 [N], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        n, k = linear.weight.shape
        with torch.device(linear.weight.device):
            self.register_buffer("weight", torch.empty(n, k, dtype=WEIGHT_DTYPE))
            self.register_buffer("weight_scale", scheme.empty_scale(n, k))
            self.register_buffer("input_scale", torch.empty(1) if scheme.static else None)
            self.register_buffer("bias", None if linear.bias is None else torch.empty(n, dtype=UNQUANTIZED_DTYPE))

    @property
    def by_channel(self) -> bool:
        """Whether the scheme is `channel`, the one of the fused operations: x is cast by row, and no scale varies along
        the sum."""
        return self.scheme.name == CHANNEL.name

    def forward(self, x: Tensor | PrecomputedProjections) -> Tensor:
        if isinstance(x, PrecomputedProjections):
            return x.output_of(self)
        dtype = compute_dtype(x)
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=dtype)
        w_q = self.packed_weight()

        def product(x: Tensor) -> Tensor:
            x_q = self.scheme.quantized_input(x.reshape(-1, x.shape[-1]), self._buffers["input_scale"])
            return self.product(x_q, w_q, dtype).view(*x.shape[:-1], self.out_features)

        if not wants_gradient(x):
            return product(x)
        y: Tensor = PackedProduct.apply(x, w_q.data, w_q.scale, w_q, product)  # type: ignore[no-untyped-call]
        return y

    def packed_weight(self) -> QTensor:
        """The weight [N, K]."""
        buffers: Any = self._buffers  # faster than by attribute, as in `octavo.nn.norm_linear.child`
        return self.cached_weight(buffers["weight"], buffers["weight_scale"], self.scheme.packed_weight)

    def product(self, x_q: QTensor, w_q: QTensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """y [T, N] of the quantized input [T, K] and weight [N, K]; plus a residual [T, N]."""
        return scaled_mm(
            x_q, w_q, bias=self.bias, residual=residual, out_dtype=dtype, fast_accumulation=True
        )  # [T,K] @ [N,K]^T

    @property
    def freezable(self) -> bool:
        """Whether the scale of the input is computed in each call."""
        return not self.scheme.static

    @property
    def input_limit(self) -> Tensor | None:
        """The largest magnitude of x, 0-dim, that the stored scale holds; None where the scale is not stored."""
        scale = self.input_scale
        return None if scale is None else scale.view(()) * self.scheme.inputs.fmt.max * ROUNDED

    def freeze_input(self, amax: Tensor) -> Tensor:
        """Become a layer of the scheme static, whose scale of the input follows from `amax`, 0-dim; returns it, [1]."""
        if self.scheme.weight.granularity != TENSOR:
            q = quantize(self.packed_weight().dequantize(), STATIC.weight)
            self.weight, self.weight_scale = q.data, q.scale.reshape(1)
        self.scheme = STATIC
        self.input_scale = scale_from_amax(amax, STATIC.inputs.fmt).reshape(1).to(self.weight_scale.device)
        return self.input_scale.clone()

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, scheme={self.scheme.name}, frozen"


def swap_linears(model: nn.Module, packed: Mapping[str, Scheme]) -> None:
    """Replace each named linear layer by an empty `PackedLinear` of its scheme."""
    for name, scheme in packed.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, PackedLinear(linear, scheme))
