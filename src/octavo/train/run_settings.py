"""The settings of a run in its config.json."""

import json

from octavo.artifact.files import read_json, replace_file
from octavo.artifact.run import RunFolder
from octavo.train.config import Config


def read_settings(run: RunFolder) -> Config:
    """The settings of a run, whose folder may have been moved. An ArtifactError if the file is damaged."""
    return Config.from_dict(read_json(run.config) | {"out": str(run.path)}, source=str(run.config))


def write_settings(config: Config, run: RunFolder) -> None:
    """Replace the settings in the folder of a run."""
    replace_file(run.config, json.dumps(config.to_dict(), indent=2) + "\n")
