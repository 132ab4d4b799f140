"""AdamW's moments with a byte an element and an FP32 scale a block, as the tensors of torchao.optim.

Whether a parameter's moments are quantized depends on the shape of the whole parameter, and a block lies within a row.
So the ranks that share the rows of a parameter (FSDP2) hold the bytes that one process would hold, and a checkpoint of
any number of ranks is that of any other.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from octavo.extras import import_extra
from octavo.nn.weight_cache import local_part

BLOCK = 256  # elements of a row that share a scale
SMALLEST = 4096  # elements of a parameter whose moments are quantized, as in bitsandbytes
KINDS = ("8bit", "fp8")


def zero_moment(p: Tensor, kind: str, *, signed: bool) -> Tensor:
    """A moment of the parameter `p` before the first step: of a `kind` in KINDS if `p` fits, otherwise float32."""
    local = local_part(p)
    if kind not in KINDS or not _fits(p) or local.numel() == 0:
        return torch.zeros_like(p, dtype=torch.float32)
    if kind == "8bit":
        module = import_extra("torchao.optim.subclass_8bit", "optim", "moments in 8 bits are torchao's")
        zeros = module.OptimState8bit.zeros(local.shape, signed, BLOCK, local.device, dtype=torch.float32)
    else:
        module = import_extra("torchao.optim.subclass_fp8", "optim", "moments in FP8 are torchao's")
        zeros = module.OptimStateFp8.zeros(local.shape, BLOCK, local.device, dtype=torch.float32)
    return _like(p, zeros, p.shape)


def stored_parts(p: Tensor, moment: Tensor, kind: str) -> dict[str, Tensor]:
    """The plain tensors that store a moment of `p`, by the suffix of their names. They share the memory of the moment.

    The suffix is "" for a float32 moment; otherwise ".codes", uint8 of the parameter's shape [..., K], and ".scale",
    float32 [..., K / BLOCK].
    """
    if kind not in KINDS or not _fits(p):
        return {"": moment}
    local: Any = local_part(moment)
    scales = torch.Size([*p.shape[:-1], p.shape[-1] // BLOCK])
    if local.numel() == 0:  # a parameter with fewer rows than there are ranks
        empty = local.new_empty(*local.shape[:-1], local.shape[-1] // BLOCK)
        return {".codes": _like(p, local.to(torch.uint8), p.shape), ".scale": _like(p, empty, scales)}
    by_row = local.scale.view(*local.shape[:-1], -1)
    return {".codes": _like(p, local.codes.view(torch.uint8), p.shape), ".scale": _like(p, by_row, scales)}


def _fits(p: Tensor) -> bool:
    """Whether each rank's part of every row is whole blocks."""
    ways = 1
    if isinstance(p, DTensor):
        places = zip(p.placements, p.device_mesh.shape, strict=True)
        ways = math.prod(size for place, size in places if place.is_shard(p.ndim - 1))
    return p.ndim >= 2 and p.numel() >= SMALLEST and p.shape[-1] % (BLOCK * ways) == 0


def _like(p: Tensor, local: Tensor, shape: torch.Size) -> Tensor:
    """`local` as the part of a tensor of `shape` that is sharded as `p` is."""
    if not isinstance(p, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    # not from_local: it copies a tensor of offloaded parameters, which are on the CPU, to the mesh's device
    spec = DTensorSpec(p.device_mesh, p.placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
