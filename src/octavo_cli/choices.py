"""The names that help texts list. They are repeated here because the library that defines them imports PyTorch.

`tests/octavo_cli/test_choices.py` compares them with the library's.
"""

FORMATS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0", "bf16", "fp16", "fp32")
ATTENTIONS = ("bf16", "fp8")
CACHES = ("bf16", "fp8")  # of octavo plan
GGUF_WEIGHTS = ("q8_0", "f16")
GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx4070", "l40s", "rtx5090", "mi300x", "mi355x")
KV_CACHES = ("auto", "bf16", "fp8", "int8")
LAYOUTS = ("compressed-tensors", "fp8", "modelopt", "autofp8")
MODEL_PRESETS = ("llama-1b", "llama-3-70b", "llama-3-8b")
RECIPES = (
    "bf16", "tensorwise", "tensorwise_rotated", "rowwise", "rowwise_dw_bf16", "delayed", "blockwise", "mxfp8",
    "groupwise",
)  # fmt: skip
SCHEMES = ("channel", "tensor", "static", "block", "mx", "group32", "group64", "group128", "weight", "int8")
SETTINGS = (
    "model", "layers", "width", "heads", "kv-heads", "mlp-width", "context", "tied", "bias", "dropout",
    "rope-theta", "experts.count", "experts.top-k", "experts.shared-width", "experts.balance",
    "recipe", "skip", "bf16-gemms", "calibration", "only-if-faster", "emulate",
    "attention.precision", "attention.shortest", "data", "tokenizer", "vocabulary", "sampling", "validation-fraction",
    "steps", "batch", "accumulate", "seed", "learning-rate", "min-learning-rate",
    "schedule", "warmup", "decay-steps", "decay", "weight-decay", "beta1", "beta2", "clip", "loss.logits", "loss.chunk",
    "optimizer.weights", "optimizer.state", "optimizer.offload", "device", "precision", "deterministic",
    "compile.blocks", "compile.backend", "activation-checkpointing.mode", "parallel.dp-shard", "parallel.dp-replicate",
    "parallel.tp", "parallel.fp8-all-gather", "parallel.gather-dtype", "parallel.async-tp", "parallel.timeout", "out",
    "log-every", "evaluate-every", "evaluate-batches", "save-every", "keep", "tensorboard", "wandb", "sample",
    "watch.interval", "watch.rows", "watch.on-warning", "watch.on-spike", "watch.rollbacks",
)  # fmt: skip
# Settings that became tables, which the command line still takes; they are true or false.
FORMER_SETTINGS = ("checkpoint-activations", "compile")
# The settings that are true or false: --no-tied stands for --tied false.
FLAGS = (
    "tied", "bias", "only-if-faster", "emulate", "optimizer.offload", "deterministic", "compile.blocks",
    "parallel.fp8-all-gather", "parallel.async-tp", "tensorboard", "wandb",
)  # fmt: skip
