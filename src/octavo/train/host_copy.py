"""A copy of the state of a run in the memory of the CPU, for writing it while the run goes on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopy:
    """A copy of tensors by name; of a DTensor, of the part that this rank holds.

    The memory is as large as the tensors, and stays for the next copy. For tensors on a GPU it is pinned, so that they
    are copied as fast as the bus allows.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._pinned: list[Tensor] = []

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, and wait until they are copied. Names, shapes and dtypes must be those of the first call."""
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name not in self._copies:
                self._copies[name] = self._empty_for(local)
            self._copies[name].copy_(local, non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()

    def __getitem__(self, name: str) -> Tensor:
        return self._copies[name]

    def close(self) -> None:
        """Give the memory back."""
        for copy in self._pinned:
            torch.cuda.check_error(_cuda().cudaHostUnregister(copy.data_ptr()))
        self._pinned, self._copies = [], {}

    def _empty_for(self, local: Tensor) -> Tensor:
        copy = torch.empty(local.shape, dtype=local.dtype)
        if local.is_cuda and copy.numel():
            # torch.empty(pin_memory=True) takes the next power of two of bytes, up to twice as many
            torch.cuda.check_error(_cuda().cudaHostRegister(copy.data_ptr(), copy.nbytes, 0))
            self._pinned.append(copy)
        return copy


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
