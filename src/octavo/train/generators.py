"""The states of torch's random generators, of every rank, as tensors in a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.artifact.files import check_match
from octavo.train.ranks import rank

PREFIX = "random."  # of the names; rank 0 has random.cpu and random.cuda, rank 1 random.cpu.1 and random.cuda.1


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this rank: of the CPU's generator, and of the GPU's if `device` is one."""
    state = {_name("cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        state[_name("cuda")] = torch.cuda.get_rng_state(device)
    return state


def check_random_state(saved: Mapping[str, Tensor], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, unless `saved` has a state of rank 0's CPU."""
    check_match(
        {name: state for name, state in saved.items() if name == "random.cpu"},
        {"random.cpu": torch.get_rng_state()},
        f"{where} has no random state of this machine",
    )


def restore_random_state(saved: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators of this rank. A run that was trained on a CPU has no state for a GPU; it may continue there.

    A rank that the saved run did not have takes the state of rank 0 if all of its ranks had the same, else one of its
    own, which follows from rank 0's and its number.
    """
    for kind, set_state in (("cpu", torch.set_rng_state), ("cuda", lambda s: torch.cuda.set_rng_state(s, device))):
        if f"{PREFIX}{kind}" not in saved or (kind == "cuda" and device.type != "cuda"):
            continue
        first = saved[f"{PREFIX}{kind}"]
        ranks = [state for name, state in saved.items() if name.startswith(f"{PREFIX}{kind}.")]
        own = saved.get(_name(kind))
        if own is None and not all(torch.equal(state, first) for state in ranks):
            generator = torch.Generator()
            generator.set_state(saved["random.cpu"])
            seed = int(torch.randint(2**63 - 1, (rank() + 1,), generator=generator)[-1])
            own = torch.Generator(device if kind == "cuda" else "cpu").manual_seed(seed).get_state()
        set_state(first if own is None else own)


def _name(kind: str) -> str:
    return f"{PREFIX}{kind}" + (f".{rank()}" if rank() else "")
