"""Observing the inputs of a model's linear layers, and its keys and values, on the user's text."""

from octavo.calibration.calibrator import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
