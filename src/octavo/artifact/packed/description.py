"""The files of a model folder that are neither its config.json nor its tensors, copied to another folder.

These are the tokenizer and the generation settings. A sentence-transformers folder also has modules that follow the
model: modules.json names a folder for each (1_Pooling, 2_Dense, ...), which may hold tensors.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.modelopt import SIDE_FILE

_DESCRIBES = (".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken")
_NOT_COPIED = ("config.json", "octavo.json", SIDE_FILE)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_MODULES = "modules.json"


def copy_description(source: Path, target: Path) -> None:
    """Copy the files of a model folder that are neither config.json nor tensors.

    Raises:
        ArtifactError: modules.json is damaged or names a folder outside of `source`, or a module there has its tensors
            in a pickle.
    """
    for path in sorted(source.iterdir()):
        described = path.suffix in _DESCRIBES and not path.name.endswith(".index.json")
        if path.is_file() and described and path.name not in _NOT_COPIED:
            shutil.copyfile(path, target / path.name)
    for name in _modules(source):
        _copy_module(source / name, target / name)


def _modules(source: Path) -> Iterator[str]:
    """The folders of the modules that follow the model."""
    listed = source / _MODULES
    if not listed.is_file():
        return
    try:
        modules: Any = json.loads(listed.read_text(encoding="utf-8"))
        names = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{listed} must be a list of modules, each with a path ({error!r})") from error
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ArtifactError(f"{listed} names {name!r}: the folders of modules must lie in the folder itself")
        # The model itself lies in "", and a module without settings, such as Normalize, may have no folder.
        if PurePosixPath(name).parts and (source / name).is_dir():
            yield name


def _copy_module(source: Path, target: Path) -> None:
    """Copy the folder of a module with its tensors; a pickle is left behind where there are safetensors."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    pickles = [path for path in files if path.suffix in _PICKLES]
    if pickles and not any(path.suffix == ".safetensors" for path in files):
        raise ArtifactError(
            f"{pickles[0]} is a pickle, which can run code and is not copied: save the model with safetensors "
            "(sentence-transformers' save does)"
        )
    for path in files:
        if path not in pickles:
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
