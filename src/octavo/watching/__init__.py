"""The watch of a training run: collected from the layers, stored in the folder of the run, read again.

`octavo.watching.collection` watches. A report only reads, so it does not import the layers.
"""

from octavo.watching.storage import Event, GemmRun, Watched, WatchedLayer, columns, read_watch

__all__ = ["Event", "GemmRun", "Watched", "WatchedLayer", "columns", "read_watch"]
