"""From a run to a packed folder: the bytes that FP8 training multiplied, stored.

The recipe's forward GEMM already quantizes each weight by row, so packing is that same cast of the master weights
(with its relative floor), written down once. Nothing is calibrated: activations are scaled when the model runs. A run
that was trained in BF16 is packed in the same way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.artifact.folder import whole_folder
from octavo.artifact.packed import OTHER_DTYPE, SCALE_NAME, PackedFolder, quantization_config, read_json
from octavo.artifact.run import RunFolder
from octavo.artifact.tensors import ArtifactError, check_match, load_tensors, model_tensors, save_tensors
from octavo.models import BUILT_IN_MODELS, from_hf_config
from octavo.nn import convert
from octavo.ops import quantize
from octavo.serve.packed_linear import FORWARD
from octavo.serve.skeleton import Skeleton, our_skeleton, transformers_skeleton
from octavo.version import __version__

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PackReport:
    """What `pack` made. Sizes in bytes."""

    folder: Path
    checkpoint: Path
    packed: tuple[str, ...]
    skipped: Mapping[str, str]
    bf16_bytes: int
    packed_bytes: int
    folder_bytes: int

    @property
    def ratio(self) -> float:
        """The packed linear weights, scales included, against the same in BF16."""
        return self.packed_bytes / self.bf16_bytes


def pack(run: Path, out: Path, step: int | None = None, progress: Progress | None = None) -> PackReport:
    """Write the model of a run's checkpoint as a packed folder, which appears whole or not at all.

    Args:
        run: the folder of a run of `octavo train`.
        out: the folder to make.
        step: the checkpoint; None takes the newest.
        progress: called with the number of tensors done and of all, after each.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the run, or its checkpoint, is not whole, or holds inf or NaN.
        WriteError: the disk refused.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already: choose another folder, or remove it first")
    folder = RunFolder(run)
    checkpoint = _checkpoint(folder, step)
    settings = read_json(folder.config)
    skeleton = _skeleton(folder, settings)
    tensors = _master_weights(checkpoint, skeleton)
    names = skeleton.linears()
    conversion = convert(skeleton.model, "rowwise", skip=settings.get("skip", ()))
    packed = set(conversion.converted)
    stored = _pack_tensors(tensors, packed, skeleton, progress)
    ignore = [disk for name in conversion.skipped for disk in names[name]]
    metadata = {"format": "pt", "octavo_version": __version__, "octavo_checkpoint": checkpoint.name}
    with whole_folder(out) as partial:
        target = PackedFolder(partial)
        _write_description(folder.model, target, ignore)
        save_tensors(stored, target.tensors, metadata)
    linear = [disk for name in packed for disk in names[name]]
    return PackReport(
        folder=out,
        checkpoint=checkpoint,
        packed=tuple(conversion.converted),
        skipped=conversion.skipped,
        bf16_bytes=sum(2 * stored[f"{name}.weight"].numel() for name in linear),
        packed_bytes=sum(stored[f"{name}.{leaf}"].nbytes for name in linear for leaf in ("weight", SCALE_NAME)),
        folder_bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
    )


def _checkpoint(run: RunFolder, step: int | None) -> Path:
    newest = run.newest()
    if step is None:
        return newest
    if run.checkpoint(step) not in run.checkpoints():
        kept = ", ".join(str(int(path.name.removeprefix("step-"))) for path in run.checkpoints())
        raise ArtifactError(f"{run.path} has no checkpoint of step {step}: it keeps {kept}")
    return run.checkpoint(step)


def _skeleton(run: RunFolder, settings: Mapping[str, Any]) -> Skeleton:
    """The model as the trainer built it: a fine-tuned one is of transformers, even where the architecture is ours."""
    if settings.get("model") not in BUILT_IN_MODELS:
        return transformers_skeleton(run.model)
    found = from_hf_config(read_json(run.model / "config.json"))
    if found is None:
        raise ArtifactError(
            f"{run.model / 'config.json'} is not of a {settings['model']}, which the run's config.json names"
        )
    return our_skeleton(found[1])


def _master_weights(checkpoint: Path, skeleton: Skeleton) -> dict[str, Tensor]:
    path = checkpoint / "model.safetensors"
    tensors = load_tensors(path)
    check_match(tensors, model_tensors(skeleton.model), f"{path} is not of the model that the run describes")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ArtifactError(
                f"{path}: {name} holds inf or NaN, the run had diverged: pack an earlier step with --step"
            )
    return tensors


def _pack_tensors(
    tensors: Mapping[str, Tensor], packed: set[str], skeleton: Skeleton, progress: Progress | None
) -> dict[str, Tensor]:
    """Every tensor of the packed file, by its name on disk."""
    assert FORWARD.w is not None
    stored: dict[str, Tensor] = {}
    for done, (name, tensor) in enumerate(tensors.items(), start=1):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in packed:
            q = quantize(tensor, FORWARD.w)
            stored |= skeleton.on_disk({name: q.data, f"{module}.{SCALE_NAME}": q.scale})
        else:
            stored |= skeleton.on_disk({name: tensor.to(OTHER_DTYPE) if tensor.is_floating_point() else tensor})
        if progress is not None:
            progress(done, len(tensors))
    return stored


def _write_description(model: Path, target: PackedFolder, ignore: list[str]) -> None:
    """config.json, and beside it what else lies in the run's model folder: the tokenizer."""
    config = read_json(model / "config.json")
    config.pop("torch_dtype", None)  # the older name of "dtype"
    config |= {"dtype": str(OTHER_DTYPE).removeprefix("torch."), "quantization_config": quantization_config(ignore)}
    target.config.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name != target.config.name:
            shutil.copy(path, target.path / path.name)
