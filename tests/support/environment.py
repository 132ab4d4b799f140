"""The environment of a process that a test starts."""

import os
from pathlib import Path

import octavo


def with_source(**variables: str) -> dict[str, str]:
    """This process's environment and `variables`, in which Python finds the Octavo that is tested before any other. The
    folders of PYTHONPATH come after it: on some machines all packages are found there."""
    folders = [str(Path(octavo.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
