"""The folder of a training run.

RUN/
  config.json              the settings, as `octavo.train.config.Config` gives them
  model/                   config.json and tokenizer in Hugging Face's terms
  metrics.jsonl            one JSON object a line
  actions.json             promoted layers and rollbacks (`octavo.train.supervision`), once there are any
  watch/                   samples of the layers' operands (`octavo.watching.storage`)
  step-00000100/           a checkpoint: appears whole or not at all
    model.safetensors      the master weights, under the names of the unconverted model
    optimizer.safetensors  PARAMETER.exp_avg, ...
    state.safetensors      random states of every rank, and scale histories
    train.json             step, data fingerprint, loss scaler
    checksums.json         of each part of a tensor that a rank wrote (`octavo.checkpoint.files`)

A large file of tensors is several files with an index. The number of ranks of the run makes no difference.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo.checkpoint.files import ArtifactError, read_json, replace_file
from octavo.checkpoint.folder import writing
from octavo.util import build, hub_hint

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


@dataclass(frozen=True)
class RunFolder:
    """The paths in the folder of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def has_model(self) -> bool:
        """True if the folder holds the description of a run's model, which no other kind of folder does."""
        return (self.model / "config.json").is_file()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def read_actions(self) -> Actions:
        """The actions in actions.json; none if there is no such file. An ArtifactError if it is damaged."""
        path = self.path / "actions.json"
        if not path.is_file():
            return Actions()
        found = read_json(path)
        try:
            return Actions(
                [build(Promotion, each) for each in found["promotions"]],
                [build(Rollback, each) for each in found["rollbacks"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is damaged: {type(error).__name__} {error}") from error

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
        wrong = ""
        if not self.path.is_dir():
            wrong = f"there is no folder {self.path}"
        elif not self.config.is_file():
            wrong = f"{self.path} is no run of octavo train: it has no config.json"
        elif not self.has_model:
            wrong = f"{self.path} is a model folder, not a run of octavo train"
        if wrong:
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


def check_config(folder: Path, wanted: str) -> None:
    """Raise a FileNotFoundError, which says to give `wanted`, unless `folder` is a folder with a config.json."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give {wanted}{hub_hint(folder)}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give {wanted}")


def refuse_run(folder: Path) -> None:
    """Raise an ArtifactError if a folder that should be packed is a run, or a checkpoint of one."""
    is_checkpoint = (folder / "train.json").is_file()
    run = folder.parent if is_checkpoint else folder
    if RunFolder(run).has_model:
        kind = f"a checkpoint of the run {run}" if is_checkpoint else "a run of octavo train"
        raise ArtifactError(
            f"{folder} is {kind}, not a packed folder: octavo pack {run} PACKED makes one of it, and octavo report "
            f"{run} shows what FP8 did in the run"
        )


def find_model(path: Path, step: int | None) -> tuple[Path, Path]:
    """The folder that describes a model, and the one with its tensors: the same, unless `path` is a run, of which the
    checkpoint of `step` counts, or the newest (None). A ValueError if a step is asked of a folder that is no run."""
    check_config(path, RUN_OR_MODEL)
    run = RunFolder(path)
    if run.has_model:
        return run.model, run.chosen(step)
    if step is not None:
        raise ValueError(f"{path} is a model, not a run of octavo train: it has no steps")
    return path, path
