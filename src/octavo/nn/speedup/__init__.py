"""How much faster FP8 makes a layer of a given size on this GPU: a table of measurements, and its lookup."""
