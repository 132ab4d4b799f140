"""The processes that other tests run in."""

import pytest
import torch
from ranks import run_ranks
from torch import distributed


def total(rank, first):
    value = torch.tensor([first + rank])
    distributed.all_reduce(value)
    return int(value)


def fail(rank):
    if rank == 1:
        raise ValueError("of rank 1")
    distributed.barrier()


def test_ranks_form_a_group():
    assert run_ranks(2, total, 3) == [7, 7]


def test_a_failure_names_its_rank():
    with pytest.raises(AssertionError, match=r"rank 1: (?s:.*)ValueError: of rank 1"):
        run_ranks(2, fail)
