"""A look at a model and a machine: the dtype of each operation, and what is wrong with an installation."""
