"""A model folder written from another model, one tensor at a time."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.atomic_folder import whole_folder
from octavo.artifact.packed.description import copy_description
from octavo.artifact.packed.layouts import write_config
from octavo.artifact.safetensors_files import Spec, write_shards
from octavo.hf.source import Source
from octavo.progress import Progress
from octavo.version import __version__

Change = Callable[[str, Tensor], Mapping[str, Tensor]]
"""(name, tensor) of the source's model -> the tensors of the new files that hold it, by their names there. A tensor on
the meta device gives tensors on the meta device."""


@dataclass(frozen=True)
class WrittenModel:
    """A folder that was written.

    Attributes:
        folder: the new folder.
        source: the folder whose tensors were read.
        left_out: tensors of the source's files that have no place in its model.
        specs: dtype and shape of every tensor of the new files.
        folder_bytes: the size of all files of the new folder.
    """

    folder: Path
    source: Path
    left_out: Sequence[str]
    specs: Mapping[str, Spec]
    folder_bytes: int


def write_model(
    source: Source,
    out: Path,
    change: Change,
    config: Mapping[str, Any],
    record: Callable[[], Mapping[str, object]],
    progress: Progress,
    doing: str,
    added: Mapping[str, Tensor] | None = None,
) -> WrittenModel:
    """Write the folder `out`, which appears whole or not at all.

    Args:
        source: whose tensors are read.
        out: the folder to make.
        change: from a tensor of the model to tensors of the files. It is called twice for each tensor, first on the
            meta device, which gives the headers of the files, then with the numbers.
        config: the new config.json.
        record: called when all tensors are written; octavo.json gets its entries.
        progress: called after each tensor.
        doing: the name of the work for `progress`.
        added: tensors of the files beside those of the model.

    Raises:
        FileExistsError: `out` exists.
        ArtifactError: a tensor holds inf or NaN.
        WriteError: the disk refused.
    """
    added = added or {}
    stored = {name: tensor for key, spec in source.specs.items() for name, tensor in change(key, spec.meta()).items()}
    specs = {name: Spec.of(tensor) for name, tensor in {**added, **stored}.items()}
    digest = hashlib.sha256()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from added.items()
        for done, name in enumerate(source.specs, start=1):
            tensor = source.get(name)
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            yield from change(name, tensor).items()
            progress(done, len(source.specs), doing)

    with whole_folder(out) as partial:
        write_config(partial, config)
        copy_description(source.description, partial)
        metadata = {"format": "pt", "octavo_version": __version__, "octavo_source": source.origin.name}
        write_shards(partial, specs, tensors(), metadata)
        made = {"octavo_version": __version__, "source": source.origin.name, "source_sha256": digest.hexdigest()}
        (partial / "octavo.json").write_text(json.dumps({**made, **record()}, indent=2) + "\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return WrittenModel(out, source.origin, source.left_out, specs, size)
