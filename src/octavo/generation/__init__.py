"""Generating text from a language model, of ours or of transformers."""

from octavo.generation.engine import Engine

__all__ = ["Engine"]
