"""One FP8 GEMM, called directly: octavo.ops, torch.nn.functional.scaled_mm, and cuBLASLt through nvmath-python.

    y[M,N] = (a_q[M,K] * s_a) @ (b_q[N,K] * s_b)^T

For each shape of --shapes: what each of the three gives (SQNR against the same bytes in float64) and how long it takes;
and where nvmath-python is installed, the algorithms that cuBLASLt's heuristics propose for that shape, in their order,
and their order once they are timed. nvmath-python has one scale for a tensor; torch and octavo have row scales as well.

    pip install "nvmath-python[cu13]"      # or cu12, as your torch; without it the other two run
    python examples/direct_gemm.py --shapes 8192x28672x4096 1x4096x4096

ROCm: the same two calls of torch run through hipBLASLt, with FNUZ formats on MI300; pass --format e4m3fnuz. That was
not run. nvmath-python is NVIDIA's alone; hipBLASLt's heuristics are queried by `hipblaslt-bench`.
"""

import argparse
import importlib
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

import octavo
from octavo import ops

SCALINGS = {"tensor": ScalingType.TensorWise, "row": ScalingType.RowWise}
ALGORITHMS, ROUNDS, CALLS = 8, 7, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8192x28672x4096", "8192x4096x14336", "16x4096x4096"])
    parser.add_argument("--format", default="e4m3", help="e4m3, or e4m3fnuz on MI300")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("an FP8 GEMM needs a GPU (compute capability 8.9 or MI300), and torch sees none here")
    for text in options.shapes:
        m, n, k = (int(size) for size in text.split("x"))
        print(f"[{m}, {k}] @ [{n}, {k}]^T")
        compare(m, n, k, options.format)


def compare(m: int, n: int, k: int, fmt: Any) -> None:
    """Each way of computing one product: its SQNR and its time."""
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    for scales in SCALINGS:
        a_q, b_q = (octavo.quantize(x, fmt, granularity=scales) for x in (a, b))
        exact = a_q.dequantize().double() @ b_q.dequantize().double().t()
        ways: dict[str, Callable[[], Tensor]] = {
            "octavo.ops.scaled_mm": partial(ops.scaled_mm, a_q, b_q),
            "torch.nn.functional.scaled_mm": partial(torch_mm, a_q, b_q, scales),
        }
        for name, way in ways.items():
            report(f"{name}, {scales} scales", way, exact, m * n * k)
        if scales == "tensor" and importlib.util.find_spec("nvmath") is not None:
            through_cublaslt(a_q, b_q, exact)


def torch_mm(a: octavo.QTensor, b: octavo.QTensor, scales: str) -> Tensor:
    """The second operand goes in as [K, N], a view of [N, K]: FP8 GEMMs read both along the reduction."""
    how = SCALINGS[scales]
    s_a, s_b = (a.scale, b.scale.t()) if scales == "row" else (a.scale.reshape(()), b.scale.reshape(()))
    return F.scaled_mm(a.data, b.data.t(), s_a, how, s_b.contiguous(), how, output_dtype=torch.bfloat16)


def through_cublaslt(a: octavo.QTensor, b: octavo.QTensor, exact: Tensor) -> None:
    """The heuristics' algorithms for this shape, the product by the first of them, and their order once timed."""
    advanced: Any = importlib.import_module("nvmath.linalg.advanced")
    types: Any = importlib.import_module("nvmath")
    scales = {"a": a.scale.reshape(()), "b": b.scale.reshape(())}
    options = {"result_type": types.CudaDataType.CUDA_R_16BF}
    with advanced.Matmul(a.data, b.data.t(), quantization_scales=scales, options=options) as matmul:
        matmul.plan(preferences={"limit": ALGORITHMS})
        describe("heuristics propose", matmul.algorithms)
        report("nvmath, the first of them", matmul.execute, exact, exact.numel() * a.shape[1])
        matmul.autotune(iterations=ROUNDS)
        describe("timed, the order is", matmul.algorithms)
        report("nvmath, the fastest of them", matmul.execute, exact, exact.numel() * a.shape[1])


def describe(title: str, algorithms: Any) -> None:
    print(f"  {title}:")
    for found in algorithms:
        print(f"    algorithm {found.algorithm_id}, tile {found.tile}, stages {found.stages}, split-k {found.split_k}")


def report(name: str, way: Callable[[], Any], exact: Tensor, products: int) -> None:
    noise = (way().double() - exact).square().sum()
    sqnr = 10 * torch.log10(exact.square().sum() / noise)
    ms = milliseconds(way)
    print(f"  {name:44} {sqnr:5.1f} dB  {ms:8.4f} ms  {2 * products / ms / 1e9:6.0f} TFLOP/s")


def milliseconds(way: Callable[[], Any]) -> float:
    """The median of rounds of calls between two events."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(CALLS):
            way()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / CALLS)
    return statistics.median(times)


if __name__ == "__main__":
    main()
