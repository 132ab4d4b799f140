"""The names that nanoGPT, Hugging Face's Trainer and other tools have for settings of Octavo.

An error about an unknown option suggests the option in this table if the command has it. If Octavo has no such option,
the entry is a sentence.
"""

from __future__ import annotations

_SAME = {
    "learning-rate": ("lr", "max-lr", "peak-lr"),
    "min-learning-rate": ("min-lr", "lr-min"),
    "steps": ("max-iters", "max-steps", "iters", "num-steps", "train-steps", "num-iterations"),
    "layers": ("n-layer", "n-layers", "num-layers", "num-hidden-layers", "depth"),
    "heads": ("n-head", "n-heads", "num-heads", "num-attention-heads"),
    "kv-heads": ("n-kv-head", "n-kv-heads", "num-key-value-heads"),
    "width": ("n-embd", "n-embed", "hidden-size", "d-model", "dim", "model-dim"),
    "mlp-width": ("intermediate-size", "ffn-dim", "d-ff", "hidden-dim"),
    "context": ("block-size", "max-seq-length", "max-seq-len", "seq-len", "sequence-length", "context-length"),
    "batch": ("batch-size", "per-device-train-batch-size", "micro-batch-size", "device-batch-size"),
    "accumulate": ("gradient-accumulation-steps", "grad-accum", "grad-accumulation-steps"),
    "warmup": ("warmup-steps", "warmup-iters", "num-warmup-steps"),
    "weight-decay": ("wd",),
    "clip": ("grad-clip", "max-grad-norm", "gradient-clip"),
    "schedule": ("lr-scheduler-type", "lr-schedule", "scheduler"),
    "decay-steps": ("lr-decay-iters", "lr-decay-steps"),
    "beta1": ("adam-beta1",),
    "beta2": ("adam-beta2",),
    "out": ("output-dir", "out-dir", "save-dir", "output", "o"),
    "model": ("model-name-or-path", "model-name", "init-from", "pretrained"),
    "data": ("dataset", "dataset-name", "train-file", "data-dir", "data-path", "text"),
    "tokenizer": ("tokenizer-name",),
    "vocabulary": ("vocab-size",),
    "save-every": ("save-steps", "save-interval", "checkpoint-every"),
    "keep": ("save-total-limit",),
    "evaluate-every": ("eval-interval", "eval-steps", "eval-every"),
    "evaluate-batches": ("eval-iters",),
    "log-every": ("log-interval", "logging-steps"),
    "precision": ("dtype", "bf16", "fp16", "mixed-precision", "torch-dtype"),
    "checkpoint-activations": ("gradient-checkpointing", "activation-checkpointing"),
    "compile": ("torch-compile",),
    "tied": ("tie-word-embeddings", "weight-tying"),
    "resume": ("resume-from-checkpoint", "resume-from"),
    "rope-theta": ("rope-base",),
    "count": ("max-new-tokens", "max-tokens", "num-tokens", "n-predict", "tokens"),
    "prompt": ("start", "input"),
    "temperature": ("temp",),
    "samples": ("num-samples", "num-calibration-samples", "max-samples"),
    "step": ("checkpoint", "ckpt"),
    "scheme": ("quantization", "quant-scheme", "quantize"),
    "layout": ("to",),
    "skip": ("ignore", "exclude"),
}

OTHER_NAMES = {theirs: ours for ours, names in _SAME.items() for theirs in names} | {
    "num-train-epochs": "A run is as long as --steps says; Octavo counts no epochs.",
    "epochs": "A run is as long as --steps says; Octavo counts no epochs.",
    "do-train": "octavo train trains without it.",
    "do-eval": "octavo train evaluates every --evaluate-every steps.",
    "eval-only": "octavo evaluate RUN evaluates without training.",
    "wandb-log": "octavo train writes metrics.jsonl, and TensorBoard's events with --tensorboard.",
    "report-to": "octavo train writes metrics.jsonl, and TensorBoard's events with --tensorboard.",
}
