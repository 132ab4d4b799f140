"""The watch of a training run: collected from the layers, stored in the folder of the run, read again."""

from octavo.telemetry.collection import Watch, watch
from octavo.telemetry.measurement import Sample
from octavo.telemetry.schema import Event, GemmRun, WatchedLayer, columns
from octavo.telemetry.storage import Watched, read_watch

__all__ = ["Event", "GemmRun", "Sample", "Watch", "Watched", "WatchedLayer", "columns", "read_watch", "watch"]
