"""Tensors in one or several safetensors files, read and written one at a time.

A safetensors file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, first and last
byte), and the data (github.com/huggingface/safetensors). The header does not depend on the data, so it is written
first, and each tensor is written to its place when it comes. Reader and writer hold one tensor at a time, except where
all are asked for. Wider dtypes come before narrower ones, so that every tensor is aligned.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError, open_file, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
THREADS = 8  # that read at once: one alone does not fill the bus to a GPU
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The spec of `tensor`, which may be on the meta device."""
        return cls(tensor.dtype, tuple(tensor.shape))

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.numel


class ShardReader:
    """The tensors of a folder: in model.safetensors, or in the files that its index names.

    Raises:
        FileNotFoundError: the folder has neither, or lacks a file that the index names.
        ArtifactError: a file is truncated or not of the format, the index names a file outside the folder, or a tensor
            that its file does not have; a folder of pickles, which are never opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = [folder / SINGLE] if (folder / SINGLE).is_file() else _indexed(folder)
        self._files: dict[str, Path] = {}
        self.specs: dict[str, Spec] = {}
        for path in files:
            opened = open_file(path)
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                self.specs[name] = Spec(_BY_NAME[part.get_dtype()], tuple(part.get_shape()))
                self._files[name] = path

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU. The file is opened for each, because a mapping keeps in memory what is read through
        it.

        Raises:
            ArtifactError: the file was removed since this reader was made, or is damaged.
        """
        try:
            tensor: Tensor = open_file(self._files[name]).get_tensor(name)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{self._files[name]} was removed while it was read. If it belongs to a run that still trains, the run "
                "removed this checkpoint for a newer one (setting keep): give the command again"
            ) from error
        return tensor

    def get_all(self, device: torch.device | str) -> dict[str, Tensor]:
        """Every tensor, on `device`; on the CPU they lie in the mapped files. Raises the errors of `get`."""
        return read_all(self.get, self.specs, device)


def read_all(get: Callable[[str], Tensor], specs: Mapping[str, Spec], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors of `specs`, which `get` reads on the CPU, on `device`. Several threads copy them to a GPU, so that
    the CPU holds few of them at a time."""
    largest_first = sorted(specs, key=lambda name: -specs[name].nbytes)  # so that the threads end together
    with ThreadPoolExecutor(THREADS) as threads:
        tensors = threads.map(lambda name: get(name).to(device), largest_first)
        found = dict(zip(largest_first, tensors, strict=True))
    return {name: found[name] for name in specs}


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
        if pickles:
            raise ArtifactError(
                f"{folder} holds its weights in {pickles[0]}, a pickle, which can run code and is never opened here: "
                "save the model with safetensors (transformers' save_pretrained does)"
            )
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ArtifactError(f"{index} must map tensors to files in weight_map, got {weights!r}")
    files = sorted(set(map(str, weights.values())))
    for name in files:
        if len(PurePosixPath(name).parts) != 1 or "\\" in name or name in ("", ".", ".."):
            raise ArtifactError(f"{index} names {name!r}: its files must lie in the folder itself")
    return [folder / name for name in files]


def write_shards(
    folder: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write tensors, in any order, as one file, or as several of at most SHARD_BYTES (or one tensor) and an index.

    Args:
        folder: to write into.
        specs: of every tensor.
        tensors: the name and the data of each tensor, once.
        metadata: of every file.

    Raises:
        OSError: the disk refuses.
        ValueError: a tensor does not fit its spec, comes twice, or does not come.
    """
    shards = _divide(specs, SHARD_BYTES)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    opened = [_ShardFile(folder / file, shard, metadata) for file, shard in zip(names, shards, strict=True)]
    files = {name: file for file, shard in zip(opened, shards, strict=True) for name in shard}
    waiting = dict(specs)
    try:
        for name, tensor in tensors:
            if waiting.pop(name, None) != Spec.of(tensor):
                raise ValueError(f"{name}: {Spec.of(tensor)} came, {specs.get(name)} was to come, once")
            files[name].write(name, tensor)
        if waiting:
            raise ValueError(f"{len(waiting)} tensors did not come, {next(iter(waiting))} among them")
    finally:
        for file in opened:
            file.close()
    if count > 1:
        size = sum(spec.nbytes for spec in specs.values())
        placed = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _divide(specs: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    return shards


class _ShardFile:
    """A file whose header is written, and whose tensors are written one by one."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._at, end = {}, 0
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            self._at[name] = end
            end += spec.nbytes
            header[name] = {
                "dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [self._at[name], end],
            }  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = self._file.tell()
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        self._file.seek(self._start + self._at[name])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.close()
