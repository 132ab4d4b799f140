"""From a model to one that computes the same and quantizes better: outliers folded away into the weights.

Smoothing (SmoothQuant, Xiao et al., arXiv:2211.10438) moves the outliers of a tensor over to the weights that read it,
a factor a channel; what writes the tensor (a norm, or the linear layer before) is divided by it:

    norm(x) w^T = (norm(x) / s) (w s)^T

Rotation (QuaRot, Ashkboos et al., arXiv:2404.00456; with learned matrices SpinQuant, arXiv:2405.16406) turns the whole
residual stream by a random Hadamard matrix Q, which leaves the root mean square of a token as it is; and each head of
the values by one of its size:

    embedding Q | Q^T norm, its weight absorbed into what reads it: w diag(g) Q | what writes the stream: Q^T w
    values: H^T w_v, w_o H

Nothing is left to do when the model runs: the result is a model like any other, to be calibrated and packed. The input
of `down_proj` lies behind a product that no rotation passes through, so beside a rotation that alone is smoothed.
Weights are read, changed and written one at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.atomic_folder import check_absent, whole_folder
from octavo.artifact.files import ArtifactError, read_json
from octavo.artifact.packed.description import copy_description
from octavo.artifact.safetensors_files import SHARD_BYTES, Spec, write_shards
from octavo.calibration.folder import Calibration, load_calibration
from octavo.folding.architectures import Map, Pair, check_rotation, read_map
from octavo.folding.transforms import (
    Change,
    Step,
    block_of,
    is_finite,
    random_signs,
    rotated,
    scaled,
    smoothing_factors,
)
from octavo.hf.source import Source, open_source
from octavo.progress import Progress, no_progress
from octavo.version import __version__

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class FoldReport:
    """What `fold` made.

    Attributes:
        folder, source: written and read.
        smoothed: the least and the largest factor of each pair, by the name of what writes the tensor.
        rotated: the orders of the Hadamard blocks of the residual stream and of the values' heads, or None.
        untied: whether the head has a weight of its own now, which it shared with the embedding before.
        changed: tensors that are not what they were.
        left_out: tensors of the files that have no place in the model.
        folder_bytes: what lies on the disk.
    """

    folder: Path
    source: Path
    smoothed: Mapping[str, tuple[float, float]]
    rotated: tuple[int, int] | None
    untied: bool
    changed: int
    left_out: Sequence[str]
    folder_bytes: int


def fold(
    model: Path,
    out: Path,
    *,
    smooth: Path | None = None,
    alpha: float = 0.5,
    rotate: bool = False,
    seed: int = 0,
    dtype: str = "bfloat16",
    step: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> FoldReport:
    """Write a model that computes the same, with outliers folded into its weights. Memory: about one tensor.

    Args:
        model: a Hugging Face folder (Llama, Mistral, Qwen2, Qwen3; to smooth also OPT and BERT-like encoders), or a run
            of `octavo train` of a Llama.
        out: the folder to make, of Hugging Face's kind; it appears whole or not at all.
        smooth: what `octavo calibrate` made of this model: move outliers of activations over to weights.
        alpha: how much of them, 0 (none) to 1 (all).
        rotate: rotate the residual stream and the values; then only `down_proj`'s input is smoothed.
        seed: of the rotation's signs.
        dtype: of the weights written: bfloat16 or float32.
        step: the checkpoint of a run; None takes the newest.
        shard_bytes: the largest file of tensors.
        progress: called after each tensor (`octavo.progress`).

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the model is not whole, holds inf or NaN, or is of an architecture that cannot
            be folded so.
        ValueError: neither way was asked for, a setting, or a calibration of another model.
        WriteError: the disk refused.
    """
    check_absent(out)
    if smooth is None and not rotate:
        raise ValueError("fold needs to know how: smooth with a calibration of the model, rotate, or both")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    source = open_source(model, step)
    plan = _Plan(source, read_map(source, rotate=rotate), DTYPES[dtype])
    if smooth is not None:
        plan.smooth(smooth, alpha, beside_rotation=rotate)
    if rotate:
        plan.rotate(seed)
    digest = hashlib.sha256()
    with whole_folder(out) as partial:
        plan.describe(partial, dtype)
        metadata = {"format": "pt", "octavo_version": __version__, "octavo_source": source.origin.name}
        write_shards(partial, plan.specs, plan.tensors(digest, progress), metadata, shard_bytes)
        (partial / "octavo.json").write_text(json.dumps(plan.record(digest.hexdigest(), dtype), indent=2) + "\n")
    return plan.report(out)


class _Plan:
    """What becomes of each tensor, known before the first is written."""

    def __init__(self, source: Source, places: Map, dtype: torch.dtype) -> None:
        self.source, self.places = source, places
        self.changes: dict[str, Change] = defaultdict(Change)  # by the tensor's name
        self.record_of: dict[str, Any] = {"smooth": None, "rotate": None}
        self.smoothed: dict[str, tuple[float, float]] = {}
        self.rotated: tuple[int, int] | None = None
        self.specs = {
            name: Spec(dtype if spec.dtype.is_floating_point else spec.dtype, spec.shape)
            for name, spec in source.specs.items()
        }

    # --- Smoothing ---------------------------------------------------------------------------------------------------

    def smooth(self, folder: Path, alpha: float, *, beside_rotation: bool) -> None:
        """Divide what writes a tensor by factors, channel by channel, and multiply what reads it."""
        found = load_calibration(folder, self.source)
        turned = {*self.places.norms, *(values for values, _ in self.places.heads)} if beside_rotation else set()
        for pair in self.places.pairs:
            if pair.writer not in turned:
                self._smooth_pair(pair, self._amax(pair, found, folder), alpha)
        used = {"prompts": found.prompts, "tokens": found.tokens, "settings": dict(found.settings)}
        calibration = used | {"model_hash": found.model_hash}
        self.record_of["smooth"] = {"alpha": alpha, "factors": self.smoothed, "calibration": calibration}

    def _amax(self, pair: Pair, found: Calibration, folder: Path) -> Tensor:
        """The amax of each channel that the readers of a pair read, float32 [K]."""
        sites = {found.layers.get(reader) for reader in pair.readers}
        site = sites.pop()
        if site is None or sites:
            raise ValueError(
                f"{folder} must have one site for {', '.join(pair.readers)}: calibrate the model with this version"
            )
        return found.sites[site].channel_amax

    def _smooth_pair(self, pair: Pair, x_amax: Tensor, alpha: float) -> None:
        weights = [self.source.get(f"{reader}.weight").float().abs().amax(0) for reader in pair.readers]
        w_amax = torch.stack(weights).amax(0)
        channels = self.source.specs[f"{pair.writer}.weight"].shape[0]
        head = pair.head or channels
        heads = (channels // head, -1, head)  # of the writer; those of the readers that share one; their channels
        x_amax_of, w_amax_of = (amax.view(heads).amax(1).flatten() for amax in (x_amax, w_amax))
        factors = smoothing_factors(x_amax_of, w_amax_of, alpha)
        shared = len(x_amax) // channels
        read = factors.view(-1, 1, head).expand(-1, shared, -1).flatten()
        for reader in pair.readers:
            self.changes[f"{reader}.weight"].inputs.append(scaled(read))
        self._on_outputs(pair.writer, scaled(1 / factors))
        self.smoothed[pair.writer] = (float(factors.min()), float(factors.max()))

    def _on_outputs(self, module: str, step: Step) -> None:
        """Of its weight, and of its bias if it has one."""
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in self.source.specs:
                self.changes[name].outputs.append(step)

    # --- Rotation ----------------------------------------------------------------------------------------------------

    def rotate(self, seed: int) -> None:
        """Absorb the norms' weights, and turn the residual stream and the values."""
        places = self.places
        check_rotation(places, self.source.description / "config.json")
        blocks = block_of(places.width), block_of(places.head_dim)
        turn = rotated(places.width, random_signs(places.width, seed))
        turn_head = rotated(places.head_dim)
        for norm, readers in places.norms.items():
            gain = self.source.get(f"{norm}.weight").double()
            for reader in readers:
                self.changes[f"{reader}.weight"].inputs += [scaled(gain), turn]
            self._on_outputs(norm, torch.ones_like)
        self.changes[f"{places.embedding}.weight"].inputs.append(turn)
        for writer in places.writers:
            self._on_outputs(writer, turn)
        for values, output in places.heads:
            self._on_outputs(values, turn_head)
            self.changes[f"{output}.weight"].inputs.append(turn_head)
        if self.untied:
            self.specs[f"{places.head}.weight"] = self.specs[f"{places.embedding}.weight"]
        self.rotated = blocks
        self.record_of["rotate"] = {"seed": seed, "stream_block": blocks[0], "head_block": blocks[1]}

    @property
    def untied(self) -> bool:
        """Whether the head gets a weight of its own."""
        head = f"{self.places.head}.weight"
        return head in self.changes and head not in self.source.specs

    # --- What is written ---------------------------------------------------------------------------------------------

    def tensors(self, digest: hashlib._Hash, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the files, as it is read and changed; `digest` takes in the source's bytes."""
        embedding, head = (f"{module}.weight" for module in (self.places.embedding, self.places.head))
        for done, name in enumerate(self.source.specs, start=1):
            tensor = self.source.get(name)
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            yield name, self._changed(name, tensor)
            if name == embedding and self.untied:
                yield head, self._changed(head, tensor)
            progress(done, len(self.source.specs), "folding")

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        dtype = self.specs[name].dtype
        if name not in self.changes:
            return tensor.to(dtype)
        changed = self.changes[name].apply(tensor, dtype)
        if not is_finite(changed):
            raise ArtifactError(f"{self.source.origin}: {name} overflows {dtype} once it is folded: take float32")
        return changed

    def describe(self, target: Path, dtype: str) -> None:
        """config.json, and beside it what else describes the model: the tokenizer."""
        config = read_json(self.source.description / "config.json")
        config.pop("torch_dtype", None)  # the older name of "dtype"
        config |= {"dtype": dtype} | ({"tie_word_embeddings": False} if self.untied else {})
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_description(self.source.description, target)

    def record(self, digest: str, dtype: str) -> dict[str, Any]:
        """What octavo.json says: docs/format.md."""
        made = {"octavo_version": __version__, "source": self.source.origin.name, "source_sha256": digest}
        return made | {"dtype": dtype, "folded": self.record_of}

    def report(self, out: Path) -> FoldReport:
        """What was made in the folder `out`."""
        return FoldReport(
            folder=out,
            source=self.source.origin,
            smoothed=self.smoothed,
            rotated=self.rotated,
            untied=self.untied,
            changed=len(self.changes),
            left_out=self.source.left_out,
            folder_bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        )
