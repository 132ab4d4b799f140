"""The tag by which PyTorch finds compiled code on disk.

PyTorch saves compiled graphs on disk, and finds one again by the names and arguments of its operations. The kernels
that an operation launches are not part of that. So the code of a graph that was compiled before a kernel changed would
run after the change. A tag with the version of Octavo's source prevents that.
"""

from hashlib import sha256
from pathlib import Path

from torch.compiler import config

from octavo.version import __version__


def source_version(root: Path) -> str:
    """A string that is another one after each change of a file of Octavo; `root` is the folder of the package."""
    files = sorted(root.rglob("*.py"))
    changed = [(str(path), path.stat().st_mtime_ns) for path in files]
    return f"octavo {__version__} {sha256(repr(changed).encode()).hexdigest()}"


def add_source_version() -> None:
    """Add the version of Octavo's source to the tag of the graphs that this process compiles."""
    config.cache_key_tag = " ".join(filter(None, (config.cache_key_tag, source_version(Path(__file__).parents[1]))))
