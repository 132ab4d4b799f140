"""Finding the processes of this attempt of a job that torchrun starts again."""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PATIENCE = timedelta(minutes=10)


def attempt_store() -> tuple[Store, int, int]:
    """A store for this attempt alone, the rank and the number of ranks, for `init_process_group`.

    torchrun keeps one store for all attempts (its agent's). The keys of an attempt that failed are still there, so
    processes would connect to addresses of processes that have ended (pytorch/pytorch#135712, #167288). The number of
    restarts cannot tell attempts apart: each machine counts its own.

    Raises:
        DistStoreError: a process does not come within ten minutes.
    """
    store, rank, ranks = next(iter(rendezvous("env://", timeout=_PATIENCE)))
    return PrefixStore(agree_on_name(store, rank, ranks), store), rank, ranks


def agree_on_name(store: Store, rank: int, ranks: int) -> str:
    """A name that all ranks of this attempt have, and no process of an earlier one had.

    A rank asks with a name of its own, which only a living rank 0 can answer. Rank 0 may read the question of a process
    that has ended; its answer then meets no one. So it goes on until it has the thanks of all ranks for its name.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"question/{rank}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"thanks/{name}/{rank}", "")
        return name
    silent, deadline = set(range(1, ranks)), time.monotonic() + _PATIENCE.total_seconds()
    while silent:
        for other in sorted(silent):
            if store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", own)
            if store.check([f"thanks/{own}/{other}"]):
                silent.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(silent)} have not come within {_PATIENCE}")
        time.sleep(0.01)
    return own
