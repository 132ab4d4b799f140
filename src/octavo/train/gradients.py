"""Gradients: those of BF16 weights add up in FP32, and the norm of all is limited."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from octavo.nn.weight_cache import local_part


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


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients by one factor, in place, so that their norm is at most `limit`.

    This is `torch.nn.utils.clip_grad_norm_` on the parts that each rank holds. On DTensors that takes more than twice
    the host's time.

    Args:
        parameters: plain, or sharded by FSDP2, which leaves no gradient that is a sum still to be taken.
        limit: above 0; infinity changes no gradient.

    Returns:
        The Euclidean norm of all gradients, of all ranks, before they were scaled: 0-dim, on their device.
    """
    layouts: dict[Any, list[Tensor]] = defaultdict(list)
    for p in parameters:
        if (grad := p.grad) is not None:
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            layouts[layout, grad.dtype].append(local_part(grad))
    norm: Tensor = torch.linalg.vector_norm(torch.cat([_norms(grads, key[0]) for key, grads in layouts.items()]))
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for grads in layouts.values():
        torch._foreach_mul_(grads, factor)
    return norm


def _norms(grads: list[Tensor], layout: tuple[Any, Any] | None) -> Tensor:
    """The norm [P] of each of P gradients, of which this rank holds `grads`, with one all-reduce for all of them."""
    norms = torch.stack(torch._foreach_norm(grads))
    if layout is None:
        return norms
    mesh, placements = layout
    sums = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    squares = DTensor.from_local(norms.square(), mesh, sums, run_check=False)
    return squares.full_tensor().sqrt().to(norms.device)
