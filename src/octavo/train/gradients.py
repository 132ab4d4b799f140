"""Gradients of BF16 weights that add up in FP32."""

from collections.abc import Iterable

import torch
from torch import Tensor


def accumulate_in_fp32(parameters: Iterable[Tensor]) -> None:
    """Let the gradients of BF16 parameters be float32 from the first backward pass on.

    A sum of BF16 gradients stops growing when an addend is below 1/512 of it: after some hundred micro-batches most is
    lost. Each gradient comes from its GEMM in BF16 and is added to a float32 `grad`, which takes 4 bytes an element.

    Args:
        parameters: plain, or sharded by FSDP2 or tensor parallelism.
    """
    for p in parameters:
        if p.dtype == torch.bfloat16:
            p.grad_dtype = None  # any: autograd neither refuses a float32 gradient nor casts it
            p.register_post_accumulate_grad_hook(_widen)  # type: ignore[no-untyped-call]


def _widen(p: Tensor) -> None:
    # the first gradient; the next ones are added to this one, in its dtype
    if p.grad is not None and p.grad.dtype != torch.float32:
        # FSDP2 of torch 2.11 copies the gradient of an offloaded parameter without waiting
        if p.grad.device.type == "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        p.grad = p.grad.float()
