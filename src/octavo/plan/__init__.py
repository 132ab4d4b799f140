"""Plan a run before it is paid for: memory and time of training and serving, from shapes and measured rates.

    architecture    the layers of a model, from a preset or a config.json
    hardware        GPUs: data sheets, and the rates that were measured on them
    attention       where attention runs in FP8, and its measured speed
    memory          bytes by part on one GPU in training
    step_time       seconds by part of a training step
    schemes         packing schemes: bytes of weights, and speeds of GEMMs
    serving         memory and speed of a served model

Nothing here allocates memory for weights, or uses a GPU.
"""
