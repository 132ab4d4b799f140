"""The watch of a training run: collected from the layers, stored in the folder of the run, read again."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.watching.storage import Event, GemmRun, Watched, WatchedLayer, columns, read_watch

if TYPE_CHECKING:
    from octavo.watching.collection import Sample, Watch, watch

__all__ = ["Event", "GemmRun", "Sample", "Watch", "Watched", "WatchedLayer", "columns", "read_watch", "watch"]

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> Any:
        """Import the collection of a watch at its first use: a report only reads a watch."""
        if name not in ("Sample", "Watch", "watch"):
            raise AttributeError(f"module 'octavo.watching' has no attribute {name!r}")
        return getattr(import_module("octavo.watching.collection"), name)
