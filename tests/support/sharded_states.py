"""A small model in training, plain or sharded, whose state is saved and loaded by a test."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import octavo
from octavo.checkpoint.files import model_tensors
from octavo.nn.delayed import histories
from octavo.scales import scale_state
from octavo.train.optimizer import first_state, optimizer_state
from octavo.train.saving import TrainState


class Net(nn.Module):
    """Layers whose sizes neither 2 nor 4 ranks divide, a norm, and a buffer."""

    def __init__(self, width):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(9, width), nn.LayerNorm(width), nn.Linear(width, 3, bias=False)
        self.register_buffer("seen", torch.zeros(()))


def make_state(layout="plain", *, recipe="bf16", width=13, steps=0):
    """The `TrainState` of a `Net` after some steps of AdamW; `layout` says how it is sharded over all ranks: "plain",
    "fsdp", "hsdp" (2 replicas), or "2d" (FSDP2 and tensor parallel over 2 ranks). Each gradient follows from the
    weights element by element, so that every layout has the same state."""
    torch.manual_seed(0)
    model = Net(width)
    octavo.convert(model, recipe, skip=["down"])
    shard(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.state.update({p: first_state(optimizer, p) for p in model.parameters()})
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"), "print")
    for _ in range(steps):
        take_step(state)
    return state


def take_step(state):
    for p in state.model.parameters():
        p.grad = p.detach().sin()
    state.optimizer.step()
    for _, history in histories(state.model):
        history.observe(1 + state.model.seen.view(1, 1))
    octavo.scales.update_scales(state.model)
    state.step += 1
    state.model.seen += 1


def shard(model, layout):
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    elif layout == "hsdp":
        ranks = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif layout == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])


def everything(state):
    """All tensors that a checkpoint restores, other than random states, whole."""
    tensors = model_tensors(state.model) | optimizer_state(state.model, state.optimizer) | scale_state(state.model)
    return {name: whole(tensor) for name, tensor in tensors.items()}


def snapshot(trainer):
    """The state of a run, as it is now: `everything`, and the random state."""
    return {"random": torch.get_rng_state()} | everything(trainer.state)


def whole(tensor):
    """A tensor, or the tensor of which a DTensor has parts, copied."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def differing(found, required):
    assert found.keys() == required.keys()
    return [name for name in required if not torch.equal(found[name], required[name])]
