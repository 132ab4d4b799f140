"""Tensors in one or several safetensors files, read and written one at a time.

A safetensors file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, first and last
byte), and the data (github.com/huggingface/safetensors). The header does not depend on the data, so it is written
first, and each tensor is written to its place when it comes, whole or in parts. Reader and writer hold one tensor at a
time, except where all are asked for. Wider dtypes come before narrower ones, so that every tensor is aligned.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError, open_file, read_json

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SINGLE, INDEX = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
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

    Args:
        folder: to read from.
        stem: the name of the file without its suffix.

    Raises:
        FileNotFoundError: the folder has neither, or lacks a file that the index names.
        ArtifactError: a file is truncated or not of the format, the index names a file outside the folder, or a tensor
            that its file does not have; a folder of pickles, which are never opened.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        single = folder / f"{stem}{SUFFIX}"
        files = [single] if single.is_file() else _indexed(folder, stem)
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
        tensor: Tensor = self._open(name).get_tensor(name)
        return tensor

    def get_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The part of a tensor that begins at `offsets` and has the shape `sizes`, on the CPU. Raises the errors of
        `get`."""
        if not sizes:
            return self.get(name)
        slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        part: Tensor = self._open(name).get_slice(name)[slices]
        return part

    def get_all(self, device: torch.device | str) -> dict[str, Tensor]:
        """Every tensor, on `device`; on the CPU they lie in the mapped files. Raises the errors of `get`."""
        return read_all(self.get, self.specs, device)

    def _open(self, name: str) -> Any:
        try:
            return open_file(self._files[name])
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{self._files[name]} was removed while it was read. If it belongs to a run that still trains, the run "
                "removed this checkpoint for a newer one (setting keep): give the command again"
            ) from error


def read_all(get: Callable[[str], Tensor], specs: Mapping[str, Spec], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors of `specs`, which `get` reads on the CPU, on `device`. Several threads copy them to a GPU, so that
    the CPU holds few of them at a time."""
    largest_first = sorted(specs, key=lambda name: -specs[name].nbytes)  # so that the threads end together
    with ThreadPoolExecutor(THREADS) as threads:
        tensors = threads.map(lambda name: get(name).to(device), largest_first)
        found = dict(zip(largest_first, tensors, strict=True))
    return {name: found[name] for name in specs}


def _indexed(folder: Path, stem: str) -> list[Path]:
    index = folder / f"{stem}{INDEX_SUFFIX}"
    if not index.is_file():
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
        if pickles:
            raise ArtifactError(
                f"{folder} holds its weights in {pickles[0]}, a pickle, which can run code and is never opened here: "
                "save the model with safetensors (transformers' save_pretrained does)"
            )
        raise FileNotFoundError(f"{folder / stem}{SUFFIX} is missing, and so is {index.name}")
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
    places = create_files(folder, "model", specs, metadata)
    waiting = dict(specs)
    with ExitStack() as stack:
        files = {file: stack.enter_context((folder / file).open("r+b")) for file in {at.file for at in places.values()}}
        for name, tensor in tensors:
            if waiting.pop(name, None) != Spec.of(tensor):
                raise ValueError(f"{name}: {Spec.of(tensor)} came, {specs.get(name)} was to come, once")
            write_part(files[places[name].file], places[name], tensor, [0] * tensor.ndim)
        if waiting:
            raise ValueError(f"{len(waiting)} tensors did not come, {next(iter(waiting))} among them")


@dataclass(frozen=True)
class Place:
    """Where a tensor of the shape `shape` lies: the name of its file, and its first byte there."""

    file: str
    start: int
    shape: tuple[int, ...]


def create_files(folder: Path, stem: str, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> dict[str, Place]:
    """Make the files of `specs`, with their headers and space for all data, and their index if they are several.

    Returns:
        The place of each tensor, to be filled by `write_part`.
    """
    shards = _divide(specs, SHARD_BYTES)
    count = len(shards)
    places: dict[str, Place] = {}
    for i, shard in enumerate(shards):
        name = f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}"
        places |= _create_file(folder / name, shard, metadata)
    if count > 1:
        size = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": size}, "weight_map": {name: places[name].file for name in sorted(specs)}}
        (folder / f"{stem}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")
    return places


def write_part(file: BinaryIO, place: Place, part: Tensor, offsets: Sequence[int]) -> None:
    """Write a rectangular part of the tensor at `place`, which begins at `offsets`, to its open file."""
    part = part.detach().cpu().contiguous()
    data, itemsize = part.reshape(-1).view(torch.uint8).numpy().data, part.element_size()
    # All after the last dimension that is cut lies in one run of bytes, and so do the rows of that dimension.
    cut = max((d for d, size in enumerate(part.shape) if size != place.shape[d]), default=0)
    length = part.shape[cut:].numel()
    strides = [torch.Size(place.shape[d + 1 :]).numel() for d in range(part.ndim)]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for run, index in enumerate(product(*map(range, part.shape[:cut]))):
        start = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        file.seek(place.start + start * itemsize)
        file.write(data[run * length * itemsize : (run + 1) * length * itemsize])


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


def _create_file(path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> dict[str, Place]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name] = end
        end += spec.nbytes
        header[name] = {
            "dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [starts[name], end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        data = file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data + end)
    return {name: Place(path.name, data + start, specs[name].shape) for name, start in starts.items()}
