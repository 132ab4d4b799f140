"""`tensor_parallel`: give each module of a model of known architecture its style.

    tokens -> embedding, the vocabulary cut     -> x [B, T/R, K], this rank's part of the sequence
    norm -> q, k, v: outputs cut, gathered x    -> [B, T, heads/R, D] -> o: inputs cut, scattered -> + x
    norm -> gate, up: outputs cut, gathered x   -> [B, T, F/R]        -> down: inputs cut, scattered -> + x
    norm -> head, the vocabulary cut            -> logits [B, T, V], gathered

The plan is that of Megatron (arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from octavo.dist.tensor_parallelism.ranks import Ranks
from octavo.dist.tensor_parallelism.styles import ColumnParallel, NormParallel, RowParallel, check_mesh
from octavo.dist.tensor_parallelism.wide import own_rows
from octavo.nn.transformers_fusion import PROJECTIONS, DecoderLayer, fuse_decoder_layers, is_known


@dataclass(frozen=True)
class Architecture:
    """The names of a model's modules, those of a layer below the layer.

    Args:
        embeddings: of tokens, first, and of positions.
        layers: the list of the layers.
        norms: in a layer, each in front of some `column` layers.
        column, row: linear layers of a layer whose outputs, or inputs, are cut.
        norm: the one in front of the head, `lm_head`.
    """

    embeddings: tuple[str, ...]
    layers: str
    norms: tuple[str, ...]
    column: tuple[str, ...]
    row: tuple[str, ...]
    norm: str


LLAMA = Architecture(
    ("model.embed_tokens",),
    "model.layers",
    ("input_layernorm", "post_attention_layernorm"),
    (*PROJECTIONS, "mlp.gate_proj", "mlp.up_proj"),
    ("self_attn.o_proj", "mlp.down_proj"),
    "model.norm",
)
GPT2 = Architecture(
    ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    "model.decoder.layers",
    ("self_attn_layer_norm", "final_layer_norm"),
    (*PROJECTIONS, "fc1"),
    ("self_attn.out_proj", "fc2"),
    "model.decoder.final_layer_norm",
)
OURS = {"Llama": LLAMA, "GPT2": GPT2}
TRANSFORMERS = {f"{name}ForCausalLM": LLAMA for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
HEAD = "lm_head"
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # of Qwen3, over the elements of a head


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
    check_mesh(mesh)
    architecture = _find_architecture(model)
    layers: Any = model.get_submodule(architecture.layers)
    _check_sizes(layers[0], architecture, mesh.size())
    ranks = Ranks.of(mesh, sequence=sequence, asynchronous=asynchronous)
    fuse_decoder_layers(model)
    embedding, head = model.get_submodule(architecture.embeddings[0]), model.get_submodule(HEAD)
    tied = head.weight is embedding.weight
    # The models of transformers count the tokens in the output of their embedding, so it is cut after that.
    cut_later = sequence and isinstance(layers[0], DecoderLayer)
    head_norms = [name for name in HEAD_NORMS if name in dict(layers[0].named_modules())]
    plan = _plan(architecture, head_norms, ranks, cut_embedding=sequence and not cut_later)
    parallelize_module(model, mesh, plan)
    if tied:
        head.weight = embedding.weight
    for module in (embedding, head):
        module.register_forward_hook(_as_plain_tensor)
    if sequence:
        embedding.register_forward_pre_hook(lambda _, tokens: _check_tokens(tokens[0], ranks))
    if cut_later:
        layers[0].register_forward_pre_hook(lambda _, inputs: (own_rows(inputs[0], ranks), *inputs[1:]))


def _plan(
    architecture: Architecture, head_norms: list[str], ranks: Ranks, *, cut_embedding: bool
) -> dict[str, ParallelStyle]:
    """The style of each module, by its name; a * stands for the number of a layer."""
    part: Placement = Shard(1) if ranks.sequence else Replicate()
    options = {"sequence": ranks.sequence, "asynchronous": ranks.asynchronous}
    plan: dict[str, ParallelStyle] = {
        HEAD: ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
        architecture.norm: NormParallel(part),
    }
    embedded: Placement = Shard(1) if cut_embedding else Replicate()
    for name in architecture.embeddings:
        plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=embedded)
    layer = f"{architecture.layers}.*"
    plan |= {f"{layer}.{name}": NormParallel() for name in architecture.norms}
    plan |= {f"{layer}.{name}": NormParallel(Shard(2)) for name in head_norms}
    plan |= {f"{layer}.{name}": ColumnParallel(**options) for name in architecture.column}
    plan |= {f"{layer}.{name}": RowParallel(**options) for name in architecture.row}
    return plan


def _find_architecture(model: nn.Module) -> Architecture:
    parallel = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if parallel:
        raise ValueError(
            f"{parallel[0]} is a DTensor already: call tensor_parallel once for a model, and before fully_shard"
        )
    name = type(model).__name__
    architecture = (OURS | TRANSFORMERS).get(name)
    if architecture is None:
        raise ValueError(
            f"tensor_parallel knows the modules of {', '.join((*OURS, *TRANSFORMERS))}, got {name}: give its layers "
            "the styles octavo.dist.ColumnParallel, RowParallel and NormParallel by "
            "torch.distributed.tensor.parallel.parallelize_module"
        )
    layers: Any = model.get_submodule(architecture.layers)
    if name in TRANSFORMERS and not all(isinstance(layer, DecoderLayer) or is_known(layer) for layer in layers):
        raise ValueError(
            f"tensor_parallel needs the layers of transformers' {name}, with its norms and a SiLU, got {layers[0]}"
        )
    return architecture


def _check_sizes(layer: Any, architecture: Architecture, size: int) -> None:
    attention, mlp = layer.self_attn, layer.get_submodule(architecture.column[-1])
    counts = {
        "heads": attention.q_proj.out_features // attention.head_dim,
        "heads of keys and values": attention.k_proj.out_features // attention.head_dim,
        "columns inside the MLP": mlp.out_features,
    }
    wrong = [f"{count} {name}" for name, count in counts.items() if count % size]
    if wrong:
        raise ValueError(
            f"{size} ranks cannot share {', '.join(wrong)} of a layer: the degree of tensor parallelism must divide "
            "these numbers; choose a smaller one, and give the other ranks to fully_shard"
        )


def _as_plain_tensor(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
    """The output of one of PyTorch's styles, arrived, and no view.

    It may be on its way from other ranks: compiled layers would lose the gradient of such an input. FSDP2 warns of an
    output that is a view.
    """
    plain: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return plain


def _check_tokens(tokens: Tensor, ranks: Ranks) -> None:
    if tokens.shape[-1] % ranks.size:
        raise ValueError(
            f"the length of a sequence must be a multiple of {ranks.size}, the degree of tensor parallelism, got "
            f"tokens {list(tokens.shape)}: pad them, or call tensor_parallel with sequence=False"
        )
