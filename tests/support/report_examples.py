"""Folders of runs to report on, made up: the records look like those of a transformer that trains in FP8."""

import json
from pathlib import Path

import numpy as np

from octavo.watching.storage import FULL_SHARE, LAYER, OPERAND, Event, GemmRun, Watched, WatchedLayer, WatchWriter

KINDS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.up", "mlp.down")
NORMAL = np.exp2(-np.arange(*OPERAND["binades"].shape)) / 2  # shares of an even distribution


def layers_of(count: int) -> list[WatchedLayer]:
    """Layers with formats of a hybrid recipe; the last one, the head, is in BF16."""
    quantized = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}
    gemms = {name: GemmRun("fp8", "cublaslt") for name in ("y", "dx", "dw")}
    head = {name: GemmRun("bf16", "cublas", "the layer is skipped") for name in ("y", "dx", "dw")}
    made = [
        WatchedLayer(
            f"model.layers.{i // len(KINDS)}.{KINDS[i % len(KINDS)]}", "Linear", (768, 768), "rowwise", quantized,
            dict.fromkeys(quantized, "row"), gemms,
        )
        for i in range(count - 1)
    ]  # fmt: skip
    plain = dict.fromkeys(quantized, "bf16")
    return [*made, WatchedLayer("lm_head", "Linear", (50304, 768), "", plain, dict.fromkeys(quantized, ""), head)]


def operands_of(steps: np.ndarray, layers: int) -> np.ndarray:
    """The records [3 * layers * steps] of three operands: saturation grows with the step in layer 2 of dy."""
    random, shape = np.random.default_rng(0), (len(steps), layers, 3)
    records = np.zeros(shape, OPERAND)
    records["step"] = steps[:, None, None]
    records["layer"], records["operand"] = np.arange(layers)[:, None], np.arange(3)
    records["amax"] = np.exp2(random.normal(2, 1, shape) - 12 * (records["operand"] == 2))
    records["rms"], records["crest"] = records["amax"] / 8, 8
    records["scale"] = records["amax"] / np.where(records["operand"] == 2, 57344, 448)
    records["smallest_scale"] = records["scale"] / 16
    records["saturated"] = np.where(random.random(shape) < 0.1, 1e-5 * random.random(shape), 0)
    records["saturated"][:, 2, 2] = 0.2 * np.linspace(0, 1, len(steps)) ** 3
    records["flushed"] = 1e-4 * random.random(shape)
    records["sqnr"] = 30 + random.normal(0, 1, shape)
    records["kurtosis"], records["gap"] = 3 + random.random(shape), np.nan
    records["binades"] = NORMAL * FULL_SHARE
    plain = records["layer"] == layers - 1
    for name in ("scale", "smallest_scale", "saturated", "flushed", "sqnr"):
        records[name][plain] = np.nan
    records["flags"][plain] = 2
    return records.reshape(-1)


def layer_records_of(steps: np.ndarray, layers: int) -> np.ndarray:
    records = np.zeros((len(steps), layers), LAYER)
    records["step"], records["layer"] = steps[:, None], np.arange(layers)
    records["gradient_norm"], records["update_ratio"], records["weight_norm"] = 0.1, 1e-3, 10.0
    records["gradient_amax"], records["alignment"] = 0.01, np.nan
    records["gradient_binades"] = NORMAL * FULL_SHARE
    return records.reshape(-1)


def watched_of(layers: int, steps: np.ndarray) -> Watched:
    return Watched(1, layers_of(layers), operands_of(steps, layers), layer_records_of(steps, layers), [])


def write_metrics(run: Path, steps: int, *, offset: float = 0.0, **more) -> None:
    """metrics.jsonl with the loss, the speed and the memory; `more` goes into each record."""
    random = np.random.default_rng(1)
    lines = []
    for step in range(1, steps + 1):
        loss = 3 + offset + 6 * np.exp(-step / (0.2 * steps)) + 0.05 * random.random()
        speed = 5e5 + 1e4 * random.random()
        record = {
            "step": step, "loss": round(loss, 4), "gradient_norm": 1.0, "tokens_per_second": speed,
            "peak_memory": 41_000_000_000 + step,
        }  # fmt: skip
        lines.append({**record, **more})
        if step % 10 == 0:
            lines.append({"step": step, "evaluation_loss": round(loss + 0.1, 4)})
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.json").write_text(json.dumps({"recipe": "bf16" if offset < 0 else "rowwise", "steps": steps}))


def make_run(run: Path, *, layers: int = 13, steps: int = 200, interval: int = 10) -> Path:
    write_metrics(run, steps)
    sampled = np.arange(interval, steps + 1, interval)
    writer = WatchWriter(run, layers_of(layers), interval=interval)
    writer.write(operands_of(sampled, layers), layer_records_of(sampled, layers))
    message = "10.0% of dy saturates"
    writer.write_event(Event(int(sampled[-1]), "saturation_spike", layers_of(4)[2].name, "dy", 0.1, 0.01, message))
    return run
