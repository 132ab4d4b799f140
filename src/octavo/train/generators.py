"""The states of torch's random generators on every rank, as tensors in a checkpoint."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.artifact.files import check_match
from octavo.train.ranks import rank, world_size

PREFIX = "random."  # of the names; rank 0 has random.cpu and random.cuda, rank 1 random.cpu.1 and random.cuda.1


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this rank: of the CPU's generator, and of the GPU's if `device` is one."""
    state = {_name("cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        state[_name("cuda")] = torch.cuda.get_rng_state(device)
    return state


def check_random_state(saved: Mapping[str, Tensor], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, unless `saved` has the state of a CPU."""
    found = {name: state for name, state in saved.items() if name == "random.cpu"}
    check_match(found, {"random.cpu": torch.get_rng_state()}, f"{where} has no random state of this machine")


def restore_random_state(saved: Mapping[str, Tensor], device: torch.device, step: int) -> None:
    """Set the generators of this rank. A run that was trained on a CPU has no state for a GPU; it may continue there.

    If the run continues with another number of ranks, each seeds its generators anew, from its seed and the step.
    """
    if sum(name.startswith(f"{PREFIX}cpu") for name in saved) != world_size():
        digest = hashlib.sha256(f"{torch.initial_seed()} {step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7]))
        return
    torch.set_rng_state(saved[_name("cpu")])
    if device.type == "cuda" and _name("cuda") in saved:
        torch.cuda.set_rng_state(saved[_name("cuda")], device)


def _name(kind: str) -> str:
    return f"{PREFIX}{kind}" + (f".{rank()}" if rank() else "")
