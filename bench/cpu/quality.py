"""The quality of the demo's model in eight bits: packing schemes, caches of keys and values, and attention.

The model is trained once, in BF16. Everything is measured on the same held-out prompts, so changes are paired.

    packing      every scheme packs the same weights and is verified; a smoothed model is folded first (`octavo pack
                 --smooth`), with a calibration on the training text
    kv-cache     the model packed by channel, with a cache of each dtype. Prompts pass through the model in chunks, so
                 that the tokens after the first chunk attend to the cache. The reference is a BF16 cache, on the same
                 prompts and chunks. The scales come from a calibration, or from the first chunk of each prompt
    attention    the model packed by channel, with the attention of whole prompts in E4M3 beside that in BF16. A CPU
                 computes the arithmetic of `octavo.ops.fp8_attention` in float32

    python -m bench.cpu.quality
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import octavo
from bench.cpu.embeddings import packed_by, size_of
from bench.gpu.harness import Options, Results, benchmark
from examples import demo
from octavo.calibration import Calibration, calibrate
from octavo.checkpoint.files import read_json
from octavo.checkpoint.folder import RunFolder
from octavo.data import read_text
from octavo.evaluation.metrics import LogitQuality, LogitSums, Outputs, compare_many
from octavo.evaluation.prompts import PromptOptions, read_prompts
from octavo.inference.transformers_cache import CACHE, QuantizedKVCache, scales_from_calibration
from octavo.models.tokenizer import build_corpus, load_tokenizer, open_tokenizer
from octavo.nn import use_fp8_attention
from octavo.packing.transforms import fold
from octavo.train.settings import load_config
from octavo.train.trainer import start_run
from octavo.verification.findings import Report

SCHEMES = ("channel", "block", "static", "mx", "int8")
SMOOTHED = ("channel", "int8")
SAMPLES = 96  # prompts of a verification
CHUNK, PROMPTS, CONTEXT, BATCH = 16, 64, 256, 8  # of the caches and of attention
CACHES = [(dtype, how) for dtype in ("fp8", "int8") for how in ("calibrated", "first chunk")]
Cache = Callable[[Any, int], QuantizedKVCache]


def prepare(folder: Path) -> Calibration:
    """Train a model and write it to `folder`/model in BF16, beside it a part of the training text, and the rest; and
    its calibration on that part, which is returned."""
    settings = f"--out {folder}/run --device cpu --recipe bf16 --mlp-width 768"  # a multiple of 128, as block needs
    config = load_config(None, [*demo.SETTINGS, *settings.split()])
    if signal := start_run(config, Console(quiet=True)).run().interrupted:
        raise SystemExit(f"{signal}: no result is written")
    run, out = RunFolder(folder / "run"), folder / "model"
    shutil.copytree(run.model, out)
    (out / "config.json").write_text(json.dumps(read_json(out / "config.json") | {"dtype": "bfloat16"}))
    tensors = load_file(run.newest() / "model.safetensors")
    save_file({name: t.bfloat16() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    texts, tokenizer = read_text(config.data).texts, load_tokenizer(out)
    corpus = build_corpus(texts, tokenizer, config.context, config.validation_fraction)
    for name, tokens in (("training", corpus.train[:500_000]), ("heldout", corpus.validation)):
        text = bytes(tokens.astype("uint8")).decode("utf-8", errors="ignore").replace("\0", "\n")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return calibrate(out, [str(folder / "training.txt")], folder / "calibrated", prompts=PromptOptions(128, 512, 16))


def held_out(folder: Path) -> list[Tensor]:
    """Held-out prompts, ids [B, CONTEXT]."""
    tokenizer = open_tokenizer(folder / "model")
    prompts = read_prompts([str(folder / "heldout.txt")], tokenizer, PromptOptions(PROMPTS, CONTEXT))
    whole = [ids for ids in prompts.ids if len(ids) == CONTEXT]
    return [torch.tensor(whole[i : i + BATCH]) for i in range(0, len(whole), BATCH)]


# --- Packing ---------------------------------------------------------------------------------------------------


def schemes(folder: Path) -> dict[str, Any]:
    model, found = folder / "model", folder / "calibrated"
    checks = {"against": model, "data": [str(folder / "heldout.txt")], "prompts": PromptOptions(SAMPLES)}
    reports = {scheme: packed_by(scheme, model, folder / f"model {scheme}", found, **checks) for scheme in SCHEMES}
    fold(model, folder / "smoothed", smooth=found)
    for scheme in SMOOTHED:
        out = folder / f"smoothed {scheme}"
        reports[f"{scheme}, smoothed"] = packed_by(scheme, folder / "smoothed", out, found, **checks)
    quality = reports[SCHEMES[0]].quality
    assert isinstance(quality, LogitQuality)
    return {
        "settings": demo.SETTINGS,
        "prompts": quality.prompts,
        "tokens": quality.tokens,
        "perplexity": asdict(quality.reference_perplexity),
        "schemes": {scheme: row(report) for scheme, report in reports.items()},
    }


def row(report: Report) -> dict[str, Any]:
    """The figures of a scheme that the page shows."""
    assert report.quality is not None
    outputs = [layer.output_sqnr for layer in report.layers if layer.output_sqnr is not None]
    found = asdict(report.quality) | {
        "bytes_to_bf16": size_of(report),
        "readers": {reader.name: asdict(reader) for reader in report.readers},
    }
    if outputs:  # the layers of a folded model have other inputs
        found["output_sqnr"] = {"mean": sum(outputs) / len(outputs), "least": min(outputs)}
    return found


# --- Caches and attention --------------------------------------------------------------------------------------


def caches(packed: Path, found: Calibration, batches: list[Tensor]) -> dict[str, Any]:
    model = octavo.load(packed)
    made = {f"{dtype}, {how}": cache(dtype, found if how == "calibrated" else None) for dtype, how in CACHES}
    ways = {name: in_chunks(model, make) for name, make in made.items()}
    quality = compare_many(in_chunks(model, cache("bf16", None)), ways, batches, LogitSums)
    return {"settings": demo.SETTINGS, "chunk": CHUNK, "caches": {name: asdict(q) for name, q in quality.items()}}


def cache(dtype: str, calibration: Calibration | None) -> Cache:
    """A function that makes a cache for a model and a number of tokens."""
    scales = {} if calibration is None else {"scales": scales_from_calibration(calibration, dtype)}
    return lambda model, tokens: QuantizedKVCache.for_model(model, tokens, dtype, **scales)


def in_chunks(model: Any, make: Cache) -> Outputs:
    """A function from ids [B, T] to the logits [B, T, V] of a model that decodes in chunks."""

    @torch.no_grad()
    def run(ids: Tensor) -> Tensor:
        kept = make(model, ids.shape[1])
        chunks = [model(part, **{CACHE: kept}, use_cache=True).logits for part in torch.split(ids, CHUNK, 1)]
        return torch.cat(chunks, 1)

    return run


def outputs(model: nn.Module) -> Outputs:
    """A function from ids [B, T] to the logits [B, T, V] of whole prompts."""
    return lambda ids: model(ids, use_cache=False).logits


def attention(packed: Path, batches: list[Tensor]) -> dict[str, Any]:
    plain, ours = octavo.load(packed), octavo.load(packed)
    use_fp8_attention(ours, shortest=1)
    quality = compare_many(outputs(plain), {"fp8": outputs(ours)}, batches, LogitSums)
    return {"settings": demo.SETTINGS, "context": CONTEXT, "fp8": asdict(quality["fp8"])}


@benchmark()
def main(_: Options) -> Results:
    with TemporaryDirectory() as name:
        folder = Path(name)
        calibration = prepare(folder)
        yield "packing_quality", schemes(folder)
        packed, batches = folder / "model channel", held_out(folder)
        yield "kv_cache_quality", caches(packed, calibration, batches)
        yield "attention_quality", attention(packed, batches)
