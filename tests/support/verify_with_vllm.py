"""`octavo verify` for a process of its own, where the CPU build of vLLM 0.32 gets in PyTorch what it lacks.

That is only arithmetic: the cast to FP8 by a stored scale, the GEMM of 128 x 128 blocks (for Intel's AMX alone there)
and a place for MX in its table of kernels; and inputs of the layout autofp8 are cast by token, as on NVIDIA GPUs. Which
scheme a folder has, the names and shapes of its tensors, what they are merged into and what stays in BF16 is its own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def scaled_fp8_quant(
    input: Tensor, scale: Tensor | None = None, *_: Any, use_per_token_if_dynamic: bool = False, **__: Any
) -> tuple[Tensor, Tensor]:
    """By a scale, or by the largest element of each row or of all."""
    if scale is None:
        largest = input.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else input.abs().amax().view(1)
        scale = (largest.float() / 448).clamp(min=1e-9)
    return (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def complete() -> None:
    """Fill in what is missing."""
    import vllm._custom_ops as operations
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.layers.fusion.fused_act_quant as fused
    import vllm.model_executor.layers.quantization.fp8 as autofp8
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import PlatformEnum

    class Blocks(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            a = A.float() * As.repeat_interleave(128, 1)[:, : A.shape[1]]
            scale = Bs.repeat_interleave(128, 0)[: B.shape[0]].repeat_interleave(128, 1)[:, : B.shape[1]]
            return (a @ (B.float() * scale).t()).to(self.config.out_dtype)

    operations.scaled_fp8_quant = scaled_fp8_quant
    autofp8.cutlass_fp8_supported = lambda: True
    fused._FUSED_ACT_QUANT.clear()
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Blocks]
    kernels._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [EmulationMxfp8LinearKernel]


if __name__ == "__main__":
    from octavo_cli import main

    if not torch.cuda.is_available():
        complete()
    main()
