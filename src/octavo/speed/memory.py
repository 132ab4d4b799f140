"""The memory that a way of generating takes, while others hold memory in the same process."""

import gc

import torch


def release(device: torch.device) -> None:
    """Free the memory of everything that is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Meter:
    """The most bytes that calls hold on a GPU. Nothing is counted on a CPU.

    Args:
        weights: bytes that the model holds before the first call.
        apart: whether the model is in another process. Then all memory in use on the GPU counts.

    Attributes:
        peak: the most bytes since `reset`: the weights, what calls left allocated, and what a call takes while it runs.
            None on a CPU.

    Example:

        with meter:
            model.generate(ids)
        print(meter.peak)
    """

    def __init__(self, device: torch.device, weights: int = 0, *, apart: bool = False) -> None:
        self.device, self.weights, self.apart = device, weights, apart
        self.reset()

    def reset(self) -> None:
        """Forget the peak, and what earlier calls left allocated."""
        self.held = self.weights
        self.peak: int | None = None

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._before = allocated(self.device)

    def __exit__(self, *_: object) -> None:
        if self.device.type != "cuda":
            return
        if self.apart:
            free, total = torch.cuda.mem_get_info(self.device)
            most = total - free
        else:
            most = self.held + torch.cuda.max_memory_allocated(self.device) - self._before
            self.held += allocated(self.device) - self._before
        self.peak = max(most, self.peak or 0)
