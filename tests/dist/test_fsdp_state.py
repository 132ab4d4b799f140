"""Loading, writing in place and moving a sharded model: the right bytes afterwards. The state has no trace of them."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_examples import batch, blocks, equal, sharded, train
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import octavo
from octavo.dist import fp8_all_gather


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = blocks(33)
    octavo.convert(model)
    return model


def gathered(model: nn.Module) -> nn.Module:
    model = sharded(model)
    fp8_all_gather(model)
    return model


def other_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of another model, sharded as `model` is."""
    mine, theirs = model.state_dict(), made(1).state_dict()
    return {name: distribute_tensor(t, mine[name].device_mesh, mine[name].placements) for name, t in theirs.items()}


def by_dcp(model: nn.Module, folder: Path) -> None:
    dcp.save(other_state(model), checkpoint_id=folder)
    dcp.load(model.state_dict(), checkpoint_id=folder)


def by_dcp_into_parameters(model: nn.Module, folder: Path) -> None:
    dcp.save(other_state(model), checkpoint_id=folder / "parameters")
    dcp.load(dict(model.named_parameters()), checkpoint_id=folder / "parameters")


def in_place(model: nn.Module, folder: Path) -> None:
    with torch.no_grad():
        for p, t in zip(model.parameters(), other_state(model).values(), strict=True):
            p.copy_(t)


class ThroughData(torch.optim.Optimizer):
    """An optimizer that writes through `.data`, which leaves no trace on the parameter."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data._local_tensor.data.copy_(self.param_groups[0]["new"][p]._local_tensor)


def by_optimizer(model: nn.Module, folder: Path) -> None:
    new = dict(zip(model.parameters(), other_state(model).values(), strict=True))
    ThroughData(model.parameters(), {"new": new}).step()


CHANGES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "loaded": lambda model, _: model.load_state_dict(other_state(model)),
    "assigned": lambda model, _: model.load_state_dict(other_state(model), assign=True),
    "DCP": by_dcp,
    "DCP into parameters": by_dcp_into_parameters,
    "in place": in_place,
    "optimizer": by_optimizer,
}


def changed(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with torch.no_grad():
        expected = made(1)(batch())
    for name, change in CHANGES.items():
        for trained in (False, True):
            model = gathered(made())
            if trained:
                train(model, steps=1)
            change(model, folder / str(trained))
            with torch.no_grad():
                results[f"{name}, {trained}"] = torch.equal(model(batch()), expected)
    moved = gathered(made())
    moved.to("cpu")
    results["moved"] = equal(train(made()), train(moved))
    state = moved.state_dict()
    results["plain"] = all(type(t) is DTensor and type(t._local_tensor) is Tensor for t in state.values())
    if rank == 0:
        moved.state_dict()  # one rank may do so: the next forward pass must not wait for the others
    moved(batch())
    saved = io.BytesIO()
    torch.save(state, saved)
    results["no hooks in a file"] = b"fsdp_pre_all_gather" not in saved.getvalue()
    results["names"] = list(state) == list(made().state_dict())
    copied = copy.deepcopy(state)
    results["copied"] = all(torch.equal(copied[k].full_tensor(), state[k].full_tensor()) for k in state)
    return results


@pytest.mark.slow
def test_a_changed_weight_is_quantized_again_and_the_state_is_plain(tmp_path: Path) -> None:
    for results in run_ranks(2, changed, tmp_path):
        assert all(results.values()), results
