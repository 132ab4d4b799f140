"""A Llama of 110 million parameters that is trained here, in compiled BF16, and packed in every scheme.

    loss      of held-out text by each packed folder, which is verified first, beside that of transformers in BF16. The
              interval of a gap holds 95 %, over batches of the text, which are the same for all
    speed     forward passes of 8 prompts, and of 64 sequences of one token, as CUDA graphs in turn: of `octavo.load`,
              and of transformers in BF16. No layer is compiled, so norms and MLPs are fused in packed models alone

The text is that of `bench.gpu.loss`. The result is written after each scheme, and the times at the end.

    python -m bench.gpu.trained [--steps 900] [--schemes channel,mx]
"""

import json
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import octavo
from bench.cpu.embeddings import calibrated_on_topics, packed_by, size_of
from bench.gpu.harness import DEVICE, Options, Results, benchmark, captured, interleaved, made, rows_of, sized
from bench.gpu.loss import training
from bench.gpu.loss.model import CONFIGS
from bench.gpu.loss.training import Learner, loss_of
from bench.gpu.runs import settings
from bench.gpu.serve_models import forward
from octavo.checkpoint.scheme import SCHEMES
from octavo.evaluation.metrics import ratio

SIZE, STEPS = sized(("110m", 900), ("1m", 20))
BASE, SHAPES = "bf16", sized({"8 prompts": (8, 1024), "64 tokens": (64, 1)}, {"8 prompts": (2, 16)})
SOURCES = sized(training.SOURCES, ("stdlib",))


def train(folder: Path, count: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Train the model, and write it as a Hugging Face folder in BF16, `folder`/model; returns what was trained, and
    batches of the text that was held out, [8, T + 1]."""
    config, device = CONFIGS[SIZE], torch.device(DEVICE)
    config = config.change(steps=count, decay_steps=count, warmup=max(count // 20, 1), kv_heads=config.heads)
    facts = training.prepare_text(folder, config, SOURCES)
    learner = Learner("bf16", config, device, normed=False)
    learner.warm_up()
    sequences, held_out = training.texts(folder, config, device)
    order, began = training.reading_order(len(sequences), 0, config.batch, None), time.monotonic()
    float(list(training.steps(learner, sequences, order, 0, count))[-1])  # waits for the GPU
    seconds, out, model = time.monotonic() - began, folder / "model", learner.model
    described: Any = model.config
    (out / "config.json").write_text(json.dumps(described.to_hf() | {"dtype": "bfloat16"}))
    save_file({name: p.detach().bfloat16() for name, p in model.named_parameters()}, out / "model.safetensors")
    found = {"text": facts, "settings": settings(config), "parameters": sum(p.numel() for p in model.parameters())}
    found |= {"tokens": count * config.batch * config.context, "seconds": seconds, "held_out": held_out[:, 1:].numel()}
    return found, list(torch.split(held_out.long(), 8))


@torch.no_grad()
def evaluate(model: Any, batches: list[Tensor]) -> list[float]:
    """The loss of each batch."""
    return [float(loss_of(model(each[:, :-1], use_cache=False).logits, each[:, 1:])) for each in batches]


def row(losses: list[float], base: list[float], size: float) -> dict[str, Any]:
    """The loss, and its gap to that of BF16 on the same batches; `size` is of the packed layers, over BF16's."""
    found = ratio([a - b for a, b in zip(losses, base, strict=True)], base)
    interval = None if found.low is None else [found.low, found.high]
    return {"loss": statistics.fmean(losses), "gap": found.value, "interval": interval, "bytes_to_bf16": size}


@benchmark(steps=STEPS, schemes=sized(",".join(SCHEMES), "static,weight"))
def main(options: Options) -> Results:
    with TemporaryDirectory() as name:
        folder = Path(name)
        result, batches = train(folder, options.steps)
        wide, calibrated = folder / "model", calibrated_on_topics(folder / "model", folder, DEVICE)
        models = {BASE: AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).to(DEVICE).eval()}
        base = evaluate(models[BASE], batches)
        rows: dict[str, Any] = {BASE: {"loss": statistics.fmean(base), "bytes_to_bf16": 1.0}}
        for scheme in options.schemes.split(","):
            packed = made(scheme, partial(packed_by, scheme, wide, folder / scheme, calibrated, device=DEVICE))
            if packed is not None:
                models[scheme] = octavo.load(folder / scheme, DEVICE)
                rows[scheme] = row(evaluate(models[scheme], batches), base, size_of(packed))
                yield "gpu_trained", result | {"schemes": rows}
        result |= {"schemes": rows, "ms": {}}
        for what, (batch, tokens) in SHAPES.items():
            ids = batches[0].flatten()[: batch * tokens].view(batch, tokens)
            graphs = {each: captured(partial(forward, model, ids)) for each, model in models.items()}
            result["ms"][what] = rows_of(interleaved(graphs, rounds=10, repeat=5), BASE)
        yield "gpu_trained", result
