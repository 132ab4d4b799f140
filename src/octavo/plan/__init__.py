"""Plan a run before it is paid for: memory and time of training and serving, from shapes and measured rates.

    model_shape   the layers of a model, from a preset or a config.json
    setup         a training run as it is planned: recipe, GPUs, states, attention
    memory        bytes by part on one GPU in training
    step_time     seconds by part of a training step
    serving       memory and speed of a served model, by packing scheme
    cases         a question: one plan, a comparison, or a search for GPUs

Nothing here allocates memory for weights, or uses a GPU. `octavo.rates` has the measured speeds.
"""
