"""A model whose layers, weights and optimizer state are divided among the processes of a run.

    build on the meta device -> convert -> tensor parallel -> activation checkpointing -> compile each block
    -> FSDP2: each block a unit, or two small ones, and all else the unit of the model
    -> gather FP8 weights in eight bits -> memory -> weights

FSDP2 (`fully_shard`) shards the FP32 master weights. The forward pass runs under autocast, as in one process, so the
numbers are the same but for the order of sums. With `optimizer.offload` the shards are in the CPU's memory, where AdamW
runs; a single process is then a mesh of one.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from octavo.dist import GatherReport, fp8_all_gather, send_bf16_gradients, tensor_parallel
from octavo.models import BUILT_IN_MODELS
from octavo.models.decoder import Decoder
from octavo.nn import Conversion
from octavo.train.blocks import blocks_gathered_together, prepare_blocks
from octavo.train.config import Config
from octavo.train.hugging_face import describe_language_model, open_language_model
from octavo.train.loss import Loss, make_loss
from octavo.train.mesh import Degrees, make_mesh
from octavo.train.model import cast_weights, convert_model, make_model
from octavo.train.ranks import rank, same_outcome
from octavo.train.shared_random import OneProcessDraws


class TrainedModel(NamedTuple):
    """A converted model that is ready for training, its loss, and the reports of its preparation."""

    model: nn.Module
    loss: Loss
    report: Conversion
    gathered: GatherReport | None = None


def make_trained_model(
    config: Config, vocabulary: int, saved: Path, device: torch.device, degrees: Degrees
) -> TrainedModel:
    """The model of `config` for one process. For `vocabulary` and `saved` see `octavo.train.model.make_model`."""
    model = make_model(config, vocabulary, saved).to(device)
    loss = make_loss(config, model)
    report = convert_model(model, config)
    prepare_blocks(model, config)
    return TrainedModel(model, loss, report)


def make_parallel_model(
    config: Config, vocabulary: int, saved: Path, device: torch.device, degrees: Degrees
) -> TrainedModel:
    """The model of `make_trained_model`, with the same weights, divided among the processes of a mesh of `degrees`.

    Every rank must call this.
    """
    mesh = make_mesh(degrees, device, config.parallel.timeout)
    with same_outcome():
        resumed = saved.exists()  # asked here, since rank 0 writes the folder of a new run when it is ready
        weights: dict[str, Any] = {}
        if config.model in BUILT_IN_MODELS:
            with torch.device("meta"), OneProcessDraws():
                model = make_model(config, vocabulary, saved)
        else:
            if rank() == 0 and not resumed:
                weights = open_language_model(config, saved).state_dict()
            model = cast_weights(describe_language_model(config, saved), config)
        loss = make_loss(config, model)
        report = convert_model(model, config, device, degrees.data)
    gathered = parallelize(model, config, mesh, fp8=bool(report.converted) and report.recipe.quantized)
    _materialize(model, device, torch.device("cpu") if config.optimizer.offload else device)
    if not resumed:  # the checkpoint of a resumed run has the weights
        _fill(model, weights)
    torch.manual_seed(config.seed + 1 + degrees.share(rank())[0])  # dropout differs where the sequences do
    return TrainedModel(model, loss, report, gathered)


def parallelize(model: nn.Module, config: Config, mesh: DeviceMesh, *, fp8: bool) -> GatherReport | None:
    """Divide a model among the processes of `mesh`, in place. The model may be on the meta device.

    Args:
        mesh: with the dimensions dp_replicate, dp_shard and tp (`octavo.train.mesh.make_mesh`).
        fp8: whether the model has converted layers.

    Returns:
        The report of the all-gather in eight bits; None if there is none.
    """
    if mesh["tp"].size() > 1:
        tensor_parallel(model, mesh["tp"], asynchronous=config.parallel.async_tp)
    prepare_blocks(model, config)
    data = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
    on_cpu = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    options: dict[str, Any] = {
        "mesh": data,
        # The sums of gradients are FP32 for BF16 weights too. The residual stream has the dtype of the embedding.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.parallel.gather_dtype == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": on_cpu if config.optimizer.offload else OffloadPolicy(),
    }
    for unit in blocks_gathered_together(model):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    send_bf16_gradients(model)
    return fp8_all_gather(model) if fp8 and config.parallel.fp8_all_gather else None


def _materialize(model: Any, device: torch.device, storage: torch.device) -> None:
    """Give memory to what is on the meta device, and move the rest: buffers of transformers, which have values.

    Args:
        device: of buffers.
        storage: of parameters, which FSDP2 divides.
    """

    def place(t: Tensor) -> Tensor:
        where = storage if isinstance(t, DTensor) else device
        return torch.empty_like(t, device=where) if t.is_meta else t.to(where)

    model._apply(place)
    model.tie_weights()  # a parameter that leaves the meta device is a new one for each module that shares it


def _fill(model: Any, weights: dict[str, Any]) -> None:
    """Give the parameters their values: drawn ones, or the `weights` of rank 0."""
    if isinstance(model, Decoder):
        with OneProcessDraws():
            model.init_weights()
    else:
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=whole)
