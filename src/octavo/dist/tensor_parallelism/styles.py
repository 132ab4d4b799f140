"""Styles for `torch.distributed.tensor.parallel.parallelize_module` whose layers exchange bytes and row scales.

    column   ColumnParallel(), in PyTorch ColwiseParallel(input_layouts=Shard(1))     q, k, v; gate, up
    row      RowParallel(), in PyTorch RowwiseParallel(output_layouts=Shard(1))       o; down
    norm     NormParallel(), in PyTorch SequenceParallel()                            the norms in front of them

The styles of PyTorch hand DTensors to a layer and take DTensors from it, and so gather its input in high precision.
These leave the layer's input and output plain tensors. The parameters are DTensors as in PyTorch's styles, so that
`state_dict`, `torch.distributed.checkpoint`, `clip_grad_norm_` and `fully_shard` treat them in the same way.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from octavo.dist.tensor_parallelism.layers import Column, Row
from octavo.dist.tensor_parallelism.ranks import Ranks
from octavo.nn import Linear
from octavo.nn.parallel import Parallel, ParallelLinear


class _LinearStyle(ParallelStyle):
    weight_axis: int  # of the weight [N, K], the one that is cut

    def __init__(self, *, sequence: bool = True, asynchronous: bool = False) -> None:
        super().__init__()
        self.sequence, self.asynchronous = sequence, asynchronous

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        if type(module) not in (nn.Linear, Linear):
            raise TypeError(f"{type(self).__name__} takes an nn.Linear, converted or not, got {module}")
        ranks = Ranks.of(device_mesh, sequence=self.sequence, asynchronous=self.asynchronous)
        axis = self.weight_axis
        layer: Any = module
        if layer.weight.shape[axis] % ranks.size:
            raise ValueError(
                f"{ranks.size} ranks cannot share {module}: its {('outputs', 'inputs')[axis]} must be a multiple of "
                f"{ranks.size}, got {layer.weight.shape[axis]}; choose a smaller degree of tensor parallelism"
            )
        distribute(module, "weight", device_mesh, Shard(axis), self.src_data_rank)
        distribute(module, "bias", device_mesh, Shard(0) if axis == 0 else Replicate(), self.src_data_rank)
        layer.parallel = self.parallel(ranks)
        if type(module) is nn.Linear:
            layer.__class__ = ParallelLinear
        return module

    def parallel(self, ranks: Ranks) -> Parallel:
        raise NotImplementedError


class ColumnParallel(_LinearStyle):
    """Cut the outputs of a linear layer over the ranks: weight Shard(0), bias Shard(0).

    Args:
        sequence: the input is this rank's part [..., T / ranks, K] of the sequence. Otherwise it is all of it.
        asynchronous: as in `tensor_parallel`.

    The output is [..., T, N / ranks], for all of the sequence.

    Raises:
        TypeError: the module is no `nn.Linear`.
        ValueError: the mesh has more than one dimension, or its size does not divide the outputs.

    Example:
        >>> mesh = init_device_mesh("cuda", (2,))
        >>> plan = {"fc1": ColumnParallel(), "fc2": RowParallel()}
        >>> model = parallelize_module(model, mesh, plan)
        >>> octavo.convert(model)
    """

    weight_axis = 0

    def parallel(self, ranks: Ranks) -> Parallel:
        return Column(ranks)


class RowParallel(_LinearStyle):
    """Cut the inputs of a linear layer over the ranks: weight Shard(1), bias on each rank.

    Args:
        sequence: the output is this rank's part [..., T / ranks, N] of the sequence. Otherwise it is all of it.
        asynchronous: as in `tensor_parallel`.

    The input is [..., T, K / ranks], for all of the sequence, as the output of a `ColumnParallel` layer.

    Raises:
        TypeError: the module is no `nn.Linear`.
        ValueError: the mesh has more than one dimension, or its size does not divide the inputs.
    """

    weight_axis = 1

    def parallel(self, ranks: Ranks) -> Parallel:
        return Row(ranks)


class NormParallel(ParallelStyle):
    """Give each rank the parameters of a norm, whose gradients are summed over the ranks.

    Args:
        placement: of the norm's input and output among the ranks: Shard(1) where each has a part of the sequence
            [B, T / ranks, K], Shard(2) for a norm of the heads [B, T, heads / ranks, D], Replicate() where each has
            all. None for a norm that only `octavo.nn.NormLinear`, `SwiGLU` and `GELU` call.
    """

    def __init__(self, placement: Placement | None = None) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        for name in list(module._parameters):
            distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
        placement = self.placement
        if placement is not None:

            def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                return DTensor.from_local(args[0], device_mesh, [placement], run_check=False), *args[1:]

            def leave(module: nn.Module, args: tuple[Any, ...], y: Any) -> Tensor:
                return y.to_local()  # type: ignore[no-any-return]

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
        return module


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f'tensor parallelism takes a DeviceMesh, such as init_device_mesh("cuda", (2,)), got {mesh!r}')
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism takes a mesh of one dimension, got {mesh}: pass one of its dimensions, for example "
            'mesh["tp"], and give the other to fully_shard'
        )


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Make a parameter of `module` a DTensor, with the numbers that rank `source` of the mesh has."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    if isinstance(parameter, DTensor):
        raise ValueError(f"{name} of {module} is a DTensor already: parallelize a layer once, and before fully_shard")
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
