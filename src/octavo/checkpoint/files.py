"""Reading and writing safetensors and JSON files, with errors that name the file."""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.util import parse_object, reading

WIDE = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # each is read where another is required


class ArtifactError(ValueError):
    """A file or folder has the wrong content. The message names it."""


def check_path(path: Path) -> None:
    """Raise a ValueError if a path has bytes that are not UTF-8: safetensors opens no such file, no JSON has it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} must be a path in UTF-8, character {error.start} is not: rename it") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path, metadata)
    except SafetensorError as error:  # the library wraps the operating system's errors in its own
        raise OSError(str(error)) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor in the file `path`, on the CPU. An ArtifactError if it is truncated or no safetensors file."""
    file = open_file(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def open_file(path: Path) -> Any:
    """Open the safetensors file at `path` and read its header. Raises the errors of `load_tensors` and `check_path`."""
    check_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        path.open("rb").close()  # safetensors says of a file that may not be read that there is none
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ArtifactError(f"{path} is truncated or not a safetensors file ({error})") from error
    except (OSError, RuntimeError) as error:  # such as a file too large to be mapped
        raise OSError(f"{path} cannot be opened: {error}") from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name. A tensor with several names has the first."""
    persistent = model.state_dict(keep_vars=True).keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in persistent}


def check_match(found: Mapping[str, Tensor], required: Mapping[str, Tensor], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, unless `found` has the names, shapes and dtypes of `required`.
    A float of 16 bits or more may stand for another."""
    if missing := sorted(required.keys() - found.keys()):
        raise ArtifactError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(found.keys() - required.keys()):
        raise ArtifactError(f"{where}: tensor {extra[0]} has no place in the model ({len(extra)} in all)")
    for name, tensor in required.items():
        if found[name].shape != tensor.shape:
            raise ArtifactError(
                f"{where}: {name} must have shape {list(tensor.shape)}, the file has {list(found[name].shape)}"
            )
        if found[name].dtype != tensor.dtype and not {found[name].dtype, tensor.dtype} <= WIDE:
            raise ArtifactError(f"{where}: {name} must be {tensor.dtype}, the file has {found[name].dtype}")


def whole_lines(path: Path) -> list[str]:
    """The lines of a text file, each with its end; none of a file that is not there.

    A last line that is being written, or was cut short, is left out. Bytes that are not UTF-8 are replaced.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [f"{line}\n" for line in text.split("\n")[:-1]]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. An ArtifactError if it is not JSON, or no object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    return parse_object(path.read_bytes(), str(path), ArtifactError)


def check_expert_counts(config: Mapping[str, Any], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, if a token runs through more experts than there are."""
    families = ("num_local_experts", "num_experts", "n_routed_experts")  # what they call the number of experts
    count = next((n for key in families if isinstance(n := config.get(key), int)), None)
    used = config.get("num_experts_per_tok")
    if count is not None and isinstance(used, int) and used > max(count, 1):
        raise ArtifactError(
            f"{where}: num_experts_per_tok must be at most the number of experts, got {used} of {count}"
        )


def replace_file(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, also where another process writes it: a full disk must not destroy
    the old one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# ---- Tensors in one or several safetensors files, read and written one at a time.
#
# A safetensors file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, first and last
# byte), and the data (github.com/huggingface/safetensors). The header does not depend on the data, so it is written
# first, and each tensor is written to its place when it comes, whole or in parts. Reader and writer hold one tensor at
# a time, except where all are asked for. Wider dtypes come before narrower ones, so that every tensor is aligned.


SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SINGLE, INDEX = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
SHARD_BYTES = 5 * 10**9
THREADS = 8  # that read at once: one alone does not fill the bus to a GPU
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class ShardReader:
    """The tensors of a folder: in STEM.safetensors, or each in the file that the index names for it.

    `specs` has a tensor on the meta device for each. `written` has those in files that Octavo wrote, as their headers
    say; their checksums are checked where they are read. `strays` are tensors that a file holds and the index takes
    from another, as an older file that was left there.

    An ArtifactError if a file is truncated or not of the format, or has a dtype that is not read. Also if the index
    names a file outside the folder, or a tensor that its file does not have. Also for a folder of pickles, which are
    never opened.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        single = folder / f"{stem}{SUFFIX}"
        indexed = None if single.is_file() else _indexed(folder, stem)
        self._places: dict[str, tuple[Path, int, Tensor]] = {}  # the file of each tensor, and its first byte there
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._mapped: dict[Path, Any] = {}  # the storage of whole files, where all tensors are read
        self.specs: dict[str, Tensor] = {}
        self.strays: list[str] = []
        self.written: set[str] = set()
        for path in [single] if indexed is None else sorted(set(indexed.values())):
            header, by_octavo = _read_header(path)
            self.written |= header.keys() if by_octavo else set()
            self._stamps[path] = _stamp(path)
            for name, (start, spec) in header.items():
                if indexed is not None and indexed.get(name) != path:
                    self.strays += [name] if name in indexed else []
                    continue
                self.specs[name], self._places[name] = spec, (path, start, spec)
        if indexed is not None and (lost := sorted(indexed.keys() - self.specs.keys())):
            raise ArtifactError(
                f"{folder / stem}{INDEX_SUFFIX} takes {lost[0]} from {indexed[lost[0]].name}, which does not hold it "
                f"({len(lost)} in all): the files are of different models, get all of them again"
            )
        self._checksums = self._read_checksums(stem)

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, in a mapping of its own, because a mapping keeps its read pages in memory. An
        ArtifactError if the file was changed since this reader was made, or holds other bytes than Octavo wrote."""
        shape = self._places[name][2].shape
        return self.get_part(name, [0] * len(shape), shape)

    def _map(self, name: str) -> Tensor:
        path, start, spec = self._places[name]
        end = start + spec.nbytes
        storage = (self._mapped[path] if path in self._mapped else self._map_file(path, end))[start:end]
        data = torch.empty(0, dtype=torch.uint8).set_(storage)  # no offset, which torch.set_rng_state would not heed
        data = data if start % spec.dtype.itemsize == 0 else data.clone()  # other programs may not align
        return data.view(spec.dtype).view(spec.shape)

    def _map_file(self, path: Path, size: int) -> Any:
        if _stamp(path) != self._stamps[path]:
            raise ArtifactError(
                f"{path} was removed or changed while it was read. If it belongs to a run that still trains, the run "
                "removed this checkpoint for a newer one (setting keep): give the command again"
            )
        with reading(path, "a file that can be mapped", ArtifactError):
            return torch.UntypedStorage.from_file(str(path), False, size)

    def get_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The part of a tensor that begins at `offsets` and has the shape `sizes`, on the CPU; the errors of `get`. The
        checksums take 0.3 ns a byte."""
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        read = self._map(name)[tuple(map(slice, offsets, ends))]
        for at, shape, written in self._checksums.get(name, ()):
            begin = [start - offset for start, offset in zip(at, offsets, strict=True)]
            end = [start + size for start, size in zip(begin, shape, strict=True)]
            if all(b >= 0 and e <= size for b, e, size in zip(begin, end, sizes, strict=True)):
                found = checksum(read[tuple(map(slice, begin, end))])
                if found != written:
                    raise ArtifactError(
                        f"{self._places[name][0]} is damaged: the bytes of {name} have the CRC-32 {found}, and "
                        f"{written} was written. Copy the file again, make it again, or take an earlier checkpoint"
                    )
        return read

    def _read_checksums(self, stem: str) -> dict[str, list[Any]]:
        """The parts of each tensor with a checksum, as a checkpoint has them: a model folder has one of the whole."""
        if (path := self.folder / CHECKSUMS).is_file():
            found = read_json(path)
            return {name: found[key] for name in self.written if (key := f"{stem}/{name}") in found}
        found = read_record(self.folder).get("checksums", {}) if self.written else {}
        shapes = {name: self.specs[name].shape for name in self.written & self.specs.keys() & found.keys()}
        return {name: [([0] * len(shape), shape, found[name])] for name, shape in shapes.items()}

    def get_all(self, device: torch.device | str) -> dict[str, Tensor]:
        """Every tensor, on `device`; on the CPU they lie in the files, each mapped once: Linux allows 65,530 mappings,
        and mixtures have more tensors."""
        if torch.device(device).type == "cpu":
            self._mapped = {path: self._map_file(path, size) for path, (size, _) in self._stamps.items()}
        try:
            return read_all(self.get, self.specs, device)
        finally:
            self._mapped = {}


def same_spec(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have one shape and one dtype."""
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def read_all(
    get: Callable[[str], Tensor], specs: Mapping[str, Tensor], device: torch.device | str
) -> dict[str, Tensor]:
    """The tensors of `specs`, which `get` reads on the CPU, on `device`. Several threads copy them to a GPU, so that
    the CPU holds few of them at a time."""
    largest_first = sorted(specs, key=lambda name: -specs[name].nbytes)  # so that the threads end together
    with ThreadPoolExecutor(THREADS) as threads:
        tensors = threads.map(lambda name: get(name).to(device), largest_first)
        found = dict(zip(largest_first, tensors, strict=True))
    return {name: found[name] for name in specs}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _read_header(path: Path) -> tuple[dict[str, tuple[int, Tensor]], bool]:
    """The first byte of each tensor of a file, and its like on the meta device; and whether Octavo wrote the file."""
    open_file(path)  # safetensors checks the header
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(size), str(path), ArtifactError)
    by_octavo = "octavo_version" in (header.pop("__metadata__", None) or {})
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in _BY_NAME:
            raise ArtifactError(
                f"{path}: {name} has the dtype {entry['dtype']}, and {', '.join(_BY_NAME)} are read: convert it first"
            )
        spec = torch.empty(entry["shape"], dtype=_BY_NAME[entry["dtype"]], device="meta")
        found[_as_parameter(name)] = (8 + size + entry["data_offsets"][0], spec)
    return found, by_octavo


def _indexed(folder: Path, stem: str) -> dict[str, Path]:
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
    for name in map(str, weights.values()):
        if len(PurePosixPath(name).parts) != 1 or "\\" in name or name in ("", ".", ".."):
            raise ArtifactError(f"{index} names {name!r}: its files must lie in the folder itself")
    return {_as_parameter(tensor): folder / str(name) for tensor, name in weights.items()}


def _as_parameter(name: str) -> str:
    """The name of a tensor; of the data and the scale of a Float8Tensor of torchao, those that other writers give."""
    return re.sub(r"\._weight_(?:qdata|(scale))$", lambda part: f".weight_{part[1]}" if part[1] else ".weight", name)


def write_shards(
    folder: Path, specs: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Write `tensors` (name and data of each, once, in any order) as one file, or as several of at most SHARD_BYTES (or
    one tensor) and an index; return the checksum of each. `specs` has their shapes and dtypes. A ValueError if one has
    others, or does not come."""
    places = create_files(folder, "model", specs, metadata)
    waiting, checksums = dict(specs), {}
    with ExitStack() as stack:
        files = {file: stack.enter_context((folder / file).open("r+b")) for file in {at.file for at in places.values()}}
        for name, tensor in tensors:
            spec = waiting.pop(name, None)
            if spec is None or not same_spec(spec, tensor):
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} came, {spec} was to come, once")
            checksums[name] = write_part(files[places[name].file], places[name], tensor, [0] * tensor.ndim)
        if waiting:
            raise ValueError(f"{len(waiting)} tensors did not come, {next(iter(waiting))} among them")
    return checksums


@dataclass(frozen=True)
class Place:
    """Where a tensor of the shape `shape` lies: the name of its file, and its first byte there."""

    file: str
    start: int
    shape: tuple[int, ...]


def create_files(folder: Path, stem: str, specs: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Place]:
    """Make the files of `specs`, with their headers and space for all data, and their index if they are several. Return
    the place of each tensor, to be filled by `write_part`."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    count, places = len(shards), dict[str, Place]()
    for i, shard in enumerate(shards):
        file = f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}"
        places |= _create_file(folder / file, shard, metadata)
    if count > 1:
        size = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": size}, "weight_map": {name: places[name].file for name in sorted(specs)}}
        (folder / f"{stem}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")
    return places


def write_part(file: BinaryIO, place: Place, part: Tensor, offsets: Sequence[int]) -> str:
    """Write a rectangular part of the tensor at `place`, from `offsets` on, to its open file; return its checksum."""
    part = part.detach().cpu().contiguous()
    data, itemsize = bytes_of(part), part.element_size()
    # All after the last dimension that is cut lies in one run of bytes, and so do the rows of that dimension.
    cut = max((d for d, size in enumerate(part.shape) if size != place.shape[d]), default=0)
    length = part.shape[cut:].numel()
    strides = [torch.Size(place.shape[d + 1 :]).numel() for d in range(part.ndim)]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for run, index in enumerate(product(*map(range, part.shape[:cut]))):
        start = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        file.seek(place.start + start * itemsize)
        file.write(data[run * length * itemsize : (run + 1) * length * itemsize])
    return checksum(part)


def _create_file(path: Path, specs: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Place]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name], end = end, end + spec.nbytes
        offsets = [starts[name], end]
        header[name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        data = file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data + end)
    return {name: Place(path.name, data + start, specs[name].shape) for name, start in starts.items()}


# ---- Checksums of tensors in files, which find a flipped bit without the model's source; checks of their numbers.
#
# The writer counts the CRC-32 of each part of a tensor that it writes. A reader checks each such part that it reads
# whole, unless another program has written the file since.
#
#     octavo.json of a model folder     "checksums": {NAME: CRC-32}
#     checksums.json of a checkpoint    {STEM/NAME: [[offsets, sizes, CRC-32], ...]}, a part of each rank


CHECKSUMS, RECORD = "checksums.json", "octavo.json"


def read_record(folder: Path) -> dict[str, Any]:
    """octavo.json of a folder (docs/format.md); {} without one."""
    return read_json(folder / RECORD) if (folder / RECORD).is_file() else {}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU that is contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def checksum(tensor: Tensor) -> str:
    """The CRC-32 of the bytes of a tensor on the CPU, row by row, in hexadecimal."""
    return f"{zlib.crc32(bytes_of(tensor.contiguous())):08x}"


def is_finite(tensor: Tensor) -> Tensor:
    """True if a tensor holds neither inf nor NaN: bool, of no dimension, on its device."""
    if tensor.dtype == torch.float8_e4m3fn and tensor.numel():  # no inf in this format, and one NaN of either sign
        return (tensor.view(torch.uint8) & 0x7F).max() < 0x7F
    if not tensor.numel():  # such as a matrix of MobileBERT, for an embedding as wide as its layers
        return torch.tensor(True, device=tensor.device)
    least, largest = torch.aminmax(tensor)  # several times as fast as `isfinite`, and without a copy
    return least.isfinite() & largest.isfinite()


def failing(checks: Mapping[str, Tensor]) -> list[str]:
    """The names of the checks that are False. The host waits once for the device, which has all of them."""
    results = torch.stack([*checks.values()]).tolist() if checks else []
    return [name for name, holds in zip(checks, results, strict=True) if not holds]
