"""The dtype of each operation of a model, and the problems of an installation."""
