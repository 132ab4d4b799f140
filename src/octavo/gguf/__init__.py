"""Exporting a model to a GGUF file, which llama.cpp opens."""

from octavo.gguf.export import GgufReport, export_gguf

__all__ = ["GgufReport", "export_gguf"]
