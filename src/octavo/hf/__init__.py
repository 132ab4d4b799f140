"""Hugging Face model folders and runs, opened: their configuration, tensors and modules."""
