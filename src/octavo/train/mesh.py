"""The mesh of a run's processes: which of them share the weights of a replica, a layer, and the data.

The processes form an array [dp_replicate, dp_shard, tp], in the order of their ranks. Those that differ in `tp` only
work on the same sequences, and on parts of each layer. All others have their own share of each batch.
"""

from dataclasses import dataclass, fields
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from octavo.models import BUILT_IN_MODELS
from octavo.train.config import Config, ConfigError
from octavo.train.tables import Parallel


@dataclass(frozen=True)
class Degrees:
    """The sizes of the mesh, in the order of its dimensions."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """The processes, or groups of processes, that work on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def processes(self) -> int:
        return self.data * self.tp

    def share(self, rank: int) -> tuple[int, int]:
        """(index, count): which of `count` equal shares of a batch belongs to a rank."""
        return rank // self.tp, self.data


def find_degrees(parallel: Parallel, processes: int) -> Degrees:
    """The degrees of the table `parallel`, with the number of processes that are left in place of -1.

    Raises:
        ConfigError: the degrees do not multiply to the number of processes, or more than one of them is -1.
    """
    asked = {each.name: int(getattr(parallel, each.name)) for each in fields(Degrees)}
    open_names = [name for name, degree in asked.items() if degree == -1]
    if len(open_names) > 1:
        raise ConfigError(
            "only one degree of parallel can be -1, the processes that are left; got -1 for "
            f"{' and '.join(open_names)}: set all but one to a number, such as 1"
        )
    fixed = 1
    for degree in asked.values():
        fixed *= max(degree, 1)
    for name in open_names:
        asked[name] = max(processes // fixed, 1)
    found = Degrees(**asked)
    if found.processes != processes:
        wanted = " x ".join(f"{name} {degree}" for name, degree in asked.items())
        raise ConfigError(
            f"the degrees of parallel must multiply to the number of processes, {processes}; got {wanted}, which is "
            f"{found.processes}: start {found.processes} processes with torchrun (octavo plan: --gpus "
            f"{found.processes}), or change parallel"
        )
    return found


def check_parallel(config: Config, degrees: Degrees) -> None:
    """Raise a ConfigError unless the batch and the layers of a built-in model can be divided among the processes."""
    if config.batch % degrees.data:
        raise ConfigError(
            f"batch must be a multiple of the {degrees.data} shares that parallel makes of it (dp_replicate "
            f"{degrees.dp_replicate} x dp_shard {degrees.dp_shard}), since it counts the sequences of all processes; "
            f"got {config.batch}: give --batch {-(-config.batch // degrees.data) * degrees.data}"
        )
    if degrees.processes > 1 and config.precision == "fp16":
        raise ConfigError(
            f"precision fp16 is for one process, and this run has {degrees.processes}: its loss scale is that of one "
            "process. Use bf16"
        )
    if degrees.tp > 1:
        _check_tensor_parallel(config, degrees.tp)


def _check_tensor_parallel(config: Config, tp: int) -> None:
    if config.sample:
        raise ConfigError(
            f"sample must be 0 with parallel.tp, which divides each sequence among its processes; got sample "
            f"{config.sample} and tp {tp}: sample from the run with octavo generate"
        )
    if config.model == "mixture":
        raise ConfigError(f"parallel.tp must be 1 for a mixture, whose experts are not cut; got tp {tp}: use dp_shard")
    sizes = {"context": config.context}
    if config.model in BUILT_IN_MODELS:
        sizes |= {"heads": config.heads, "width": config.width}
    if config.model == "llama":
        sizes |= {"kv_heads": config.kv_heads, "mlp_width": config.mlp_width}
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"parallel.tp must divide {name}; got tp {tp} and {name} {size}")


def check_async_tp(config: Config, degrees: Degrees, device: torch.device) -> None:
    """Raise a ConfigError if the processes of `device` cannot multiply while activations travel."""
    if config.parallel.async_tp and degrees.tp > 1 and device.type != "cuda":
        raise ConfigError(
            f"parallel.async_tp needs GPUs that reach each other's memory; the device is {device.type}: leave it out"
        )


def make_mesh(degrees: Degrees, device: torch.device, timeout: int) -> DeviceMesh:
    """The mesh of all processes, with the dimensions of `Degrees`. Every process must call this.

    Args:
        timeout: seconds after which a collective operation fails, because a process does not take part in it.
    """
    names = tuple(each.name for each in fields(Degrees))
    mesh = init_device_mesh(device.type, tuple(getattr(degrees, name) for name in names), mesh_dim_names=names)
    if degrees.tp > 1:
        mesh["dp_shard", "tp"]._flatten("shard")  # so that DTensor reduces a norm over both in one operation
    for group in (None, *mesh.get_all_groups()):
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return mesh
