"""The report of `octavo doctor`: versions of this machine, its problems with their fix, and the speed of its GEMMs."""

from octavo.diagnosis.gemms import Timing, time_gemms
from octavo.diagnosis.problems import Problem, find_problems
from octavo.diagnosis.versions import read_versions

__all__ = ["Problem", "Timing", "find_problems", "read_versions", "time_gemms"]
