"""Expert parallelism: each rank of a mesh has some of the experts of each layer, and tokens travel to their experts.

    1  each rank sorts its slots by expert, and counts those of each expert
    2  the counts travel, then the rows of x: each rank receives the rows of its experts
    3  a rank sorts its rows by expert, computes them, and sends the outputs back
    4  each rank sums the outputs of a token by the router's weights

The stacks of experts become DTensors, sharded over their first dimension, so that checkpoints of DCP hold them whole.
The rows of an expert stand in the order of ranks and tokens, so its GEMMs, and the gradient of its matrices, have the
bits that one process computes from all tokens. The host waits for the counts, twice a layer: it must know the sizes of
the exchange. Rows travel in the dtype of x.

Data parallelism averages the gradients of other parameters over ranks. Those of experts, which hold the tokens of all
ranks already, are divided by the number of ranks here.

Source: GShard (arXiv:2006.16668), without a capacity: no token is dropped.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from octavo.distributed.ranks import check_mesh
from octavo.nn import Experts
from octavo.nn.conversion import find_experts, to_fp8_experts
from octavo.nn.experts import gather_rows, scatter_rows
from octavo.nn.module_tools import check_module, exchanged
from octavo.ops import sort_by_expert


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Give each rank of `mesh` an equal share of the experts of each layer of `model`, in place.

    Call it before or after `octavo.convert`, on every rank, and before an optimizer is made. Each rank passes its own
    tokens to the model. Parameters other than experts stay as they are.

    Args:
        model: with experts that `octavo.convert` knows. The ranks take the numbers of rank 0.
        mesh: of one dimension.

    Returns:
        The names of the modules.

    Raises:
        TypeError: `model` is no module, or `mesh` no DeviceMesh.
        ValueError: a mesh of several dimensions, no experts, or a number of experts that the ranks do not divide.

    Example:

        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
        octavo.convert(model)
        expert_parallel(model, mesh)
    """
    check_module(model, "expert_parallel")
    check_mesh(mesh, "expert_parallel")
    found: dict[str, Any] = {name: m for name, m in find_experts(model).items() if hasattr(m, Experts.matrices[0])}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that octavo.convert knows: there is nothing to share")
    for name, module in found.items():
        if (count := module.down_proj.shape[0]) % mesh.size():
            raise ValueError(
                f"{name} has {count} experts, which {mesh.size()} ranks cannot share evenly: take a number of ranks "
                "that divides it"
            )
    for name, module in found.items():
        if not isinstance(module, Experts):
            to_fp8_experts(module, None, name)
        for leaf in Experts.matrices:
            sharded = distribute_tensor(getattr(module, leaf).detach(), mesh, [Shard(0)])
            module.register_parameter(leaf, nn.Parameter(sharded))
        module.parallel = partial(exchange_experts, mesh.get_group(), mesh.size())
    return list(found)


def exchange_experts(
    group: dist.ProcessGroup, size: int, module: Any, x: Tensor, index: Tensor, weight: Tensor
) -> Tensor:
    """The output [T, K] for this rank's tokens x [T, K], as `Experts.forward`, where each of the `size` ranks of a
    group has an equal share of the experts."""
    w_in, w_out = (_local(getattr(module, leaf), size) for leaf in Experts.matrices)
    experts = w_out.shape[0] * size
    slot, row, offsets = sort_by_expert(index, experts)
    sent = offsets.diff(prepend=offsets.new_zeros(1)).view(size, -1)  # [R, E / R], for each expert of a rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    send, receive = sent.sum(1).tolist(), received.sum(1).tolist()  # the host waits
    rows = gather_rows(x, slot, row)[: sum(send)]
    to_experts = partial(_exchange, send=send, receive=receive, group=group)
    to_tokens = partial(_exchange, send=receive, receive=send, group=group)
    mine = exchanged(rows, to_experts, to_tokens)
    numbers = torch.arange(received.shape[1], device=x.device).repeat(size)
    expert = torch.repeat_interleave(numbers, received.flatten(), output_size=sum(receive))
    ones = torch.ones(len(expert), 1, device=x.device)
    y = module.compute(mine, expert.unsqueeze(1), ones, w_in, w_out)
    back = exchanged(y, to_tokens, to_experts)
    unsent = back.new_zeros(len(slot) - len(back), back.shape[1])  # slots of no expert
    return (scatter_rows(torch.cat([back, unsent]), slot, row).float() * weight.float().unsqueeze(2)).sum(1).to(y)


def _local(parameter: Any, ranks: int) -> Tensor:
    """This rank's experts; the gradient is divided by the number of ranks."""
    own = parameter.to_local(grad_placements=[Shard(0)])
    return exchanged(own, lambda w: w.view_as(w), lambda dw: dw / ranks)


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows [M, K] to other ranks and from them."""
    result = rows.new_empty(sum(receive), rows.shape[1])
    # as bytes, since gloo lacks BF16
    dist.all_to_all_single(result.view(torch.uint8), rows.contiguous().view(torch.uint8), receive, send, group=group)
    return result
