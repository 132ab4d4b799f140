"""The speed of generating text, measured through the public calls of Octavo, transformers and vLLM: `octavo bench`."""

from octavo.speed.comparison import compare_speed, measure_programs
from octavo.speed.grid import Cell, Grid
from octavo.speed.programs import Opened, Program
from octavo.speed.result import SpeedReport

__all__ = ["Cell", "Grid", "Opened", "Program", "SpeedReport", "compare_speed", "measure_programs"]
