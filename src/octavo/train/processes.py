"""The processes of a run that `torchrun` starts: joining them, their devices, and what they do together."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from octavo.artifact.atomic_folder import WriteError
from octavo.artifact.files import ArtifactError
from octavo.artifact.lock import LockedError
from octavo.device import choose_device
from octavo.text import DataError
from octavo.train.config import Config, ConfigError
from octavo.train.declaration import flatten, settings_of
from octavo.train.ranks import gather, rank, same_outcome, world_size
from octavo.train.rendezvous import attempt_store

Value = TypeVar("Value")


def run_in_group(main: Callable[[], None]) -> None:
    """Call `main` while the processes that `torchrun` started form a group. A single process calls it alone.

    An error is recorded for torchrun, which ends the other processes and prints the traceback of every rank. So rank 0
    alone raises errors; other ranks end with exit code 1. Errors in the settings, the text or a folder have no
    traceback: the message says what to change.

    Raises:
        ConfigError: the environment lacks what torchrun sets.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        main()
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set, but {', '.join(missing)} is not: start several processes with torchrun")
    try:
        record(functools.partial(_join, main))()
    except Exception:
        if os.environ["RANK"] != "0" and dist.is_torchelastic_launched():
            raise SystemExit(1) from None
        raise


@contextmanager
def group_of_one() -> Iterator[None]:
    """Within the block a single process forms a group by itself, for a mesh of one process."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _join(main: Callable[[], None]) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_rank() % torch.cuda.device_count())
    store, number, ranks = attempt_store()
    dist.init_process_group(_backend(), store=store, rank=number, world_size=ranks)
    try:
        main()
    except (ConfigError, DataError, ArtifactError, WriteError, LockedError, FileExistsError) as error:
        error.__context__ = None
        raise error.with_traceback(None) from None
    dist.destroy_process_group()  # not after an error: another process may have ended, for which NCCL would wait


def own_device(name: str) -> torch.device:
    """The device of this process: of several, the local rank's GPU.

    Raises:
        ConfigError: `name` has a number, and there are several processes.
        ValueError: the machine lacks the device.
    """
    device = choose_device(name)
    if world_size() == 1 or device.type != "cuda":
        return device
    if device.index is not None:
        raise ConfigError(f"device must be cuda, without a number, if there are several processes; got {name}")
    return choose_device(f"cuda:{_local_rank()}")


def check_same(config: Config) -> None:
    """Raise a ConfigError, on every rank, unless all ranks have the same settings."""
    settings = gather(flatten(config.to_dict(), settings_of(Config)))
    for name, first in settings[0].items():
        for number, other in enumerate(settings):
            if other[name] != first:
                raise ConfigError(
                    f"the processes must have the same settings: {name} is {first!r} on rank 0 and {other[name]!r} on "
                    f"rank {number}. Start all of them with the same file and options"
                )


def on_first(make: Callable[[], Value]) -> Value:
    """`make()` of rank 0, on every rank; only rank 0 calls it. The value must be picklable if there are several ranks.

    Raises:
        Exception: that of `make`, on every rank.
    """
    made: list[Any] = [None]
    with same_outcome():
        if rank() == 0:
            made = [make()]
    if world_size() > 1:
        dist.broadcast_object_list(made, device=torch.device("cpu"))
    value: Value = made[0]
    return value


def mean_of_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over all ranks."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value


def whole(tensor: Tensor) -> Tensor:
    """The tensor that a DTensor divides among ranks; any other tensor as it is. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", rank()))
