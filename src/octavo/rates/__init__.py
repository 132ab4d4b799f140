"""Measured speeds: of layers in FP8 over BF16, of GEMMs, of schemes of packed layers, and of GPUs."""
