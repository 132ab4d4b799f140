"""From a BF16 model and texts to the statistics of every tensor that would be quantized.

All prompts pass the embeddings, then the first block, and so on; between two parts their hidden states lie on disk, in
a work folder beside the result. So memory holds one block and one batch, and a run that is killed goes on with the part
that it was in: `part-007.safetensors` says that part 7 is done, and `hidden-007.bf16` is what part 8 starts from.

    part 0: the embeddings        parts 1..L: the blocks        part L+1: the last norm, pooler and the like

Disk: at most two times tokens * width * 2 bytes. Prompts are batched with others of their length, never padded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.artifact.atomic_folder import WriteError, check_absent, locked_folder, write_error
from octavo.artifact.files import ArtifactError, load_tensors, open_file, read_json, save_tensors
from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE
from octavo.calibration.folder import Calibration, describe, from_tensors, hash_model, to_tensors
from octavo.calibration.observer import Observed, Observer, check_seen
from octavo.device import choose_device
from octavo.evaluation.prompts import OnRead, PromptOptions, Prompts, open_prompts
from octavo.hf.block_by_block import BlockModel
from octavo.nn import select_linears
from octavo.progress import Progress, no_progress
from octavo.version import __version__


def calibrate(
    model: Path,
    data: Sequence[str],
    out: Path,
    *,
    prompts: PromptOptions = PromptOptions(samples=256, context=2048),
    device: str = "cpu",
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> Calibration:
    """Run a model over texts in BF16, block by block, and write what its tensors were like.

    Args:
        model: a Hugging Face folder with safetensors (one file or shards) and a tokenizer.
        data: sources of text, see `octavo.text.read_text`.
        out: the folder to make; `.OUT.calibrating` beside it holds the work until then, and is resumed from.
        prompts: which prompts are taken from `data`; 128 to 512 samples are usual.
        device: where a block runs.
        progress: called at the start and after each part (`octavo.progress`).
        on_read: called with the report of what was read, before anything runs.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the model's folder is not whole, or is not supported; a work folder of
            another model, data or settings.
        DataError: the data.
        ValueError: a setting, a layer that saw no token, or inf or NaN, with the name of the site.
        WriteError: the disk refused; what is done stays, and the same call goes on from there.
    """
    check_absent(out)
    device = str(choose_device(device))
    parts = BlockModel(model, device)
    chosen = open_prompts(data, model, parts.context, prompts, on_read)
    _check_vocabulary(chosen, parts)
    settings: dict[str, Any] = {
        "samples": prompts.samples, "context": prompts.context, "context_used": chosen.context, "batch": prompts.batch,
        "device": torch.device(device).type, "seed": prompts.seed, "prompts": chosen.fingerprint,
    }  # fmt: skip
    versions = {"octavo": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")}
    model_hash = hash_model(model)
    work = _Work(out.parent / f".{out.name}.calibrating", chosen.tokens)
    with locked_folder(work.path):
        work.claim({"model": model_hash, **settings, **{f"version of {k}": v for k, v in versions.items()}})
        linears = [layer.name for layer in select_linears(parts.model) if not layer.reason]
        observed = _run_all(parts, linears, chosen.batches(prompts.batch), work, progress)
        settings["data"] = chosen.report.to_dict()
        calibration = Calibration(observed, model_hash, settings, versions, len(chosen.ids), chosen.tokens)
        calibration.save(out)
        work.remove()
    return calibration


def _check_vocabulary(prompts: Prompts, parts: BlockModel) -> None:
    rows, largest = parts.model.get_input_embeddings().num_embeddings, max(map(max, prompts.ids))
    if largest >= rows:
        raise ArtifactError(
            f"the tokenizer gives the id {largest}, the model has {rows} embeddings: the tokenizer is of another model"
        )


def _run_all(
    parts: BlockModel,
    linears: list[str],
    batches: list[Tensor],
    work: _Work,
    progress: Progress,
) -> dict[str, Observed]:
    """Every part that the work folder does not have yet; returns the sites of all."""
    observer = Observer(parts.model, linears)
    count = len(parts.blocks) + 2
    with observer.watch(), parts.loaded_frame():
        for part in range(work.done(count), count):
            progress(part, count, "calibrating, block by block")
            with work.hidden(part, last=part == count - 1) as (read, write):
                _run_part(parts, part, batches, observer, read, write)
            found = observer.take()
            if part in range(1, count - 1):
                _check_block(found, linears, parts.blocks[part - 1])
            work.finish(part, found)
    observed = {name: site for part in range(count) for name, site in work.load(part).items()}
    check_seen(observed, parts.outside(linears), "what is in no block")
    progress(count, count, "calibrating, block by block")
    return observed


def _run_part(
    parts: BlockModel,
    part: int,
    batches: list[Tensor],
    observer: Observer,
    read: Callable[[torch.Size], Tensor],
    write: Callable[[Tensor], None],
) -> None:
    if part == 0:
        for ids in batches:
            write(parts.embed(ids, observer.looking))
    elif part <= len(parts.blocks):
        with parts.loaded_block(part - 1):
            for ids in batches:
                write(parts.run_block(part - 1, ids, read(ids.shape), observer.looking))
    else:
        for ids in batches:
            parts.finish(ids, read(ids.shape), observer.looking)


def _check_block(found: dict[str, Observed], linears: list[str], block: str) -> None:
    check_seen(found, [name for name in linears if name.startswith(f"{block}.")], block)
    if not any(observed.kind == "key" for observed in found.values()):
        raise ArtifactError(
            f"{block} does not attend through the attention functions of transformers, so that its keys and values "
            "are not seen: such a model cannot be calibrated"
        )


@dataclass(frozen=True)
class _Work:
    """The folder of a calibration that is under way, over `tokens` tokens."""

    path: Path
    tokens: int

    def claim(self, fingerprint: dict[str, Any]) -> None:
        """Make the folder, or find that it is of the same model, data and settings."""
        described = self.path / "settings.json"
        if described.is_file():
            before = read_json(described)
            if changed := sorted(key for key in fingerprint | before if before.get(key) != fingerprint.get(key)):
                raise ArtifactError(
                    f"{self.path} holds a calibration that was begun with other settings ({', '.join(changed)}): go on "
                    "with those, remove that folder to start anew, or choose another folder for the result"
                )
            return
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            partial = described.with_suffix(".partial")
            partial.write_text(json.dumps(fingerprint, indent=1), encoding="utf-8")
            partial.rename(described)

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
        """Functions to read the hidden states before this part, and to write those after it, both batch by batch."""
        before = _Reader(self._hidden(part - 1), self.tokens) if part else None
        partial = self._hidden(part).with_suffix(".partial")
        with self._writing():
            file = partial.open("wb")

        def read(shape: torch.Size) -> Tensor:
            assert before is not None
            return before.read(shape)

        def write(hidden: Tensor) -> None:
            with self._writing():
                file.write(hidden.detach().to(UNQUANTIZED_DTYPE).cpu().contiguous().view(torch.int16).numpy().data)

        try:
            yield read, write
            with self._writing():
                _flush(file)
        finally:
            with self._writing():
                file.close()
        partial.unlink() if last else partial.rename(self._hidden(part))

    def finish(self, part: int, found: dict[str, Observed]) -> None:
        """Keep what a part saw; from now on it is done."""
        partial = self._part(part).with_suffix(".partial")
        with self._writing():
            save_tensors(to_tensors(found), partial, {"sites": json.dumps(describe(found))})
            with partial.open("rb") as file:
                _flush(file)
        partial.rename(self._part(part))
        self._hidden(part - 1).unlink(missing_ok=True)

    def load(self, part: int) -> dict[str, Observed]:
        """What a part saw."""
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
                f"{write_error(self.path, error)}. The same command goes on with the part of the work that it was in"
            ) from error


class _Reader:
    """Hidden states BF16 [tokens, width] of all prompts, read in their order from a memory-mapped file."""

    def __init__(self, path: Path, tokens: int) -> None:
        size = path.stat().st_size
        if size == 0 or size % (2 * tokens):
            raise ArtifactError(
                f"{path} has {size} bytes, no multiple of 2 for each of {tokens} tokens: remove its folder"
            )
        self._states: npt.NDArray[np.int16] = np.memmap(path, np.int16, "r").reshape(tokens, -1)
        self._at = 0

    def read(self, shape: torch.Size) -> Tensor:
        """The next [B, T, width], of ids [B, T]."""
        start, self._at = self._at, self._at + shape.numel()
        states = torch.from_numpy(np.array(self._states[start : self._at]))
        return states.view(UNQUANTIZED_DTYPE).view(*shape, -1)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
