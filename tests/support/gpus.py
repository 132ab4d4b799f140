"""For tests on a GPU: marks for files of them, poisoned memory, and waits for the device.

In poisoned memory, elements that a kernel fails to write are not right by chance.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch

ONLY_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="these are Hopper's GEMMs"
)
# The thread that runs backward passes has no context before its first GEMM.
NO_CONTEXT = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


def poison() -> None:
    """Fill what the caching allocator will hand out next with 0xFF: NaN in FP32, BF16 and E4M3, -1 in integers. A few
    blocks of every power of two from 512 B to 64 MiB are taken, filled and freed; the allocator keeps them."""
    blocks = [
        torch.empty(1 << size, dtype=torch.uint8, device="cuda").fill_(0xFF) for size in range(9, 27) for _ in range(3)
    ]
    torch.cuda.synchronize()
    del blocks


@contextmanager
def tiled(kernel, tiling):
    """Within the block a file of kernels launches in a tiling of these numbers; in those that it chooses, for none."""
    with pytest.MonkeyPatch.context() as patch:
        if tiling:
            patch.setattr(kernel, "choose", lambda *_: kernel.Tiling(*tiling))
        yield


def capture(call, warm_up: int = 0) -> tuple:
    """A graph of a call, which runs so many times before, and what its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def peak_of(call) -> int:
    """The bytes that a call takes at its peak, beside those that are taken before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def replayed(call) -> torch.Tensor:
    """What a CUDA graph of a call writes when it is replayed."""
    graph, result = capture(call)
    result.fill_(torch.nan)
    graph.replay()
    return result


@contextmanager
def no_waits():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
