"""The watch of a training run: collected from the layers, stored in the folder of the run, read again."""
