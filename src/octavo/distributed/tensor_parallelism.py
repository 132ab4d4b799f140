"""`tensor_parallel`: give each module of a model of known architecture its style.

    tokens -> embedding, the vocabulary cut     -> x [B, T/R, K], this rank's part of the sequence
    norm -> q, k, v: outputs cut, gathered x    -> [B, T, heads/R, D] -> o: inputs cut, scattered -> + x
    norm -> gate, up: outputs cut, gathered x   -> [B, T, F/R]        -> down: inputs cut, scattered -> + x
    norm -> head, the vocabulary cut            -> logits [B, T, V], gathered

The plan is that of Megatron (arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198).
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from octavo.architectures import ARCHITECTURES, Architecture, Block
from octavo.distributed.parallel_layers import Column, ParallelLayer, Row
from octavo.distributed.ranks import Ranks, check_mesh, own_rows
from octavo.nn import Linear
from octavo.nn.fused_modules import DecoderLayer, fuse_decoder_layers, is_known
from octavo.nn.parallel_weights import ParallelLinear


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True, asynchronous: bool = False) -> None:
    """Cut the layers of `model` over the ranks of `mesh`, in place; each rank then has a part of each weight.

    Parameters become DTensors, with the numbers that the first rank has. The model takes the same tokens [B, T] on all
    ranks of the mesh, and gives the same logits [B, T, V] on each. `octavo.convert` may come before or after. With
    `rowwise`, the layers then exchange bytes and row scales instead of BF16, and compute with the bytes of the whole
    weights; other recipes exchange high precision. `fully_shard`, over another dimension of the same mesh, comes after.

    Args:
        model: a Llama or GPT-2 of `octavo.models`, or a causal language model of transformers of the type Llama,
            Mistral, Qwen2 or Qwen3; it may be on the meta device.
        mesh: of one dimension.
        sequence: between the layers, each rank has a part of the sequence, whose length T must then be a multiple of
            the size of the mesh. Otherwise each rank has all of it, and computes the norms of all.
        asynchronous: on GPUs that reach each other's memory (NVLink), with `sequence` and the recipe `rowwise`:
            multiply the rows of one rank while those of another travel, in PyTorch's operations on symmetric memory.

    Raises:
        ValueError: another architecture (give its layers the styles `ColumnParallel`, `RowParallel` and `NormParallel`
            by PyTorch's `parallelize_module`), a mesh of several dimensions, or one whose size does not divide the
            heads, the heads of keys and values or the width of the MLP; `asynchronous` where it cannot run. Nothing is
            changed then.

    Example:
        >>> mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        >>> octavo.convert(model)
        >>> tensor_parallel(model, mesh["tp"])
        >>> for layer in model.model.layers:
        ...     fully_shard(layer, mesh=mesh["dp"])
        >>> fully_shard(model, mesh=mesh["dp"])
    """
    check_mesh(mesh, "tensor parallelism")
    architecture, block = _find_architecture(model)
    layers: Any = model.get_submodule(architecture.layers)
    _check_sizes(layers[0], block, mesh.size())
    ranks = Ranks.of(mesh, sequence=sequence, asynchronous=asynchronous)
    fuse_decoder_layers(model)
    embedding, head = model.get_submodule(architecture.embeddings[0]), model.get_submodule(architecture.head)
    tied = head.weight is embedding.weight
    # The models of transformers count the tokens in the output of their embedding, so it is cut after that.
    cut_later = sequence and isinstance(layers[0], DecoderLayer)
    plan = _plan(architecture, block, ranks, cut_embedding=sequence and not cut_later)
    parallelize_module(model, mesh, plan)
    if tied:
        head.weight = embedding.weight
    # The output of one of PyTorch's styles may be on its way from other ranks: compiled layers would lose the gradient
    # of such an input. FSDP2 warns of an output that is a view.
    for module in (embedding, head):
        module.register_forward_hook(lambda _, inputs, y: torch.ops.aten._unsafe_view(y, y.shape))
    if sequence:
        embedding.register_forward_pre_hook(lambda _, given: ranks.check_length(given[0].shape[-1]))
    if cut_later:
        layers[0].register_forward_pre_hook(lambda _, inputs: (own_rows(inputs[0], ranks), *inputs[1:]))


def _plan(architecture: Architecture, block: Block, ranks: Ranks, *, cut_embedding: bool) -> dict[str, ParallelStyle]:
    """The style of each module, by its name; a * stands for the number of a layer."""
    part: Placement = Shard(1) if ranks.sequence else Replicate()
    options = {"sequence": ranks.sequence, "asynchronous": ranks.asynchronous}
    plan: dict[str, ParallelStyle] = {
        architecture.head: ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
        architecture.norm: NormParallel(part),
    }
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1) if cut_embedding else Replicate())
    plan |= dict.fromkeys(architecture.embeddings, embedding)
    layer = f"{architecture.layers}.*"
    plan |= {f"{layer}.{name}": NormParallel() for name in block.norms}
    plan |= {f"{layer}.{name}": NormParallel(Shard(2)) for name in block.head_norms}
    plan |= {f"{layer}.{name}": ColumnParallel(**options) for name in (*block.qkv, *block.up)}
    plan |= {f"{layer}.{name}": RowParallel(**options) for name in (block.o, block.down)}
    return plan


def _find_architecture(model: nn.Module) -> tuple[Architecture, Block]:
    if parallel := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
        raise ValueError(
            f"{parallel[0]} is a DTensor already: call tensor_parallel once for a model, and before fully_shard"
        )
    name = type(model).__name__
    ours = {each.own: each for each in ARCHITECTURES.values() if each.own}
    theirs = {f"{each.name}ForCausalLM": each for each in ARCHITECTURES.values() if each.fusable}
    if (architecture := (ours | theirs).get(name)) is None:
        raise ValueError(
            f"tensor_parallel knows the modules of {', '.join((*ours, *theirs))}, got {name}: give its layers "
            "the styles octavo.distributed.ColumnParallel, RowParallel and NormParallel by "
            "torch.distributed.tensor.parallel.parallelize_module"
        )
    layers: Any = model.get_submodule(architecture.layers)
    if name in theirs and not all(isinstance(layer, DecoderLayer) or is_known(layer) for layer in layers):
        raise ValueError(
            f"tensor_parallel needs the layers of transformers' {name}, with its norms and a SiLU, got {layers[0]}"
        )
    return architecture, architecture.block


def _check_sizes(layer: Any, block: Block, size: int) -> None:
    attention, mlp = layer.self_attn, layer.get_submodule(block.up[-1])
    counts = {
        "heads": attention.q_proj.out_features // attention.head_dim,
        "heads of keys and values": attention.k_proj.out_features // attention.head_dim,
        "columns inside the MLP": mlp.out_features,
    }
    if wrong := [f"{count} {name}" for name, count in counts.items() if count % size]:
        raise ValueError(
            f"{size} ranks cannot share {', '.join(wrong)} of a layer: the degree of tensor parallelism must divide "
            "these numbers; choose a smaller one, and give the other ranks to fully_shard"
        )


# ---- Styles for `torch.distributed.tensor.parallel.parallelize_module` whose layers exchange bytes and row scales.
#
#     column   ColumnParallel(), in PyTorch ColwiseParallel(input_layouts=Shard(1))     q, k, v; gate, up
#     row      RowParallel(), in PyTorch RowwiseParallel(output_layouts=Shard(1))       o; down
#     norm     NormParallel(), in PyTorch SequenceParallel()                            the norms in front of them
#
# The styles of PyTorch hand DTensors to a layer and take DTensors from it, and so gather its input in high precision.
# These leave the layer's input and output plain tensors. The parameters are DTensors as in PyTorch's styles, so that
# `state_dict`, `torch.distributed.checkpoint`, `clip_grad_norm_` and `fully_shard` treat them in the same way.


class _LinearStyle(ParallelStyle):
    weight_axis: int  # of the weight [N, K], the one that is cut
    way: type[ParallelLayer]

    def __init__(self, *, sequence: bool = True, asynchronous: bool = False) -> None:
        super().__init__()
        self.sequence, self.asynchronous = sequence, asynchronous

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh, "tensor parallelism")
        if type(module) not in (nn.Linear, Linear):
            raise TypeError(f"{type(self).__name__} takes an nn.Linear, converted or not, got {module}")
        ranks = Ranks.of(device_mesh, sequence=self.sequence, asynchronous=self.asynchronous)
        axis = self.weight_axis
        if module.weight.shape[axis] % ranks.size:
            raise ValueError(
                f"{ranks.size} ranks cannot share {module}: its {('outputs', 'inputs')[axis]} must be a multiple of "
                f"{ranks.size}, got {module.weight.shape[axis]}; choose a smaller degree of tensor parallelism"
            )
        distribute(module, "weight", device_mesh, Shard(axis), self.src_data_rank)
        distribute(module, "bias", device_mesh, Shard(0) if axis == 0 else Replicate(), self.src_data_rank)
        module.parallel = self.way(ranks)
        if type(module) is nn.Linear:
            module.__class__ = ParallelLinear
        return module


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

    weight_axis, way = 0, Column


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

    weight_axis, way = 1, Row


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
        check_mesh(device_mesh, "tensor parallelism")
        for name in list(module._parameters):
            distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
        if (placement := self.placement) is not None:
            module.register_forward_pre_hook(
                lambda _, args: (DTensor.from_local(args[0], device_mesh, [placement], run_check=False), *args[1:])
            )
            module.register_forward_hook(lambda module, args, y: y.to_local())
        return module


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Make a parameter of `module` a DTensor, with the numbers that rank `source` of the mesh has."""
    if (parameter := module._parameters.get(name)) is None:
        return
    if isinstance(parameter, DTensor):
        raise ValueError(f"{name} of {module} is a DTensor already: parallelize a layer once, and before fully_shard")
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
