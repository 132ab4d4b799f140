"""One checkpoint of a run, written and waited for, the bytes of its files, and a bit of one that flips."""

import json
from pathlib import Path

from octavo.train.saving import CheckpointWriter, TrainState


def save_checkpoint(run, state: TrainState, keep: int) -> Path:
    """Write the checkpoint of `state.step`, wait for it, and remove all but the newest `keep`. Every rank calls it."""
    with CheckpointWriter(run, keep) as writer:
        writer.save(state)
    return run.checkpoint(state.step)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of the files in a folder by their names."""
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
