"""The folder beside the result in which a calibration keeps its work, so that an interrupted one resumes."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifact.atomic_folder import WriteError, write_error
from octavo.artifact.files import ArtifactError, load_tensors, open_file, read_json, replace_file, save_tensors
from octavo.calibration.folder import describe, from_tensors, to_tensors
from octavo.calibration.observer import Observed


@dataclass(frozen=True)
class CalibrationWorkdir:
    """The work folder of a calibration over `tokens` tokens.

    `part-007.safetensors` holds the sites of part 7 and says that it is done. `hidden-007.bf16` holds the hidden states
    after it, from which part 8 starts.
    """

    path: Path
    tokens: int

    def claim(self, fingerprint: dict[str, Any]) -> None:
        """Make the folder, or check that it is of the same model, data and settings.

        Raises:
            ArtifactError: it was begun with another fingerprint.
            WriteError: the disk refused.
        """
        described = self.path / "settings.json"
        if described.is_file():
            before = read_json(described)
            if changed := sorted(key for key in fingerprint | before if before.get(key) != fingerprint.get(key)):
                raise ArtifactError(
                    f"{self.path} holds a calibration that was begun with other settings ({', '.join(changed)}): "
                    "continue with those, remove that folder to start anew, or choose another folder for the result"
                )
            return
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(described, json.dumps(fingerprint, indent=1))

    def done(self, count: int) -> int:
        """The first of `count` parts that is still to run."""
        first = next((part for part in range(count) if not self._part(part).is_file()), count)
        if 0 < first < count and not self._hidden(first - 1).is_file():
            raise ArtifactError(f"{self._hidden(first - 1)} is missing: remove {self.path} to start anew")
        return first

    @contextmanager
    def hidden(
        self, part: int, last: bool
    ) -> Iterator[tuple[Callable[[torch.Size], Tensor], Callable[[Tensor], None]]]:
        """Functions that read the hidden states before this part, and write those after it, one batch at a time."""
        before = _Reader(self._hidden(part - 1), self.tokens) if part else None
        partial = self._hidden(part).with_suffix(".partial")
        with self._writing():
            file = partial.open("wb")

        def read(shape: torch.Size) -> Tensor:
            assert before is not None
            return before.read(shape)

        def write(hidden: Tensor) -> None:
            with self._writing():
                file.write(hidden.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().data)

        try:
            yield read, write
            with self._writing():
                _flush(file)
        finally:
            with self._writing():
                file.close()
        partial.unlink() if last else partial.rename(self._hidden(part))

    def finish(self, part: int, sites: dict[str, Observed]) -> None:
        """Store the sites of a part, which is then done."""
        partial = self._part(part).with_suffix(".partial")
        with self._writing():
            save_tensors(to_tensors(sites), partial, {"sites": json.dumps(describe(sites))})
            with partial.open("rb") as file:
                _flush(file)
        partial.rename(self._part(part))
        self._hidden(part - 1).unlink(missing_ok=True)

    def load(self, part: int) -> dict[str, Observed]:
        path = self._part(part)
        described = open_file(path).metadata() or {}
        return from_tensors(json.loads(described.get("sites", "null")), load_tensors(path), path)

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def _part(self, part: int) -> Path:
        return self.path / f"part-{part:03d}.safetensors"

    def _hidden(self, part: int) -> Path:
        return self.path / f"hidden-{part:03d}.bf16"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                f"{write_error(self.path, error)}. The same command continues with the part of the work that it was in"
            ) from error


class _Reader:
    """Hidden states BF16 [tokens, width] of all prompts, read in order from a memory-mapped file."""

    def __init__(self, path: Path, tokens: int) -> None:
        size = path.stat().st_size
        if size == 0 or size % (2 * tokens):
            raise ArtifactError(
                f"{path} has {size} bytes, no multiple of 2 for each of {tokens} tokens: remove its folder"
            )
        self._states: npt.NDArray[np.int16] = np.memmap(path, np.int16, "r").reshape(tokens, -1)
        self._next = 0

    def read(self, shape: torch.Size) -> Tensor:
        """The next hidden states, BF16 [B, T, width], for ids of `shape` [B, T]."""
        start, self._next = self._next, self._next + shape.numel()
        states = torch.from_numpy(np.array(self._states[start : self._next]))
        return states.view(torch.bfloat16).view(*shape, -1)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
