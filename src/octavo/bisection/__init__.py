"""Finding the GEMMs and the layers of an FP8 run that make its loss differ from that of BF16."""

from octavo.bisection.bisector import Bisection, bisect

__all__ = ["Bisection", "bisect"]
