"""The loss of a Llama at the end of training with attention in FP8, against attention in BF16, over seeds.

For each seed all modes start from the same weights and see the same batches: bytes of Python's standard library, in
sequences of 2,048. The heads have 128 elements.

The result is written after each seed, of which all modes are trained.

    python -m bench.gpu.attention_loss [--seeds 3] [--steps 400] [--modes "bf16,bf16 + FP8 attention"] [--seconds 300]
"""

import argparse
import json
import math
import time
from typing import Any

import torch

from bench import record
from bench.gpu.gpt_parity import gaps
from bench.gpu.gpt_trainer import Data, restart, trainer_of
from octavo.models.tokenizer import ByteTokenizer
from octavo.nn import cast_once
from octavo.nn.quantized_attention import GradientScales
from octavo.text import read_text
from octavo.train.config import Config
from octavo.train.data import build_corpus
from octavo.train.loop import Trainer
from octavo.train.tables import Compile

NAME = "gpu_attention_loss"
CONFIG = Config(
    model="llama", layers=6, width=512, heads=4, kv_heads=2, mlp_width=1408, context=2048, tokenizer="bytes", batch=16,
    steps=400, learning_rate=1e-3, min_learning_rate=1e-5, warmup=40, evaluate_batches=32,
    compile=Compile(blocks=True),
)  # fmt: skip
FP8 = {"attention.precision": "fp8", "attention.shortest": CONFIG.context}
MODES: dict[str, dict[str, Any]] = {  # the recipe of the linear layers, and the attention
    "bf16": {"recipe": "bf16"},
    "bf16 + FP8 attention": {"recipe": "bf16", **FP8},
    "rowwise": {"recipe": "rowwise"},
    "rowwise + FP8 attention": {"recipe": "rowwise", **FP8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=CONFIG.steps)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no seed after so long")
    options = parser.parse_args()
    began = time.monotonic()
    torch._dynamo.config.recompile_limit = 64  # the modes share the code of their blocks
    config = CONFIG.change(steps=options.steps, warmup=min(CONFIG.warmup, options.steps // 10))
    data, final = read_data(config), dict[tuple[str, int], float]()
    result = {"settings": {name: getattr(config, name) for name in ("layers", "width", "heads", "context", "batch")}}
    changed = {mode: config.change(**MODES[mode]) for mode in options.modes.split(",")}
    trainers = {mode: trainer_of(each.recipe, each, data)[0] for mode, each in changed.items()}
    for seed in range(options.seeds):
        if time.monotonic() - began > options.seconds:
            break
        for mode, trainer in trainers.items():
            restart(trainer, data, seed)
            forget(trainer)
            final[mode, seed] = train(trainer)
            print(f"{mode}, seed {seed}: {final[mode, seed]:.4f}, {time.monotonic() - began:.0f} s", flush=True)
        found = {mode: {str(s): loss for (m, s), loss in final.items() if m == mode} for mode in trainers}
        gap = {mode: gaps(final, mode) for mode in trainers if mode != "bf16"}
        tokens = config.steps * config.batch * config.context
        record.write(NAME, {**result, "steps": config.steps, "tokens": tokens, "losses": found, "gaps": gap})
    print(json.dumps(gap, indent=2))


def read_data(config: Config) -> Data:
    reading, tokenizer = read_text(("stdlib",)), ByteTokenizer()
    corpus = build_corpus(sorted(reading.texts), tokenizer, config.context, config.validation_fraction)
    print(f"{len(corpus.train):,} tokens to train on", flush=True)
    return Data(corpus, tokenizer, reading.report)


def forget(trainer: Trainer) -> None:
    """Forget the gradients of the run before."""
    for module in trainer.model.modules():
        if isinstance(module, GradientScales):
            module.amax.zero_()


def train(trainer: Trainer) -> float:
    """One run; its loss on text held out."""
    with cast_once(trainer.model):
        for _ in range(trainer.config.steps):
            loss, *_ = trainer.step()
        final = trainer.evaluate()
    if not (math.isfinite(final) and math.isfinite(float(loss))):
        raise RuntimeError(f"the loss is not finite: {float(loss)} in training, {final} held out")
    return final


if __name__ == "__main__":
    main()
