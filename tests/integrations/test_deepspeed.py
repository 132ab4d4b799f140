"""ZeRO 2 and 3 of DeepSpeed, with the library itself: make test-integrations."""

import os
import warnings
from typing import Any

import pytest
import torch
from linear_examples import converted_model
from ranks import run_ranks
from torch import Tensor, nn

pytest.importorskip("deepspeed", reason="DeepSpeed is in the environment of make test-integrations")
STEPS, ROWS, STAGES = 3, 4, (2, 3)


def make() -> nn.Module:
    torch.manual_seed(0)
    return converted_model(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), "rowwise")


def batches() -> list[Tensor]:
    """Rows of both ranks for each step."""
    return list(torch.randn(STEPS, 2 * ROWS, 64, generator=torch.Generator().manual_seed(5)))


def train(rank: int) -> list[tuple[list[Any], list[str]]]:
    """By stage, the weights after a few steps of a rank, and the classes of its modules."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    # DeepSpeed calls functions of PyTorch by deprecated names, and reads gradients of tensors that need none.
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = []
    for stage in STAGES:
        model = make()
        settings = {
            "train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        }  # fmt: skip
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        for x in batches():
            engine.backward(engine(x[rank * ROWS : (rank + 1) * ROWS]).square().mean())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            weights = [p.tolist() for p in model.parameters()]
        found.append((weights, [type(m).__name__ for m in model]))
    return found


def test_two_ranks_train_as_one_process() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for x in batches():
        loss = sum(model(part).square().mean() for part in x.split(ROWS)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for stages in run_ranks(2, train):
        assert len(stages) == len(STAGES)
        for weights, classes in stages:
            assert classes == ["Linear", "GELU", "Linear"]
            assert weights == [p.tolist() for p in model.parameters()]
