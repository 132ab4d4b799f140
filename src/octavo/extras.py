"""Packages that only some commands need. Octavo names each in an extra of its own (`pyproject.toml`)."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, which the extra `extra` of Octavo installs.

    Args:
        module: such as "transformers".
        extra: such as "hf".
        purpose: what needs the module, for the message: a clause, such as "text is read through transformers".

    Raises:
        ImportError: it cannot be imported; the message says how to install it. Octavo is installed from its
            source folder, so the hint is one that works there.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{purpose}, and {module} cannot be imported ({error}): run pip install ".[{extra}]" in the source folder '
            "of Octavo"
        ) from error


def open_local(auto: Any, folder: str | Path, **settings: Any) -> Any:
    """`auto.from_pretrained` on a local folder: nothing is downloaded, and no code of the folder is run.

    Args:
        auto: a class of transformers, such as `AutoTokenizer`.
        folder: a model folder.
        settings: further arguments of `from_pretrained`.

    Raises:
        ValueError: the folder can only be opened with the Python code that its `auto_map` names.
    """
    try:
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{folder} needs Python code of its own (auto_map in its config.json or tokenizer_config.json), and octavo "
            "runs no code of a model folder. Use a model that transformers implements itself"
        ) from error


def hub_hint(folder: str | Path) -> str:
    """The command that downloads a model if a missing `folder` has a name as on Hugging Face's hub, ORG/NAME; or ""."""
    org, _, name = str(folder).partition("/")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(folder)) or Path(org).exists():
        return ""
    return f". For a model of Hugging Face's hub: hf download {folder} --local-dir models/{name}"


def installed(package: str) -> str:
    """The version of a package; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
