"""A storage of torch.distributed.checkpoint (DCP) whose files are plain safetensors files.

DCP's own writers give each rank files of its own, which only DCP reads, or join these files afterwards, which writes
every byte twice. Here the coordinator makes each file with its header and space for all data, and every rank writes its
parts of the tensors to their places. So the files do not depend on the number of ranks, and everything that opens
safetensors files opens them, DCP's `HuggingFaceStorageReader` included.

All ranks must see one file system that lets several processes write different bytes of a file.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from octavo.checkpoint.files import CHECKSUMS, Place, create_files, write_part
from octavo.checkpoint.folder import partial_folder, whole_folder


class SafetensorsWriter(StorageWriter, ExitStack):
    """Writes tensors named STEM/NAME to the files STEM.safetensors of the folder `target`, which appears whole or not
    at all, beside `files` (name -> content). `metadata` is that of the safetensors files, by stem.

    It is a context manager around `dcp.save`: if the save fails, the partial folder is removed.
    """

    def __init__(self, target: Path, files: Mapping[str, str], metadata: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self.target, self._files, self._metadata = target, files, metadata

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.enter_context(whole_folder(self.target))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files on the coordinator, and tell each rank the places of its tensors."""
        specs: dict[str, dict[str, Tensor]] = {}
        for item in sorted((item for plan in plans for item in plan.items), key=lambda item: item.index.fqn):
            stem, _, name = item.index.fqn.partition("/")
            whole = _tensor_data(item)
            specs.setdefault(stem, {})[name] = torch.empty(whole.size, dtype=whole.properties.dtype, device="meta")
        folder = partial_folder(self.target)
        places = {
            f"{stem}/{name}": place
            for stem, each in specs.items()
            for name, place in create_files(folder, stem, each, self._metadata.get(stem, {})).items()
        }
        return [
            dataclasses.replace(plan, storage_data={item.index.fqn: places[item.index.fqn] for item in plan.items})
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of this rank, and flush them to the disk."""
        places: dict[str, Place] = plan.storage_data
        by_file = sorted(plan.items, key=lambda item: places[item.index.fqn].file)
        results = []
        for name, items in groupby(by_file, key=lambda item: places[item.index.fqn].file):
            with (partial_folder(self.target) / name).open("r+b") as file:
                for item in items:
                    part = planner.resolve_data(item)
                    assert isinstance(part, Tensor), f"{item.index.fqn} is no tensor"
                    offsets = _tensor_data(item).chunk.offsets
                    checksum = write_part(file, places[item.index.fqn], part, offsets)
                    results.append(WriteResult(item.index, part.nbytes, [list(offsets), list(part.shape), checksum]))
                file.flush()
                os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the checksums, and give the folder its name, on the coordinator, after all ranks have written."""
        parts: dict[str, list[Any]] = {}
        for written in chain.from_iterable(results):
            parts.setdefault(written.index.fqn, []).append(written.storage_data)
        for name, content in {**self._files, CHECKSUMS: json.dumps(parts)}.items():
            (partial_folder(self.target) / name).write_text(content)
        self.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one folder."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data
