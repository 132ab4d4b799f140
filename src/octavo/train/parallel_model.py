"""A model whose layers, weights and optimizer state are divided among the processes of a run.

    build on the meta device -> convert -> tensor parallel -> activation checkpointing -> compile each block
    -> FSDP2: each block a unit, or two small ones, and all else the unit of the model
    -> gather FP8 weights in eight bits -> memory -> weights

FSDP2 (`fully_shard`) shards the FP32 master weights. The forward pass runs under autocast, as in one process, so the
numbers are the same but for the order of sums. With `optimizer.offload` the shards are in the CPU's memory, where AdamW
runs; a single process is then a mesh of one.
"""

from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.distributed import GatherReport, fp8_all_gather, send_bf16_gradients, tensor_parallel
from octavo.models import BUILT_IN_MODELS
from octavo.models.decoder import Decoder
from octavo.nn import Conversion
from octavo.train.config import Config, ConfigError
from octavo.train.loss import Loss, make_loss
from octavo.train.model import (
    blocks_gathered_together,
    cast_weights,
    convert_model,
    describe_language_model,
    make_model,
    open_language_model,
    prepare_blocks,
)
from octavo.train.processes import rank, same_outcome
from octavo.train.settings import Degrees

# ---- The mesh of a run's processes (`octavo.train.settings.Degrees`).


def check_parallel(config: Config, degrees: Degrees, device: torch.device) -> None:
    """Raise a ConfigError unless the processes can divide the batch and the layers of a built-in model."""
    for fault in _faults(config, degrees, device):
        raise ConfigError(fault)


def _faults(config: Config, degrees: Degrees, device: torch.device) -> Iterator[str]:
    if config.batch % degrees.data:
        yield (
            f"batch must be a multiple of the {degrees.data} shares that parallel makes of it (dp_replicate "
            f"{degrees.dp_replicate} x dp_shard {degrees.dp_shard}), since it counts the sequences of all processes; "
            f"got {config.batch}: give --batch {-(-config.batch // degrees.data) * degrees.data}"
        )
    if degrees.processes > 1 and config.precision == "fp16":
        yield (
            f"precision fp16 is for one process, and this run has {degrees.processes}: its loss scale is that of one "
            "process. Use bf16"
        )
    tp = degrees.tp
    if tp == 1:
        return
    if config.sample:
        yield (
            f"sample must be 0 with parallel.tp, which divides each sequence among its processes; got sample "
            f"{config.sample} and tp {tp}: sample from the run with octavo generate"
        )
    if config.model == "mixture":
        yield f"parallel.tp must be 1 for a mixture, whose experts are not cut; got tp {tp}: use dp_shard"
    sizes = ["context", *(["heads", "width"] if config.model in BUILT_IN_MODELS else [])]
    for name in [*sizes, *(["kv_heads", "mlp_width"] if config.model == "llama" else [])]:
        if getattr(config, name) % tp:
            yield f"parallel.tp must divide {name}; got tp {tp} and {name} {getattr(config, name)}"
    if config.parallel.async_tp and device.type != "cuda":
        yield f"parallel.async_tp needs GPUs that reach each other's memory; the device is {device.type}: leave it out"


def make_mesh(degrees: Degrees, device: torch.device, timeout: int) -> DeviceMesh:
    """The mesh of all processes. A collective operation fails after `timeout` seconds. Every process must call this."""
    names = tuple(each.name for each in fields(Degrees))
    mesh = init_device_mesh(device.type, tuple(getattr(degrees, name) for name in names), mesh_dim_names=names)
    if degrees.tp > 1:
        mesh["dp_shard", "tp"]._flatten("shard")  # so that DTensor reduces a norm over both in one operation
    for group in (None, *mesh.get_all_groups()):
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return mesh


# ---- A model whose layers, weights and optimizer state are divided among the processes of a run.


class TrainedModel(NamedTuple):
    """A converted model that is ready for training, its loss, and the reports of its preparation."""

    model: nn.Module
    loss: Loss
    report: Conversion
    gathered: GatherReport | None = None


def make_trained_model(
    config: Config, vocabulary: int, saved: Path, device: torch.device, degrees: Degrees
) -> TrainedModel:
    """The model of `config`, divided among the processes of a mesh of `degrees` if there are several, or offloading.

    Its weights are the same for any number of processes. Every rank must call this. For `vocabulary` and `saved` see
    `octavo.train.model.make_model`.
    """
    divided = degrees.processes > 1 or config.optimizer.offload
    mesh = make_mesh(degrees, device, config.parallel.timeout) if divided else None
    with same_outcome():
        resumed = saved.exists()  # asked here, since rank 0 writes the folder of a new run when it is ready
        weights: dict[str, Any] = {}
        if mesh is None:
            model = make_model(config, vocabulary, saved).to(device)
        elif config.model in BUILT_IN_MODELS:
            with torch.device("meta"), OneProcessDraws():
                model = make_model(config, vocabulary, saved)
        else:
            if rank() == 0 and not resumed:
                weights = open_language_model(config, saved).state_dict()
            model = cast_weights(describe_language_model(config, saved), config)
        loss = make_loss(config, model)
        report = convert_model(model, config, None if mesh is None else device, degrees.data)
    if mesh is None:
        prepare_blocks(model, config)
        return TrainedModel(model, loss, report)
    gathered = parallelize(model, config, mesh, fp8=bool(report.converted) and report.recipe.quantized)
    _materialize(model, device, torch.device("cpu") if config.optimizer.offload else device)
    if not resumed:  # the checkpoint of a resumed run has the weights
        _fill(model, weights)
    torch.manual_seed(config.seed + 1 + degrees.share(rank())[0])  # dropout differs where the sequences do
    return TrainedModel(model, loss, report, gathered)


def parallelize(model: nn.Module, config: Config, mesh: DeviceMesh, *, fp8: bool) -> GatherReport | None:
    """Divide a model, which may be on the meta device, among the processes of `mesh`. `fp8`: it has FP8 layers."""
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
    """Give memory to what is on the meta device, and move the rest: parameters to `storage`, buffers to `device`."""

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


# ---- Drawing weights that are divided among processes, so that they are those of one process.


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
