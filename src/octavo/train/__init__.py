"""Training: configuration, data, schedule, loop and checkpoints."""
