"""Statistics of the operands of GEMMs, recorded for sampled rows in the steps that are sampled."""
