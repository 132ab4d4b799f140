"""A folder that appears whole or not at all, the files of a model that are copied into it, and the folder of a run.

All files are written to a hidden folder beside it, flushed to the disk, and renamed. So every reader sees a whole
folder. After a full disk or a kill only the hidden folder is left, and the next writer removes it. One program at a
time writes a folder.
"""

import errno
import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath

from octavo.checkpoint.files import RECORD, SUFFIX, ArtifactError, check_path, read_json, replace_file
from octavo.util import build, hub_hint, reading

# ---- A folder, of a run or of output, has one writer at a time; one of output appears whole or not at all.
#
# The lock of FOLDER is the file .FOLDER.lock beside it, held with flock(2) and removed at the end. The operating system
# gives the lock up when its program ends, however it ends, so the file that a killed program leaves behind locks
# nothing. The file says who holds the lock.


_PATIENCE = 0.1  # seconds: `check_absent` of another program holds the lock for an instant


class LockedError(RuntimeError):
    """Another program, or another part of this one, writes to the folder; the message says which."""


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which need not exist. A LockedError if another program, or another part of this one,
    holds it for longer than 0.1 s; a WriteError if the system refuses to write."""
    _check_place(folder)
    path, patience = _lock_file(folder), time.monotonic() + _PATIENCE
    descriptor: int | None = None
    while descriptor is None:
        try:
            with writing(folder):
                descriptor = _attempt(folder, path)
        except LockedError:
            if time.monotonic() > patience:
                raise
            time.sleep(_PATIENCE / 5)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is given up: afterwards the file may be another holder's
        os.close(descriptor)


def _attempt(folder: Path, path: Path) -> int | None:
    """The descriptor of the locked file; None if its last holder removed the file meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with ExitStack() as unless_held:
        unless_held.callback(os.close, descriptor)
        _lock(descriptor, folder)
        if not _is_file(descriptor, path):
            return None
        os.ftruncate(descriptor, 0)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": since}
        os.write(descriptor, json.dumps(holder).encode())
        unless_held.pop_all()
    return descriptor


def _lock_file(folder: Path) -> Path:
    folder = Path(os.path.realpath(folder))  # a link to a run is another name of it
    return folder.parent / f".{folder.name}.lock"


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _describe(os.read(descriptor, 1 << 16))
        raise LockedError(
            f"{folder} is in use: {holder} writes to it. Wait until that has ended, or choose another folder"
        ) from None


def _is_file(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samefile(descriptor, path)
    return False


def _describe(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} ({holder['command']}), since {holder['since']},"
    except (ValueError, KeyError, TypeError):
        return "another program"  # it has only just taken the lock


class WriteError(RuntimeError):
    """A folder could not be written. Whatever existed there before is unchanged."""


def check_absent(target: Path) -> None:
    """Check, before long work begins, that `target` can be written. A FileExistsError if it exists, a LockedError if
    another program writes it."""
    _check_new(target)
    with suppress(OSError), _lock_file(target).open("r+b") as file:  # there is none where nobody writes
        _lock(file.fileno(), target)


def partial_folder(target: Path) -> Path:
    """The hidden folder that `whole_folder` writes before it becomes `target`."""
    return target.parent / f".{target.name}.partial"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` when the block ends without an error. Raises the errors of
    `check_absent`, and a WriteError if the disk is full, or refused the write for another reason."""
    _check_new(target)
    partial = partial_folder(target)
    with locked_folder(target):
        _check_new(target)  # the last holder of the lock may have made it
        try:
            shutil.rmtree(partial, ignore_errors=True)
            with writing(target):
                partial.mkdir()
                yield partial
                for path in (*(path for path in sorted(partial.rglob("*")) if path.is_file()), partial):
                    _flush_entry(path)
                partial.rename(target)
                _flush_entry(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder that is, until then, whole or not there."""
    hidden = partial_folder(folder)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """In this block, an OSError becomes the WriteError of `path`."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a write to `path` that the system refused. Its message says why and what to do."""
    too_large = error.errno == errno.EFBIG
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "requested and" in str(error):  # so says numpy
        existing = next(parent for parent in Path(os.path.abspath(path)).parents if parent.exists())
        free, limit = shutil.disk_usage(existing).free, resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        too_large = error.errno is None and 0 <= limit < free  # -1: no limit
        reason = f"the disk is full ({free / 1e6:.0f} MB are free there): make room"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        reason = f"that place cannot be written ({error.strerror}): choose another"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        reason = f"a part of that path is a file, not a folder ({error.strerror}): choose another"
    else:
        reason = str(error)
    if too_large:
        reason = f"{os.strerror(errno.EFBIG)}: raise the limit of this shell (ulimit -f)"
    return WriteError(f"could not write {path}: {reason}; nothing that existed was changed")


def _check_new(target: Path) -> None:
    _check_place(target)
    if target.exists():
        raise FileExistsError(f"{target} exists already: choose another folder")


def _check_place(target: Path) -> None:
    target = Path(os.path.abspath(target))
    check_path(target)
    if run := next(filter(None, map(run_of, target.parents)), None):
        raise ArtifactError(
            f"{target} would lie in a checkpoint of the run {run}, which removes those it does not keep: choose "
            "another place"
        )


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- The files of a model folder that are neither its config.json nor its tensors, copied to another folder.
#
# These are the tokenizer, the generation settings and the licence, which many models require to go with the weights. A
# sentence-transformers folder also has modules that follow the model: modules.json names a folder for each (1_Pooling,
# 2_Dense, ...), which may hold tensors. transformers writes chat templates beside the first one in a folder, too.


_DESCRIBES = re.compile(
    r"\.(json|txt|model|jinja|spm|tiktoken)$|(?i:licen[cs]e|notice|copying|use.policy|terms.of).*(?<!\.py)$"
)
_NOT_COPIED = ("config.json", RECORD, "adapter_config.json", "hf_quant_config.json")  # layouts have the last
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MODULES, CARD, TEMPLATES = "modules.json", "README.md", "additional_chat_templates"


def check_links(folder: Path) -> None:
    """Raise an ArtifactError if a file that describes a model, or one of its tensors, is a link out of `folder`.

    A folder from elsewhere could otherwise bring a private file of this machine into what users publish. A snapshot in
    the cache of the Hugging Face hub is made of links to the blobs of its repository.
    """
    for path in sorted(folder.iterdir()):
        if _DESCRIBES.search(path.name) or path.suffix == SUFFIX:
            _check_link(path, folder)


def read_card(folder: Path) -> tuple[str, str]:
    """The model card of a folder: its front matter, which is YAML between lines of three dashes, and the text below.
    Either may be "". An ArtifactError if the card is a link out of `folder`."""
    path = folder / CARD
    if not path.is_file():
        return "", ""
    _check_link(path, folder)
    text = path.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n.*?\n---\n", text, re.DOTALL)
    return (front[0], text[front.end() :]) if front else ("", text)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _check_link(path: Path, folder: Path) -> None:
    home, found = folder.resolve(), path.resolve()
    blobs = [home.parents[1] / "blobs"] if home.parent.name == "snapshots" else []
    if not any(found.is_relative_to(inside) for inside in (home, *blobs)):
        raise ArtifactError(
            f"{path} must be a file of the folder itself; it is a link to {found}, and what is made of the folder "
            "would hold that file: if it belongs to the model, put a copy in the place of the link"
        )


def copy_description(source: Path, target: Path) -> None:
    """Copy the files of a model folder that are neither config.json nor tensors of the model. Raises the errors of
    `described_files`."""
    for path in described_files(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def described_files(folder: Path) -> list[Path]:
    """The files that `copy_description` copies. An ArtifactError if a file is a link out of `folder` (`check_links`),
    or if modules.json is damaged or names a folder outside of it. Also if a module has its tensors in a pickle."""
    check_links(folder)
    named = (path for path in sorted(folder.iterdir()) if path.is_file() and _DESCRIBES.search(path.name))
    found = [path for path in named if path.name not in _NOT_COPIED and not path.name.endswith(".index.json")]
    for module in _modules(folder):
        files = [path for path in sorted(module.rglob("*")) if path.is_file()]
        pickles = [path for path in files if path.suffix in _PICKLES]
        if pickles and not any(path.suffix == SUFFIX for path in files):
            raise ArtifactError(
                f"{pickles[0]} is a pickle, which can run code and is not copied: save the model with safetensors "
                "(sentence-transformers' save does)"
            )
        found += [path for path in files if path not in pickles]
    return found


def _modules(source: Path) -> Iterator[Path]:
    """The folders that are copied: of the modules, and of further chat templates."""
    listed, names = source / MODULES, [TEMPLATES]
    if listed.is_file():
        with reading(listed, "a list of modules, each with a path", ArtifactError):
            names += [str(module["path"]) for module in json.loads(listed.read_text(encoding="utf-8"))]
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ArtifactError(f"{listed} names {name!r}: the folders of modules must lie in the folder itself")
        # The model itself lies in "", and a module without settings, such as Normalize, may have no folder.
        if PurePosixPath(name).parts and (source / name).is_dir():
            for path in (source / name, *(source / name).rglob("*")):
                _check_link(path, source)
            yield source / name


# ---- The folder of a training run.
#
# RUN/
#   config.json              the settings, as `octavo.train.config.Config` gives them
#   model/                   config.json and tokenizer in Hugging Face's terms
#   metrics.jsonl            one JSON object a line
#   actions.json             promoted layers and rollbacks (`octavo.train.supervision`), once there are any
#   watch/                   samples of the layers' operands (`octavo.watching.storage`)
#   step-00000100/           a checkpoint: appears whole or not at all (its files: "Checkpoints" in docs/distributed.md)
#
# Of a run with `lora` the weights of a checkpoint are adapters, adapter_model.safetensors and adapter_config.json, as
# PEFT opens them.


WEIGHTS, ADAPTERS = "model", "adapter_model"  # the files of weights, without their suffix
ADAPTER_CONFIG, PEFT_PREFIX = "adapter_config.json", "base_model.model."  # the prefix is of the names of adapters
BUILT_IN_MODELS = ("llama", "gpt2", "mixture")  # what the settings of a run call Octavo's own models
RUN_OR_MODEL = "a run of octavo train, or a Hugging Face model folder"


@dataclass(frozen=True)
class Promotion:
    """From `step` on, a layer runs in BF16 ("bf16"), or with gradients in e5m2 ("e5m2"), because of a rule."""

    step: int
    layer: str
    to: str
    rule: str


@dataclass(frozen=True)
class Rollback:
    """At `step` the run went back to step `to`. The next batches begin at `batch`, counted in steps."""

    step: int
    to: int
    batch: int


@dataclass
class Actions:
    """The promoted layers of a run and its returns to a checkpoint, oldest first.

    actions.json stands beside the checkpoints, not in them. So a run that is resumed from any of them keeps its
    promoted layers, and does not read the batches again that it has skipped.
    """

    promotions: list[Promotion] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)

    def batch(self, step: int) -> int:
        """The batch, counted in steps, of the step after `step` others."""
        for rollback in reversed(self.rollbacks):
            if rollback.to <= step:
                return rollback.batch + step - rollback.to
        return step


@dataclass
class RunFolder:
    """The paths in the folder of a run."""

    path: Path

    def __post_init__(self) -> None:
        self.config, self.model, self.metrics = (self.path / name for name in ("config.json", "model", "metrics.jsonl"))

    @property
    def has_model(self) -> bool:
        """True if the folder holds the description of a run's model, which no other kind of folder does."""
        return (self.model / "config.json").is_file()

    def read_actions(self) -> Actions:
        """The actions in actions.json; none if there is no such file. An ArtifactError if it is damaged."""
        path = self.path / "actions.json"
        if not path.is_file():
            return Actions()
        found = read_json(path)
        with reading(path, "a list of promotions and rollbacks", ArtifactError):
            return Actions(
                [build(Promotion, each) for each in found["promotions"]],
                [build(Rollback, each) for each in found["rollbacks"]],
            )

    def write_actions(self, actions: Actions) -> None:
        """Replace actions.json."""
        with writing(self.path):
            replace_file(self.path / "actions.json", json.dumps(asdict(actions), indent=2) + "\n")

    def promoted(self, step: int) -> dict[str, str]:
        """The layers that the run had moved to BF16 by `step`, and why."""
        return {
            action.layer: f"training moved it to BF16 at step {action.step} ({action.rule})"
            for action in self.read_actions().promotions
            if action.to == "bf16" and action.step <= step
        }

    def checkpoint(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """All checkpoints, oldest first."""
        found = [path for path in self.path.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
        return sorted(found, key=self.step_of)

    def step_of(self, checkpoint: Path) -> int:
        return int(checkpoint.name.removeprefix("step-"))

    def chosen(self, step: int | None) -> Path:
        """The checkpoint of `step`; None takes the newest. An ArtifactError if it is not there."""
        newest = self.newest()
        if step is None:
            return newest
        if self.checkpoint(step) not in self.checkpoints():
            kept = ", ".join(str(self.step_of(path)) for path in self.checkpoints())
            raise ArtifactError(f"{self.path} has no checkpoint of step {step}: it keeps {kept}")
        return self.checkpoint(step)

    def check(self) -> None:
        """Raise an ArtifactError unless the folder is that of a run."""
        refuse_checkpoint(self.path)
        required = {
            f"there is no folder {self.path}": self.path.is_dir(),
            f"{self.path} is no run of octavo train: it has no config.json": self.config.is_file(),
            f"{self.path} is a model folder, not a run of octavo train": self.has_model,
        }
        if wrong := next((text for text, right in required.items() if not right), ""):
            raise ArtifactError(f"{wrong}: give the folder that octavo train wrote")

    def newest(self) -> Path:
        """The newest checkpoint. An ArtifactError if there is none, or if the folder is not that of a run."""
        self.check()
        if not self.checkpoints():
            raise ArtifactError(
                f"the run {self.path} has no checkpoint: it ended before its first one. Start it again in another "
                "folder"
            )
        return self.checkpoints()[-1]


def weights_stem(checkpoint: Path) -> str:
    """The name of the file of weights in a checkpoint, without its suffix."""
    return ADAPTERS if (checkpoint / ADAPTER_CONFIG).is_file() else WEIGHTS


def check_config(folder: Path, wanted: str) -> None:
    """Raise a FileNotFoundError, which says to give `wanted`, unless `folder` is a folder with a config.json. An
    ArtifactError, which says to give the run, for a checkpoint."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give {wanted}{hub_hint(folder)}")
    refuse_checkpoint(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give {wanted}")


def run_of(checkpoint: Path) -> Path | None:
    """The run that a folder is a checkpoint of; None for another folder."""
    found = os.path.isfile(checkpoint / "train.json") and RunFolder(checkpoint.parent).has_model
    return checkpoint.parent if found else None


def refuse_checkpoint(folder: Path) -> None:
    """Raise an ArtifactError if a folder that should be a run or a model is a checkpoint of a run."""
    if run := run_of(folder):
        choice = "A checkpoint is chosen by --step NUMBER, and in octavo train by --branch"
        raise ArtifactError(f"{folder} is a checkpoint of the run {run}: give {run}. {choice}")


def refuse_run(folder: Path) -> None:
    """Raise an ArtifactError if a folder that should be packed is a run, or a checkpoint of one."""
    checkpoint_of = run_of(folder)
    run = checkpoint_of or folder
    if RunFolder(run).has_model:
        kind = f"a checkpoint of the run {run}" if checkpoint_of else "a run of octavo train"
        raise ArtifactError(
            f"{folder} is {kind}, not a packed folder: octavo pack {run} PACKED makes one of it, and octavo report "
            f"{run} shows what FP8 did in the run"
        )


def find_model(path: Path, step: int | None) -> tuple[Path, Path]:
    """The folder that describes a model, and the one with its tensors: the same, unless `path` is a run, of which the
    checkpoint of `step` counts, or the newest (None). A ValueError if `step` is given for a folder that is no run."""
    check_config(path, RUN_OR_MODEL)
    run = RunFolder(path)
    if run.has_model:
        return run.model, run.chosen(step)
    if step is not None:
        raise ValueError(f"{path} is a model, not a run of octavo train: it has no steps")
    if (path / ADAPTER_CONFIG).is_file():
        raise ArtifactError(
            f"{path} holds adapters beside its model ({ADAPTER_CONFIG}), with which transformers opens it: merge them "
            "(merge_and_unload of PEFT) and save the model, or move their files elsewhere"
        )
    return path, path
