"""Generating text from a language model, of ours or of transformers."""
