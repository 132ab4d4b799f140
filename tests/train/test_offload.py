"""Weights and moments in the CPU's memory. On a CPU nothing moves, and the numbers must be those of a run without."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from rich.console import Console
from torch.distributed.tensor import DTensor

from octavo.artifact.files import model_tensors
from octavo.train.config import Config
from octavo.train.optimizer import optimizer_state
from octavo.train.processes import whole
from octavo.train.start import start_run


def test_one_process_trains_the_same_bit_for_bit_and_resumes(begin, go_on, records, tmp_path):
    begin(out=str(tmp_path / "plain")).run()
    begin(out=str(tmp_path / "moved"), steps=4, decay_steps=8, optimizer={"offload": True}).run()
    trainer = go_on(tmp_path / "moved", "--steps", "8")
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    trainer.run()
    assert records(tmp_path / "moved") == records(tmp_path / "plain")
    assert not dist.is_initialized()


def test_a_run_goes_on_with_or_without(begin, go_on, records, tmp_path):
    """The checkpoint is the same."""
    begin(out=str(tmp_path / "plain")).run()
    begin(out=str(tmp_path / "first"), steps=4, decay_steps=8, optimizer={"offload": True}).run()
    go_on(tmp_path / "first", "--steps", "8", "--no-optimizer.offload").run()
    assert records(tmp_path / "first") == records(tmp_path / "plain")


def sharded_run(rank, folder, text, tiny):
    """The first weights, the first loss and the dtypes and devices of BF16 weights and their state on two ranks."""
    with torch.compiler.set_stance("force_eager"):
        trainer = start_run(Config.from_dict(tiny | {"data": [text], "out": folder}), Console(quiet=True))
        weights = {name: whole(t.float()).detach().numpy() for name, t in model_tensors(trainer.model).items()}
        loss = float(trainer.step()[0].detach())
        tensors = [*trainer.model.parameters(), *optimizer_state(trainer.model, trainer.state.optimizer).values()]
        trainer.lock.close()
    return weights, loss, {str(t.dtype) for t in tensors}, {str(t.device) for t in tensors}


def test_bf16_weights_of_two_ranks_begin_as_those_of_one(begin, settings, tmp_path, text):
    pytest.importorskip("torchao")
    chosen = {"batch": 4, "accumulate": 2, "optimizer": {"weights": "bf16", "offload": True}}
    trainer = begin(out=str(tmp_path / "one"), **chosen | {"optimizer": {"weights": "bf16"}})
    expected = {name: t.detach().float().numpy() for name, t in model_tensors(trainer.model).items()}
    with torch.compiler.set_stance("force_eager"):
        loss = float(trainer.step()[0])
    by_rank = run_ranks(2, sharded_run, str(tmp_path / "two"), str(text), settings(**chosen).to_dict())
    for weights, _, dtypes, devices in by_rank:
        assert dtypes == {"torch.bfloat16", "torch.float32"}
        assert devices == {"cpu"}
        for name, array in expected.items():
            np.testing.assert_array_equal(weights[name], array, name)
    assert sum(found for _, found, *_ in by_rank) / 2 == pytest.approx(loss, rel=1e-5)
