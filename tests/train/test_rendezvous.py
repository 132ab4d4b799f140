"""Processes of one attempt find each other, and never those of an attempt before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from octavo.train import rendezvous
from octavo.train.rendezvous import agree_on_name


def attempt(store, ranks, lost=()):
    """The names that the ranks of an attempt agree on; `lost` ranks never come."""
    with ThreadPoolExecutor(ranks) as threads:
        calls = [threads.submit(agree_on_name, store, rank, ranks) for rank in range(ranks) if rank not in lost]
        return [call.result() for call in calls]


def test_each_attempt_has_a_name_of_its_own_in_the_same_store(monkeypatch):
    store = dist.HashStore()
    first = attempt(store, 4)
    assert len(set(first)) == 1
    monkeypatch.setattr(rendezvous, "_PATIENCE", timedelta(seconds=0.2))
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match=r"ranks \[2\] have not come"):
        attempt(store, 4, lost={2})
    with pytest.raises(dist.DistStoreError):  # rank 0 is lost: the others have no answer
        attempt(store, 3, lost={0})
    monkeypatch.undo()
    store.set_timeout(timedelta(seconds=60))
    second, fewer = attempt(store, 4), attempt(store, 2)
    assert len({*first, *second, *fewer}) == 3
