"""Packed layers that read one input, as one GEMM: their weights lie in one buffer, stacked along N.

    y[T, N_1 + N_2 + ...] = x[T,K] @ weight[N_1 + N_2 + ..., K]^T * s_w[N_1 + N_2 + ...]

x is quantized by row, or not where the GEMM is weight-only.

No weight is in memory twice: the stack owns the buffers, and each layer's weight, scale and bias are views of them,
under their former names (`state_dict`, `layer.weight`).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.norm_linear import watched
from octavo.nn.stacked_weights import Stack
from octavo.numerics import Cast, QTensor
from octavo.runtime.gemm_path import input_cast
from octavo.runtime.packed_linear import PackedLinear, PackedModule, packed_product


class PackedStack(PackedModule):
    """The weights of layers of one scheme, `channel`, `int8` or `weight`, with the same number of inputs.

    Buffers, which are in `state_dict` under the names of the layers only:
        weight: e4m3 or int8 [sum of N, K].
        weight_scale: float32 [sum of N, 1].
        bias: [sum of N], zeros for a layer without bias; None if no layer has one.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    layers: tuple[PackedLinear, ...]

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        super().__init__()
        object.__setattr__(self, "layers", tuple(layers))  # another module's children
        self.sizes = [layer.out_features for layer in layers]
        bias = Stack([layer.weight for layer in layers], [layer.bias for layer in layers]).bias()
        self.register_buffer("weight", _stacked([layer.weight for layer in layers]), persistent=False)
        self.register_buffer("weight_scale", torch.cat([layer.weight_scale for layer in layers]), persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        for layer, end in zip(layers, accumulate(self.sizes), strict=True):
            _make_share(layer, self, end - layer.out_features, end)

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether `layers` are the layers of the stack, and none has hooks."""
        return tuple(layers) == self.layers and not any(map(watched, layers))

    @property
    def input_cast(self) -> Cast | None:
        buffers: Any = self._buffers
        return input_cast(self.layers[0].scheme, buffers["weight"].device)

    def forward(self, x: QTensor | Tensor, dtype: torch.dtype) -> Tensor:
        """y [T, sum of N] of x [T, K], cast as `input_cast` says."""
        buffers: Any = self._buffers  # faster than by attribute, as in `octavo.nn.norm_linear.child`
        w_q = self.cached_weight(buffers["weight"], buffers["weight_scale"], self.layers[0].scheme.packed_weight)
        return packed_product(x, w_q, buffers["bias"], dtype)  # [T,K] @ [sum N,K]^T

    def disband(self) -> None:
        """Give each layer a copy of its rows, and hold no layer any more: what is fused with the stack runs unfused."""
        for share in self.layers:
            assert isinstance(share, PackedShare)
            stored = {name: t.clone() for name, t in share._stored().items()}
            layer: Any = share
            layer.__class__ = PackedLinear
            for name in ("weight", "weight_scale", "bias"):
                layer.register_buffer(name, stored.get(name))
        object.__setattr__(self, "layers", ())
        self.weight, self.weight_scale, self.bias = self.weight[:0], self.weight_scale[:0], None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {' + '.join(map(str, self.sizes))}"


def stackable(layers: Sequence[nn.Module]) -> list[PackedLinear] | None:
    """The layers, if all are of one scheme that is fused (`PackedLinear.is_fusable`), of the same number of inputs, and
    not stacked yet; else None."""
    found = [layer for layer in layers if isinstance(layer, PackedLinear) and layer.is_fusable]
    same = len(found) == len(layers) and len({(layer.in_features, layer.scheme.name) for layer in found}) == 1
    return found if same and not any(isinstance(layer, PackedShare) for layer in found) else None


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices of one-byte elements along N, as bytes: torch.cat lacks float8 dtypes on some devices."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


class PackedShare(PackedLinear):
    """A packed layer whose weight is rows of a stack's weight."""

    stack: PackedStack
    begin: int
    end: int
    has_bias: bool

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.stack.weight[self.begin : self.end]

    @property
    def weight_scale(self) -> Tensor:  # type: ignore[override]
        return self.stack.weight_scale[self.begin : self.end]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.stack.bias[self.begin : self.end] if self.has_bias and self.stack.bias is not None else None

    @property
    def input_cast(self) -> Cast | None:
        return self.stack.input_cast

    def packed_weight(self) -> QTensor:
        return self.scheme.packed_weight(self.weight, self.weight_scale)

    def freeze_input(self, amax: Tensor) -> Tensor:
        self.stack.disband()  # which makes this a `PackedLinear`
        return PackedLinear.freeze_input(self, amax)

    def _stored(self) -> dict[str, Tensor]:
        named = {"weight": self.weight, "weight_scale": self.weight_scale, "bias": self.bias}
        return {name: t for name, t in named.items() if t is not None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: t for name, t in self._stored().items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, mine in self._stored().items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != mine.shape or given.dtype != mine.dtype:
                error_msgs.append(
                    f"{prefix}{name} must be {mine.dtype} {list(mine.shape)}, got {given.dtype} {list(given.shape)}"
                )
            else:
                mine.copy_(given)
        known = {prefix + name for name in self._stored()}
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)


def _make_share(layer: PackedLinear, stack: PackedStack, begin: int, end: int) -> None:
    has_bias = layer.bias is not None
    for name in ("weight", "weight_scale", "bias"):
        del layer._buffers[name]
    layer.__class__ = PackedShare
    assert isinstance(layer, PackedShare)
    object.__setattr__(layer, "stack", stack)  # not a child: its bytes would be saved under two names
    layer.begin, layer.end, layer.has_bias = begin, end, has_bias
