"""Three ways for a quantizer to divide by its scale. Octavo multiplies by the reciprocal, which rounds twice.

Three variants of the kernel that quantizes rows to E4M3:

    reciprocal   q = x * (1 / s)                                           two roundings
    division     q = div_rn(x, s)                                          one rounding
    corrected    q = x * (1 / s);  r = fma(-q, s, x);  q = fma(r, 1 / s, q)   Markstein's correction

Their bytes are compared with those of x / s, rounded to float32 and then to E4M3 by PyTorch on the same device. Each is
timed beside a copy that reads and writes as many bytes. The inputs are normal numbers whose magnitudes vary by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench import record
from bench.gpu.kernels import copy_ms
from bench.gpu.timing import replayed
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import ROW
from octavo.numerics.scaling import scale_from_amax
from octavo.ops.device_math import amax_bits, inverse
from octavo.ops.device_math import scale_from_amax as device_scale
from octavo.ops.triton_support import row_tile

SHAPES = ((8192, 4096), (8192, 14336))
WAYS = ("reciprocal", "division", "corrected")


def main() -> None:
    rows = [measure(way, m, k) for m, k in SHAPES for way in WAYS]
    print(record.write("gpu_division", {"rows": rows}))


def measure(way: str, m: int, k: int) -> dict[str, Any]:
    """Bytes that differ from x / s, and microseconds, for one variant and size."""
    torch.manual_seed(0)
    x = (torch.randn(m, k, device="cuda") * torch.randn(m, 1, device="cuda").exp()).bfloat16()
    run = quantizer(x, way)
    data, scale = run()
    wide = x.float()
    expected = scale_from_amax(ROW.amax(wide), E4M3)
    if not torch.equal(scale, expected):
        raise RuntimeError(f"{way}: the scales must be those of the reference, {(scale != expected).sum()} differ")
    divided = (wide / expected).to(E4M3.dtype)
    wrong = int((data.view(torch.uint8) != divided.view(torch.uint8)).sum())
    milliseconds, copy = replayed(run), copy_ms(3 * x.numel())
    row = {"way": way, "shape": [m, k], "differ": wrong, "us": 1e3 * milliseconds, "copy_us": 1e3 * copy}
    print(
        f"{way:10} {m} x {k:<6} {wrong:6} bytes differ  {row['us']:7.1f} us, copy {row['copy_us']:7.1f} us", flush=True
    )
    return row


def quantizer(x: Tensor, way: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that quantizes `x` [M, K] by row, in one of WAYS: to data [M, K] and scale [M, 1]."""
    m, k = x.shape
    data, scale = torch.empty_like(x, dtype=E4M3.dtype), x.new_empty((m, 1), dtype=torch.float32)
    block, rows, warps = row_tile(k)

    def run() -> tuple[Tensor, Tensor]:
        _kernel[(triton.cdiv(m, rows),)](
            x, data, scale, m, k, FORMAT_MAX=E4M3.max, WAY=WAYS.index(way), BLOCK=block, ROWS=rows, num_warps=warps
        )
        return data, scale

    return run


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x_ptr, data_ptr, scale_ptr, m, k,
    FORMAT_MAX: tl.constexpr, WAY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < m)[:, None] & (col < k)[None, :]
    offs = row[:, None] * k + col[None, :]
    v = tl.load(x_ptr + offs, mask, other=0.0).to(tl.float32)
    s = device_scale(amax_bits(v, 1), FORMAT_MAX, False)
    by, inv = tl.broadcast_to(s[:, None], v.shape), tl.broadcast_to(inverse(s)[:, None], v.shape)
    if WAY == 1:
        q = tl.div_rn(v, by)
    else:
        q = v * inv
        if WAY == 2:
            q = tl.fma(tl.fma(-q, by, v), inv, q)
    tl.store(data_ptr + offs, q.to(data_ptr.dtype.element_ty), mask)
    tl.store(scale_ptr + row, s, row < m)


if __name__ == "__main__":
    main()
