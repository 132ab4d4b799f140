"""Generating text from a language model, of ours or of transformers."""

from octavo.generation.engine import Engine
from octavo.generation.sampling import Sampling

__all__ = ["Engine", "Sampling"]
