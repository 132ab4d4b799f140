"""A small model in training, plain or sharded, whose state a test saves and loads; and the files of checkpoints."""

import json
from pathlib import Path

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
from octavo.train.saving import CheckpointWriter, TrainState


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
    state = state_of(model, 1e-2)
    for _ in range(steps):
        one_step(state)
    return state


def state_of(model, learning_rate):
    """The `TrainState` of a model before its first step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    optimizer.state.update({p: first_state(optimizer, p) for p in model.parameters()})
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"), "print")


def one_step(state):
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


def save_checkpoint(run, state: TrainState, keep: int) -> Path:
    """Write the checkpoint of `state.step`, wait for it, and remove all but the newest `keep`. Every rank calls it."""
    with CheckpointWriter(run, keep) as writer:
        writer.save(state)
    return run.checkpoint(state.step)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip_bit(path: Path) -> str:
    """Flip a bit in the middle of the largest tensor of a safetensors file; returns the tensor's name."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    name, entry = max(header.items(), key=lambda item: item[1]["data_offsets"][1] - item[1]["data_offsets"][0])
    content[8 + size + sum(entry["data_offsets"]) // 2] ^= 1
    path.write_bytes(content)
    return str(name)
