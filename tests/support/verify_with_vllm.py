"""`octavo verify` for a process of its own, where the CPU build of vLLM 0.32 gets in PyTorch what it lacks.

That is only arithmetic: the cast to FP8 by a stored scale, the GEMM of 128 x 128 blocks (for Intel's AMX alone there),
experts with inputs in FP8, and a place for MX in its table of kernels; and inputs of vLLM's method fp8 are cast by
token, as on NVIDIA GPUs. Which scheme a folder has, the names and shapes of its tensors, what they are merged into and
what stays in BF16 is its own.
"""

import os

import torch
from torch import Tensor

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def scaled_fp8_quant(input, scale=None, *_, use_per_token_if_dynamic=False, **__):
    """By a scale, or by the largest element of each row or of all."""
    if scale is None:
        largest = input.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else input.abs().amax().view(1)
        scale = (largest.float() / 448).clamp(min=1e-9)
    return (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class Experts:
    """The kernel of experts: y = w2 (silu(w1 x) * w3 x), for each token summed over its experts."""

    is_monolithic = False  # the router is outside
    can_overlap_shared_experts = consumes_expert_mask = False

    class Chosen:
        @staticmethod
        def is_monolithic() -> bool:
            return False

    def __init__(self, moe_quant_config: dict, **_) -> None:
        self.config = moe_quant_config
        self.prepare_finalize = self.fused_experts = self

    def topk_indices_dtype(self) -> None:
        """Any."""

    def output_is_reduced(self) -> bool:
        return False

    def apply(self, x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor, index: Tensor, **_) -> Tensor:
        out = torch.zeros(x.shape)
        for e in index.unique().tolist():
            token, slot = (index == e).nonzero(as_tuple=True)
            gate, up = self.product(x[token], w13[e], 1, e).chunk(2, 1)
            hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
            out.index_add_(0, token, self.product(hidden, w2[e], 2, e) * weight[token, slot, None])
        return out.to(x.dtype)

    def product(self, x: Tensor, w: Tensor, which: int, e: int) -> Tensor:
        """x [T, K] and w [N, K] by their scales: of a tensor, of rows, or of blocks of 128."""
        scale, given = self.config[f"w{which}_scale"][e], self.config[f"a{which}_scale"]
        size = 128 if self.config["block_shape"] else x.shape[1]
        groups = x.float().unflatten(1, (-1, size))
        s_x = groups.abs().amax(2, keepdim=True).clamp(min=1e-9) / 448 if given is None else given.max()
        rounded = ((groups / s_x).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s_x).flatten(1)
        if self.config["block_shape"]:
            scale = scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
        return rounded @ (w.float() * scale).t()


def unconverted(w13: Tensor, w2: Tensor, w13_scale: Tensor, w2_scale: Tensor, **_) -> tuple[Tensor, ...]:
    return w13, w2, w13_scale, w2_scale


def complete() -> None:
    """Fill in what is missing."""
    import vllm._custom_ops as operations
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.layers.fusion.fused_act_quant as fused
    import vllm.model_executor.layers.quantization.fp8 as method
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as compressed,
    )
    from vllm.platforms import PlatformEnum

    class Blocks(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            a = A.float() * As.repeat_interleave(128, 1)[:, : A.shape[1]]
            scale = Bs.repeat_interleave(128, 0)[: B.shape[0]].repeat_interleave(128, 1)[:, : B.shape[1]]
            return (a @ (B.float() * scale).t()).to(self.config.out_dtype)

    for module in (compressed, method):
        module.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.NONE, Experts.Chosen)
        module.convert_to_fp8_moe_kernel_format = unconverted
        module.make_fp8_moe_quant_config = lambda **settings: settings
        module.make_fp8_moe_kernel = Experts
    operations.scaled_fp8_quant = scaled_fp8_quant
    method.cutlass_fp8_supported = lambda: True
    fused._FUSED_ACT_QUANT.clear()
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Blocks]
    kernels._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [EmulationMxfp8LinearKernel]


if __name__ == "__main__":
    from octavo_cli import main

    if not torch.cuda.is_available():
        complete()
    main()
