"""Packages that only some commands need. Octavo names each in an extra of its own (`pyproject.toml`)."""

from __future__ import annotations

import importlib
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
            f'{purpose}, and it cannot be imported ({error}): run pip install ".[{extra}]" in the source folder of '
            "Octavo"
        ) from error
