"""Drawing weights that are divided among processes, so that they are those of one process."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class OneProcessDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, random numbers for parameters are those that one process draws for whole tensors on the CPU.

    Every process draws the whole tensor from torch's global generator, and a DTensor takes its own part of it. The
    numbers for a tensor on the meta device are drawn and dropped, so that the generator is where one process has it
    after a module is built. So the largest parameter, and not the model, must fit in the memory of the CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DRAWS or not (isinstance(args[0], DTensor) or args[0].is_meta):
            return func(*args, **(kwargs or {}))
        tensor, *numbers = args
        whole = func(torch.empty(tensor.shape, device="cpu"), *numbers, **(kwargs or {}))  # FP32, as one process draws
        if isinstance(tensor, DTensor):
            part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        return tensor
