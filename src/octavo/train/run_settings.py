"""The settings of a run in its config.json."""

import json

from octavo.artifact.files import ArtifactError
from octavo.artifact.run import RunFolder
from octavo.train.config import Config


def read_settings(run: RunFolder) -> Config:
    """The settings of a run, whose folder may have been moved. An ArtifactError if the file is damaged."""
    try:
        settings = json.loads(run.config.read_text())
    except ValueError as error:
        raise ArtifactError(f"{run.config} is not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ArtifactError(f"{run.config} must be an object of settings, got {type(settings).__name__}")
    return Config.from_dict(settings | {"out": str(run.path)})


def write_settings(config: Config, run: RunFolder) -> None:
    """Write the settings to a new file, then replace the old one: a full disk must not destroy the settings."""
    partial = run.path / ".config.json.partial"
    try:
        partial.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        partial.replace(run.config)
    finally:
        partial.unlink(missing_ok=True)
