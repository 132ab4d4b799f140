"""Opening Hugging Face model folders and runs: their configuration, modules and tensors."""
