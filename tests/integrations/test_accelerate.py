"""Accelerate on converted models: gradient accumulation in one process, and FSDP2 in two."""

import os
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from fsdp_examples import batch, blocks
from operation_counts import operations
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule

import octavo
from octavo.distributed import fp8_all_gather

STEPS, MICRO_BATCHES = 3, 2
GEMMS = 3 * 2 * 4  # y, dx and dw of left+right, plain, gate+up and down in two blocks


def train(accelerator: Accelerator) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model: Any = blocks()
    octavo.convert(model, "rowwise")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    if isinstance(model, FSDPModule):
        assert not fp8_all_gather(model).wide
    losses = []
    with octavo.scales.cast_once(model):
        for _ in range(STEPS * MICRO_BATCHES):
            with accelerator.accumulate(model):
                loss = model(batch()).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def test_a_loop_of_accelerate_runs_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # the Trainer of an earlier test has made one
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    losses: list[float] = []
    counts = operations(lambda: losses.extend(train(accelerator)[1]))
    assert counts["octavo::scaled_mm"] == GEMMS * STEPS * MICRO_BATCHES
    assert losses[0] == losses[1] > losses[2] == losses[3] > losses[4]


def shard(rank: int) -> tuple[int, list[float], set[str]]:
    """FP8 GEMMs, losses, and the classes of the parameters, of Accelerate's FSDP2.

    Accelerate chooses FSDP on GPUs only: here its state is told to.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # Accelerate warns where it is not set
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    plugin.set_mixed_precision("bf16")
    accelerator.state.__dict__ |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    result: list[Any] = []
    counts = operations(lambda: result.extend(train(accelerator)))
    model, losses = result
    return counts["octavo::scaled_mm"], losses, {type(p).__name__ for p in model.parameters()}


@pytest.mark.slow
def test_fsdp2_of_accelerate_gathers_a_converted_model_in_eight_bits() -> None:
    for gemms, losses, classes in run_ranks(2, shard):
        assert gemms == GEMMS * STEPS * MICRO_BATCHES
        assert losses[0] == losses[1] > losses[2] == losses[3] > losses[4]
        assert classes == {"DTensor"}
