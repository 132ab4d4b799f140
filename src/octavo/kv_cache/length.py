"""The number of tokens that a KV cache holds."""

import torch
from torch import Tensor


class Length:
    """The number of tokens of a cache, for the device and for the host. All layers of a model share one.

    Args:
        max_tokens: room of the cache.
        device: of the tensor.

    Attributes:
        tensor: int64, no dimension, which kernels read: one CUDA graph of a decoding step serves every length.
        host: the same number without waiting for the device. Replays of a CUDA graph do not change it.
    """

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        self.max_tokens = max_tokens
        self.tensor: Tensor = torch.zeros((), dtype=torch.int64, device=device)
        self.host = 0

    def advance(self, tokens: int) -> None:
        """Count new tokens.

        Raises:
            RuntimeError: the cache has no room for them. Compiled code does not check.
        """
        if not torch.compiler.is_compiling():
            if self.host + tokens > self.max_tokens:
                raise RuntimeError(
                    f"a cache of {self.max_tokens} tokens is full: it holds {self.host} and got {tokens} more; make a "
                    "larger one"
                )
            self.host += tokens
        self.tensor.add_(tokens)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        self.tensor.sub_(tokens).clamp_(min=0)
        self.host = max(0, self.host - tokens)

    def clear(self) -> None:
        self.tensor.zero_()
        self.host = 0
