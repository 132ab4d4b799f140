"""Observing the inputs of a model's linear layers, and its keys and values, on the user's text."""

from octavo.calibration.folder import Calibration
from octavo.calibration.pipeline import calibrate

__all__ = ["Calibration", "calibrate"]
