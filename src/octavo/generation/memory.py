"""The room of a cache, and whether the memory of the device suffices for it."""

import torch

from octavo.generation.forward import KeyShape
from octavo.kv_cache.layer import DTYPES
from octavo.words import plural

GIB = 1 << 30
SMALLEST = 256  # tokens of the smallest cache


def capacity_for(tokens: int, context: int) -> int:
    """Room of a cache for `tokens` tokens: a power of two, or one and a half, so that few sizes serve all lengths."""
    size = SMALLEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, context)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a GPU, those that PyTorch holds unused included; None for another device."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def fits(shape: KeyShape, tokens: int, dtype: str | None, device: torch.device) -> bool:
    """Whether the device has memory for the keys and values of `tokens` tokens."""
    free = free_bytes(device)
    return free is None or shape.nbytes(tokens, None if dtype is None else DTYPES[dtype]) <= free


def check_memory(shape: KeyShape, batch: int, tokens: int, dtype: str | None, free: int | None) -> None:
    """Raise an error unless `free` bytes hold the keys and values of `batch` sequences of `tokens` tokens.

    Raises:
        MemoryError: they do not. The message says which batch and which length fit.
    """
    stored = None if dtype is None else DTYPES[dtype]
    needed = shape.nbytes(batch * tokens, stored)
    if free is None or needed <= free:
        return
    one = shape.nbytes(1, stored)
    fitting = []
    if most := free // (one * tokens):
        fitting.append(f"{'one sequence' if most == 1 else f'{most} sequences'} of {tokens} tokens")
    if longest := free // (one * batch):
        fitting.append(f"{longest} tokens for {plural(batch, 'sequence')}")
    advice = f"What fits: {' or '.join(fitting)}." if fitting else "No sequence fits."
    if (stored or shape.dtype).itemsize > 1:
        advice += " kv_cache='fp8' of octavo.load, or --kv-cache fp8 of octavo generate, halves the keys and values."
    raise MemoryError(
        f"the keys and values of {plural(batch, 'sequence')} of {tokens} tokens need {needed / GIB:.1f} GiB in "
        f"{(stored or shape.dtype)}, and {free / GIB:.1f} GiB are free on the GPU. {advice}"
    )
