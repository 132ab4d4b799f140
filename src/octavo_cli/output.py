"""Files that a command writes at its end."""

import tempfile
from pathlib import Path


def check_writable(path: Path | None, option: str) -> None:
    """Raise a ValueError that names `option` unless a file can be written at `path`, if one is given."""
    if path is None:
        return
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}. Nothing was run") from error
