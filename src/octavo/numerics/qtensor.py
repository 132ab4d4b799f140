"""A quantized tensor: data, scales, format and granularity."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import NARROW_FORMATS, Format, narrow_format, widen
from octavo.numerics.scaling import History, floor_scale, quotient, scale_from_amax, two_level_scale

SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True, eq=False)
class QTensor:
    """x ≈ data * scale. A plain frozen container, not a subclass of Tensor.

    Invariants, checked at construction:
        data.dtype == format.dtype
        scale.ndim == data.ndim, and scale.shape == granularity.scale_shape(data.shape)
        scale.dtype is float32 or float8_e8m0fnu, on the device of data

    Example:
        >>> q = octavo.quantize(torch.randn(4, 8))
        >>> q.data.shape, q.scale.shape, q.dequantize().shape
        (torch.Size([4, 8]), torch.Size([4, 1]), torch.Size([4, 8]))
    """

    data: Tensor
    scale: Tensor
    format: Format
    granularity: Granularity

    def __post_init__(self) -> None:
        if torch.compiler.is_dynamo_compiling():  # to trace the checks for each tensor of a model takes seconds
            return
        data, scale, fmt, granularity = self.data, self.scale, self.format, self.granularity
        if not isinstance(fmt, Format) or not isinstance(granularity, Granularity):
            kinds = f"{fmt!r} and {granularity!r}"
            raise TypeError(f"a QTensor takes a Format and a Granularity, got {kinds}: call octavo.quantize")
        if data.dtype != fmt.dtype:
            raise TypeError(f"{fmt.name} data must be {fmt.dtype}, got {data.dtype}")
        if scale.dtype not in SCALE_DTYPES:
            raise TypeError(f"a scale must be float32 or float8_e8m0fnu, got {scale.dtype}")
        required = granularity.scale_shape(data.shape)
        if scale.shape != required:
            raise ValueError(
                f"{granularity.name} scales of data {list(data.shape)} must have shape {list(required)}, "
                f"got {list(scale.shape)}"
            )
        if scale.device != data.device:
            raise ValueError(f"data is on {data.device} and its scale on {scale.device}: move one to the other")

    def __repr__(self) -> str:
        dtype = str(self.scale.dtype).removeprefix("torch.")
        scale = f"{self.granularity.name} scales {dtype} {list(self.scale.shape)}"
        return f"QTensor({self.format.name} {list(self.shape)}, {scale}, {self.data.device})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a QTensor has no {name!r}: take that of q.dequantize(), of q.data or of q.scale")

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that was quantized."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """data * scale, computed in float32 and rounded once to `dtype`.

        A finite tensor stays finite: a product beyond the range of float32 (or of bfloat16, for that `dtype`) becomes
        the largest number there, not inf. Such a product occurs if a number near the largest float32 is rounded up in a
        block with a power-of-two scale. The MX specification leaves it to the implementation.
        """
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dequantize takes a dtype of floating point, got {dtype!r}: give torch.float32")
        wide, scale = widen(self.data), self.granularity.expand(self.scale.float(), tuple(self.shape))
        largest = torch.finfo(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).max
        x = wide * scale
        return torch.where(wide.isfinite() & scale.isfinite(), x.clamp(-largest, largest), x).to(dtype)

    def t(self) -> QTensor:
        """The transposed matrix, as a view, for granularities whose scale transposes with the bytes."""
        if self.data.ndim != 2 or not self.granularity.transposes:
            raise ValueError(
                f"only a matrix with tensor or square-block scales transposes as it is; this is {list(self.shape)} "
                f"with {self.granularity.name} scales: quantize the transposed matrix instead"
            )
        return QTensor(self.data.t(), self.scale.t(), self.format, self.granularity)


# ---- Granularity is the shape of the scale: how many elements share one.
#
# A tensor is cut into blocks, and each block has one scale. The scale has as many dimensions as the tensor. The size of
# each dimension is the number of blocks along it. The last block may be shorter than the others.
#
#     tensor        one block             x[M,K]  scale[1, 1]
#     row           1 x K                         scale[M, 1]             (a token of x, an output channel of w)
#     group:G       1 x G                         scale[M, ceil(K/G)]     (along the reduction; as block:1xG)
#     block:RxC     R x C                         scale[ceil(M/R), ceil(K/C)]


@dataclass(frozen=True)
class Granularity:
    """The block of elements that shares one scale: `rows` x `cols` of the last two dimensions, None for all of them.

    `octavo.numerics` has the usual ones: `ROW`, `TENSOR`, `group(128)` and `block(128, 128)`.

    Raises:
        ValueError: a size below 1, or several rows over all columns.
    """

    rows: int | None
    cols: int | None

    def __post_init__(self) -> None:
        for size in (self.rows, self.cols):
            if size is not None and size < 1:
                raise ValueError(f"a block needs at least one row and one column, got {self.rows} x {self.cols}")
        if (self.rows is None) != (self.cols is None) and self.rows != 1:
            raise ValueError(f"only one row can span all columns, got a block of {self.rows} x {self.cols}")

    def __eq__(self, other: object) -> bool:  # by number, not as tuples: torch.compile traces it faster by far
        return isinstance(other, Granularity) and self.rows == other.rows and self.cols == other.cols

    @property
    def name(self) -> str:
        """The name that `parse_granularity` reads."""
        if self.rows is None and self.cols is None:
            return "tensor"
        if self.rows == 1:
            return "row" if self.cols is None else f"group:{self.cols}"
        return f"block:{self.rows}x{self.cols}"

    @property
    def transposes(self) -> bool:
        """True if the scale of the transposed matrix is the transposed scale (one quantization serves both)."""
        return self.rows == self.cols

    @property
    def outer(self) -> bool:
        """True if the scale is constant along the reduction (the last axis), so that a GEMM can apply it outside."""
        return self.cols is None

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The block's size in each dimension of a tensor of `shape`."""
        if self.rows is None and self.cols is None:
            return tuple(max(n, 1) for n in shape)
        cols = self.cols or max(shape[-1], 1)
        return ((*(1,) * (len(shape) - 2), self.rows or 1) if len(shape) > 1 else ()) + (cols,)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a tensor of `shape`: the number of blocks along each dimension."""
        if self.rows is None:  # an empty tensor, or an empty row, still has a scale
            return (1,) * len(shape)
        if self.cols is None:
            return *shape[:-1], 1
        return tuple(-(-n // b) for n, b in zip(shape, self.block(shape), strict=True))

    def amax(self, x: Tensor) -> Tensor:
        """The largest magnitude in each block of `x`, in the scale's shape; NaN for a block that holds NaN."""
        if not x.numel():
            return x.new_zeros(self.scale_shape(tuple(x.shape)))
        if self.rows == 1 and self.cols is None:
            return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))  # abs would make a copy
        x, block = x.abs(), self.block(tuple(x.shape))
        if any(padding := [p for n, b in zip(x.shape[::-1], block[::-1], strict=True) for p in (0, -n % b)]):
            x = F.pad(x, padding)  # zeros up to whole blocks
        cut = x.reshape([s for n, b in zip(x.shape, block, strict=True) for s in (n // b, b)])  # [n0, b0, n1, b1, ...]
        return cut.amax(dim=tuple(range(1, cut.ndim, 2)))

    def expand(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`scale` repeated so that it broadcasts against a tensor of `shape`."""
        for axis, (n, b) in enumerate(zip(shape, self.block(shape), strict=True)):
            if scale.shape[axis] != 1 and b > 1:
                scale = scale.repeat_interleave(b, dim=axis).narrow(axis, 0, n)
        return scale


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)


def group(size: int) -> Granularity:
    """Each `size` elements along the reduction share a scale."""
    return Granularity(1, size)


def block(rows: int, cols: int) -> Granularity:
    """Each block of `rows` x `cols` elements shares a scale."""
    return Granularity(rows, cols)


def parse_granularity(name: str) -> Granularity:
    """The granularity called `name`: "tensor", "row", "group:64", "block:128x128"."""
    if name in ("tensor", "row"):
        return TENSOR if name == "tensor" else ROW
    if match := re.fullmatch(r"group:(\d+)", name):
        return group(int(match[1]))
    if match := re.fullmatch(r"block:(\d+)x(\d+)", name):
        return block(int(match[1]), int(match[2]))
    raise ValueError(f"unknown granularity {name!r}: choose tensor, row, group:G, as group:64, or block:RxC")


# ---- A cast: all settings of the quantization of one tensor.


SCALE_KINDS = ("fp32", "pow2", "e8m0", "e8m0_floor", "e4m3")
FOUR_BIT_KINDS = ("e8m0_floor", "e4m3")  # those of MXFP4 and NVFP4, which e2m1 alone takes
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, eq=False)
class Cast:
    """The settings of a quantization. Frozen and hashable.

    Casts are compared by one string. torch.compile would take a number that differs between two recipes of one code for
    a variable.

    Args:
        format: "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1" or "int8". int8 is rounded to nearest.
        granularity: which elements share a scale.
        scale: "fp32", "pow2" (a float32 power of two, rounded up) or "e8m0" (the same, stored in one byte). For "e2m1"
            also "e8m0_floor", the rule of MX, by which numbers above 3/4 of the next power of two saturate, and
            "e4m3", that of NVFP4: an E4M3 number over a float32 number of the tensor; float32 holds the quotient.
        rounding: "nearest" (even) or "stochastic".
        relative_floor: the smallest scale allowed, as a fraction of the tensor's largest scale, 0 to 1.
        history: delayed scaling, for a tensor-wide scale; None scales by the tensor's own amax.

    Attributes:
        spec: format, granularity, scale and relative_floor in one string, which `parse_cast` reads. The registered
            operations take it, since the schema of an operation has no type for a Cast.
        by_row: whether the granularity is row. torch.compile takes long to trace a comparison of granularities.

    Raises:
        TypeError: the granularity is no `Granularity`, such as a name, or the history no `History`.
        ValueError: an unknown name, a relative_floor outside 0 to 1, or a history without granularity tensor.

    Example:
        >>> octavo.Cast("e4m3", octavo.numerics.block(128, 128), scale="pow2").spec
        'e4m3 block:128x128 pow2 0.0'
    """

    format: str = "e4m3"
    granularity: Granularity = ROW
    scale: str = "fp32"
    rounding: str = "nearest"
    relative_floor: float = 0.0
    history: History | None = None
    spec: str = field(init=False, repr=False)
    by_row: bool = field(init=False, repr=False)
    _key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        narrow_format(self.format)
        if not isinstance(self.granularity, Granularity):
            raise TypeError(
                f"granularity must be a Granularity, got {self.granularity!r} ({type(self.granularity).__name__}): "
                "give ROW, TENSOR, group(128) or block(128, 128) of octavo.numerics"
            )
        if self.scale not in SCALE_KINDS:
            raise ValueError(f"unknown kind of scale {self.scale!r}: choose one of {', '.join(SCALE_KINDS)}")
        if self.scale in FOUR_BIT_KINDS and self.format != "e2m1":
            raise ValueError(f"scales in {self.scale} are of e2m1, got {self.format}: choose fp32, pow2 or e8m0")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {self.rounding!r}: choose one of {', '.join(ROUNDINGS)}")
        if self.format == "int8" and self.rounding != "nearest":
            raise ValueError("int8 is rounded to nearest: choose an FP8 format for stochastic rounding")
        if not 0 <= self.relative_floor <= 1:
            raise ValueError(f"relative_floor is a fraction of the largest scale, 0 to 1, got {self.relative_floor}")
        if not isinstance(self.history, History | None):
            raise TypeError(f"history must be a History or None, got {self.history!r}: give octavo.numerics.History()")
        if self.history is not None and self.granularity != TENSOR:
            raise ValueError(
                f"a history holds one amax a tensor: it needs granularity tensor, got {self.granularity.name}"
            )
        spec = f"{self.format} {self.granularity.name} {self.scale} {float(self.relative_floor)}"
        object.__setattr__(self, "spec", spec)  # the dataclass is frozen
        object.__setattr__(self, "by_row", self.granularity == ROW)
        history = () if self.history is None else tuple(vars(self.history).values())
        numbers = [value if isinstance(value, str) else float(value) for value in history]
        object.__setattr__(self, "_key", f"{spec} {self.rounding} {numbers}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cast) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        """The format, the granularity, and the fields that are not the default."""
        floor = f"floor {self.relative_floor:g}" if self.relative_floor else ""
        others = (self.scale, self.rounding, floor, "delayed" if self.history else "")
        return " ".join([self.format, self.granularity.name, *(w for w in others if w not in ("", "fp32", "nearest"))])

    @property
    def fmt(self) -> Format:
        return NARROW_FORMATS[self.format]

    @property
    def power_of_two(self) -> bool:
        return self.scale not in ("fp32", "e4m3")

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e8m0fnu if self.scale.startswith("e8m0") else torch.float32

    @property
    def bytes_serve_both(self) -> bool:
        """True if the bytes of one quantization, transposed, serve the other GEMM too (`octavo.recipe`)."""
        return self.by_row or self.granularity.transposes

    def scale_of(self, amax: Tensor) -> Tensor:
        """The scales in float32, from the `amax` of each block."""
        if self.scale == "e8m0_floor":
            return floor_scale(amax, self.fmt)
        if self.scale == "e4m3":
            number, divisor = two_level_scale(amax, self.fmt)
            return quotient(number.float(), divisor)
        return scale_from_amax(amax, self.fmt, power_of_two=self.power_of_two, relative_floor=self.relative_floor)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        values = asdict(self) | {"granularity": self.granularity.name}
        return {each.name: values[each.name] for each in fields(self) if each.init}


@cache
def parse_cast(spec: str) -> Cast:
    """The cast of a `Cast.spec`, which holds neither rounding nor history."""
    format, granularity, scale, relative_floor = spec.split()
    return Cast(format, parse_granularity(granularity), scale, relative_floor=float(relative_floor))
