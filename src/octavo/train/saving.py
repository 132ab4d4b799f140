"""Checkpoints: the state from which a run continues bit for bit, as safetensors and JSON files.

The files have whole tensors, however many ranks wrote them, and any number of ranks loads them: each rank reads its
parts. The data needs no state: batch i depends only on i and the seed (`octavo.train.loss`).
"""

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from octavo.checkpoint import files
from octavo.checkpoint import folder as folders
from octavo.checkpoint.files import ArtifactError, ShardReader, check_match, is_finite
from octavo.checkpoint.folder import ADAPTER_CONFIG, ADAPTERS, PEFT_PREFIX, WEIGHTS, RunFolder, WriteError
from octavo.nn.parallel_weights import first_indices, local_part
from octavo.scales import cast_once, load_scale_state, scale_state
from octavo.train.host_masters import HostMasters
from octavo.train.optimizer import optimizer_state
from octavo.train.processes import pin, rank, same_outcome, unpin, world_size
from octavo.train.settings import read_settings
from octavo.util import check_kinds
from octavo.version import __version__

_DESCRIBED = {"step": int, "skipped_steps": int, "fingerprint": str, "tokens": int | None, "scaler": dict}  # train.json


@dataclass
class TrainState:
    """The state that training changes and a checkpoint saves, sharded or not. `step` counts the steps that are done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    fingerprint: str
    step: int = 0
    skipped_steps: int = 0
    tokens: int = 0  # read so far
    hosted: HostMasters | None = None  # of a run with optimizer.masters = "host"

    def on_device(self, *, beside: bool = False) -> AbstractContextManager[None]:
        """Within the block the model computes. `beside` is that of `HostMasters.on_device`."""
        return nullcontext() if self.hosted is None else self.hosted.on_device(beside)

    def cast_once(self) -> AbstractContextManager[None]:
        """Within the block each weight is cast once a step. With masters on the host the device has the bytes."""
        return cast_once(self.model) if self.hosted is None else nullcontext()


def open_checkpoint(folder: Path, model: nn.Module, fingerprint: str) -> tuple[Mapping[str, Any], list[ShardReader]]:
    """The contents of train.json in a checkpoint, and the readers of its weights, its moments and the rest. An
    ArtifactError if the checkpoint is truncated, of another model (on any device), or of other data."""
    described = _read_description(folder)
    if described["fingerprint"] != fingerprint:
        raise ArtifactError(
            f"the data is not what {folder} was trained on: pass the same --data and --validation-fraction"
        )
    return described, [_open_weights(folder, model), _open(folder, "optimizer"), _open(folder, "state")]


def load_checkpoint(folder: Path, state: TrainState, *, other_recipe: bool = False) -> None:
    """Restore `state` from a checkpoint, on every rank. All but the numbers is checked before anything is changed. With
    `other_recipe` the checkpoint may be of a run with any recipe, and its weights, moments and step are restored. A
    scale history is restored where both recipes have it; the first step of another scales dynamically."""
    with same_outcome():
        described, (weights, optimizer, rest) = open_checkpoint(folder, state.model, state.fingerprint)
        moments = optimizer_state(state.model, state.optimizer)
        where = f"{folder / 'optimizer.safetensors'} is of another model, optimizer.state or parallel.tp"
        check_match(optimizer.specs, moments, where)
        saved = rest.get_all("cpu")
        if other_recipe:
            histories = scale_state(state.model)
            scales = {name: saved.get(name, tensor) for name, tensor in histories.items()}
            if any(scales[name].shape != tensor.shape for name, tensor in histories.items()):
                scales = histories
        else:
            scales = _check_scales(folder, saved, state.model)
            found = {name: state for name, state in saved.items() if name == "random.cpu"}
            where = f"{folder / 'state.safetensors'} has no random state of this machine"
            check_match(found, {"random.cpu": torch.get_rng_state()}, where)
    with same_outcome():
        _read_into(saved_weights(state.model), weights)
        load_scale_state(state.model, scales)
        _read_into(moments, optimizer)
    state.step, state.skipped_steps = described["step"], described["skipped_steps"]
    tokens = described.get("tokens")  # which an older version did not write
    state.tokens = state.step * read_settings(RunFolder(folder.parent)).step_tokens if tokens is None else tokens
    if other_recipe:
        return
    if described["scaler"]:  # empty if it was off: the run may go on in FP16 all the same
        state.scaler.load_state_dict(described["scaler"])
    restore_random_state(saved, state.device, state.step)


@torch.no_grad()
def disturb_weights(model: nn.Module, share: float, seed: int) -> None:
    """Multiply each weight by 1 + `share` * a normal number, the same ones on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for p in (p for p in model.parameters() if p.requires_grad):
        part = local_part(p)
        places = tuple(slice(first, first + count) for first, count in zip(first_indices(p), part.shape, strict=True))
        part.mul_(1 + share * torch.randn(p.shape, generator=generator)[places].to(part.device))


def load_model(folder: Path, model: nn.Module) -> None:
    """Restore the weights and the scale histories of a converted model from a checkpoint, without an optimizer."""
    weights, saved = _open_weights(folder, model), _open(folder, "state").get_all("cpu")
    scales = _check_scales(folder, saved, model)
    _read_into(saved_weights(model), weights)
    load_scale_state(model, scales)


def has_finite_weights(folder: Path) -> bool:
    """True if every weight of a checkpoint is finite; False if one is not, or the checkpoint cannot be read."""
    try:
        reader = _open(folder, folders.weights_stem(folder))
    except ArtifactError:
        return False
    return all(bool(is_finite(reader.get(name))) for name, spec in reader.specs.items() if spec.dtype.is_floating_point)


def _read_into(tensors: Mapping[str, Tensor], reader: ShardReader) -> None:
    """Fill `tensors` in place, of a DTensor the part that this rank holds. An ArtifactError if one has inf or NaN."""

    @torch.no_grad()
    def fill(name: str) -> None:
        tensor, offsets = local_part(tensors[name]), first_indices(tensors[name])
        if tensor.numel():  # a parameter with fewer rows than there are ranks
            part = reader.get_part(name, offsets, tensor.shape)
            if part.is_floating_point() and not is_finite(part):
                earlier = "Take an earlier checkpoint (--step); to resume from it, move this folder out of the run"
                raise ArtifactError(
                    f"{reader.folder}: {name} holds inf or NaN: the run had diverged by then. "
                    + _or_anew(reader.folder, earlier)
                )
            tensor.copy_(part)

    with futures.ThreadPoolExecutor(files.THREADS) as threads:
        list(threads.map(fill, tensors))


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Turn an error of the block into one which says that the checkpoint is not whole, and what to do."""
    try:
        yield
    except (FileNotFoundError, ArtifactError) as error:
        raise ArtifactError(
            f"the checkpoint {folder} is not whole: {error}. "
            + _or_anew(folder, "Move that folder out of the run to resume from the one before it")
        ) from error


def _or_anew(folder: Path, remedy: str) -> str:
    """`remedy` where the run has an earlier checkpoint, which it takes."""
    has_earlier = any(path.name < folder.name for path in RunFolder(folder.parent).checkpoints())
    return remedy if has_earlier else "The run has no earlier one: start it again in another folder"


def _open(folder: Path, stem: str) -> ShardReader:
    with _whole(folder):
        return ShardReader(folder, stem)


def _open_weights(folder: Path, model: nn.Module) -> ShardReader:
    """The weights of a checkpoint; an ArtifactError if they are not those that `model` has saved, or would save."""
    stem = folders.weights_stem(folder)
    if stem != _stem(model):
        held = "adapters alone" if stem == ADAPTERS else "all weights of a model"
        raise ArtifactError(f"the checkpoint {folder} holds {held}: keep the setting lora of its run")
    weights = _open(folder, stem)
    check_match(weights.specs, saved_weights(model), f"{folder / stem}.safetensors is of another model")
    return weights


def _check_scales(folder: Path, saved: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    scales = {name: tensor for name, tensor in saved.items() if not name.startswith(PREFIX)}
    remedy = f"a run goes on with its recipe, and a branch with any (octavo train --branch {folder} --recipe NAME)"
    check_match(scales, scale_state(model), f"{folder / 'state.safetensors'} is of another recipe; {remedy}")
    return scales


def _read_description(folder: Path) -> Mapping[str, Any]:
    path = folder / "train.json"
    with _whole(folder):
        described = files.read_json(path)
        check_kinds(described, _DESCRIBED, f"{path}: ", ArtifactError)
    if folder.name != (named := RunFolder(folder.parent).checkpoint(described["step"]).name):
        raise ArtifactError(
            f"{path} says that it is of step {described['step']}, whose folder is {named}: one of the two was changed, "
            "so give the folder its name, or move it out of the run"
        )
    return described


# ---- A copy of the state of a run in the memory of the CPU, for writing it while the run goes on.


class HostCopy(DefaultSavePlanner):
    """A copy of tensors by name, of a DTensor of the part that this rank holds, and the planner that writes it. It
    plans by the shapes and placements of the tensors of the run. The memory is as large as the tensors, and stays for
    the next copy. For tensors on a GPU it is pinned, so that they are copied as fast as the bus allows."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies: dict[str, Tensor] = {}
        self._pinned: list[Tensor] = []

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, and wait until they are copied. Names, shapes and dtypes must be those of the first call."""
        for name, tensor in tensors.items():
            local = local_part(tensor)
            if name not in self._copies:
                copy = self._copies[name] = torch.empty(local.shape, dtype=local.dtype)
                if local.is_cuda and copy.numel():
                    self._pinned.append(pin(copy))
            self._copies[name].copy_(local, non_blocking=True)
        for device in {local.device for local in map(local_part, tensors.values()) if local.is_cuda}:
            torch.cuda.synchronize(device)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]

    def close(self) -> None:
        """Give the memory back."""
        for copy in self._pinned:
            unpin(copy)
        self._pinned, self._copies = [], {}


# ---- The weights of a checkpoint: all, or the adapters around frozen ones, in the files that PEFT opens.


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint holds, by their names there."""
    tensors = files.model_tensors(model)
    adapters = {name: t for name, t in tensors.items() if ".lora_" in name}
    return {f"{PEFT_PREFIX}{name.replace('.default.', '.')}": t for name, t in adapters.items()} or tensors


def adapter_config(model: Any) -> dict[str, str]:
    """The content of adapter_config.json by its name; nothing for a model without adapters."""
    if _stem(model) != ADAPTERS:
        return {}
    described = model.peft_config["default"].to_dict() | {"inference_mode": True}
    return {ADAPTER_CONFIG: json.dumps(described, indent=2, sort_keys=True, default=sorted) + "\n"}


def _stem(model: nn.Module) -> str:
    return ADAPTERS if any(".lora_" in name for name, _ in model.named_parameters()) else WEIGHTS


# ---- A storage of torch.distributed.checkpoint (DCP) whose files are plain safetensors files.
#
# DCP's own writers give each rank files of its own, which only DCP reads, or join these files afterwards, which writes
# every byte twice. Here the coordinator makes each file with its header and space for all data, and every rank writes
# its parts of the tensors to their places. So the files do not depend on the number of ranks, and everything that opens
# safetensors files opens them, DCP's `HuggingFaceStorageReader` included. All ranks must see one file system that lets
# several processes write different bytes of a file.


class SafetensorsWriter(StorageWriter, ExitStack):
    """Writes tensors named STEM/NAME to the files STEM.safetensors of the folder `target`, which appears whole or not
    at all, beside `texts` (name -> content).

    It is a context manager around `dcp.save`: if the save fails, the partial folder is removed.
    """

    def __init__(self, target: Path, texts: Mapping[str, str]) -> None:
        super().__init__()
        self.target, self._texts = target, texts

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.enter_context(folders.whole_folder(self.target))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files on the coordinator, and tell each rank the places of its tensors."""
        specs: dict[str, dict[str, Tensor]] = {}
        items: list[Any] = sorted((item for plan in plans for item in plan.items), key=lambda item: item.index.fqn)
        for item in items:
            stem, _, name = item.index.fqn.partition("/")
            whole = item.tensor_data
            specs.setdefault(stem, {})[name] = torch.empty(whole.size, dtype=whole.properties.dtype, device="meta")
        folder, about = folders.partial_folder(self.target), {"format": "pt", "octavo_version": __version__}
        places = {
            f"{stem}/{name}": place
            for stem, each in specs.items()
            for name, place in files.create_files(folder, stem, each, about).items()
        }
        return [
            replace(plan, storage_data={item.index.fqn: places[item.index.fqn] for item in plan.items})
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of this rank, and flush them to the disk."""
        places: dict[str, files.Place] = plan.storage_data
        by_file: list[Any] = sorted(plan.items, key=lambda item: places[item.index.fqn].file)
        results = []
        for name, items in groupby(by_file, key=lambda item: places[item.index.fqn].file):
            with (folders.partial_folder(self.target) / name).open("r+b") as file:
                for item in items:
                    part: Any = planner.resolve_data(item)
                    offsets = item.tensor_data.chunk.offsets
                    checksum = files.write_part(file, places[item.index.fqn], part, offsets)
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
        for name, content in {**self._texts, files.CHECKSUMS: json.dumps(parts)}.items():
            (folders.partial_folder(self.target) / name).write_text(content)
        self.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one folder."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


# ---- Writing the checkpoints of a run while it trains on.


_PATIENCE = timedelta(hours=1)  # of the ranks that have written for the slowest


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints in a thread, with torch.distributed.checkpoint, each whole or not at all; `keep` of them stay.

    Every rank must make it, and call `save` at the same steps. As a context manager it waits for the last checkpoint.
    Raises a WriteError, on all ranks, if one of them cannot write in the folder of the run.
    """

    def __init__(self, run: RunFolder, keep: int) -> None:
        self.run, self.keep = run, keep
        # A group of its own: its messages must not meet those of the thread that trains.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if world_size() > 1 else None
        self._copy = HostCopy()
        self._pending: futures.Future[None] | None = None
        # Each rank writes a part of a checkpoint: learn now, and not after many steps.
        with same_outcome(), folders.writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=run.path).close()
        if rank() == 0:
            for leftover in run.path.glob(".step-*.partial"):  # of a run that was killed while it saved
                shutil.rmtree(leftover)
            for lock in run.path.glob(".step-*.lock"):
                lock.unlink()

    def save(self, state: TrainState) -> float:
        """Begin to write the checkpoint of `state.step`. Returns the seconds it waited for the one before."""
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        stems = {
            _stem(state.model): saved_weights(state.model),
            "optimizer": optimizer_state(state.model, state.optimizer),
            "state": random_state(state.device) | scale_state(state.model),
        }
        tensors = {f"{file}/{name}": t.detach() for file, found in stems.items() for name, t in found.items()}
        self._copy.update(tensors)
        described = {name: getattr(state, name) for name in _DESCRIBED} | {"scaler": state.scaler.state_dict()}
        texts = {"train.json": json.dumps(described, indent=2) + "\n"} | adapter_config(state.model)
        target = self.run.checkpoint(state.step)
        self._pending = _in_background(lambda: self._write(target, tensors, texts))
        return waited

    @property
    def failed(self) -> bool:
        """True if the last checkpoint could not be written: `wait` then raises its error."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises the WriteError of `save`."""
        if self._pending is not None:
            futures.wait([self._pending])  # a signal that comes meanwhile leaves it pending
            pending, self._pending = self._pending, None
            pending.result()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.wait()
            elif self._pending is not None and isinstance(error, Exception):  # a second signal stops at once
                futures.wait([self._pending], 600)  # seconds: another rank may be lost
        finally:
            if self._pending is None or self._pending.done():
                self._copy.close()

    def _write(self, target: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
        try:
            with SafetensorsWriter(target, texts) as writer:
                # `save` would warn in a single process that there are no others.
                _save_state_dict(tensors, writer, self._group, no_dist=self._group is None, planner=self._copy)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]  # the first failure of a rank
            if isinstance(cause, WriteError):
                raise cause from error
            if isinstance(cause, OSError):
                raise folders.write_error(target, cause) from error
            raise RuntimeError(f"could not write {target}: {type(cause).__name__}: {cause}") from error
        if rank() == 0:
            for old in self.run.checkpoints()[: -self.keep]:
                folders.remove_folder(old)


def _in_background(call: Callable[[], None]) -> futures.Future[None]:
    """Start a call in a thread, which does not keep the process alive: a lost rank would never answer it."""
    done: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return done


# ---- The states of torch's random generators on every rank, as tensors in a checkpoint.


PREFIX = "random."  # of the names; rank 0 has random.cpu and random.cuda, rank 1 random.cpu.1 and random.cuda.1


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this rank: of the CPU's generator, and of the GPU's if `device` is one."""
    state = {_name("cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        state[_name("cuda")] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(saved: Mapping[str, Tensor], device: torch.device, step: int) -> None:
    """Set the generators of this rank. A run of a CPU may continue on a GPU, for which it has no state."""
    if sum(name.startswith(f"{PREFIX}cpu") for name in saved) != world_size():  # then each rank seeds its own anew
        digest = hashlib.sha256(f"{torch.initial_seed()} {step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7]))
        return
    torch.set_rng_state(saved[_name("cpu")])
    if device.type == "cuda" and _name("cuda") in saved:
        torch.cuda.set_rng_state(saved[_name("cuda")], device)


def _name(kind: str) -> str:
    return f"{PREFIX}{kind}" + (f".{rank()}" if rank() else "")
