"""The speedup of FP8 for a layer of a given size on this GPU: tables, their lookup, and the measurement."""
