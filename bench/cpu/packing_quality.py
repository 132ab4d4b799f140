"""The cost of each packing scheme in quality: a BF16 run of the demo's model, packed and verified on held-out text.

The model is trained once, in BF16. Every scheme packs the same weights and is measured on the same prompts, so the
changes of perplexity are paired. A smoothed model is folded first (`octavo fold --smooth`), with a calibration on the
training text.
"""

import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import record
from bench.cpu.demo_run import train, write_model
from examples import demo
from octavo.calibration import Calibration, calibrate
from octavo.evaluation import PromptOptions
from octavo.evaluation.metrics import LogitQuality
from octavo.folding import fold
from octavo.models.tokenizer import load_tokenizer
from octavo.packing import pack
from octavo.text import read_text
from octavo.train.config import Config
from octavo.train.data import build_corpus
from octavo.verification.pipeline import verify
from octavo.verification.result import Report

SCHEMES = ("channel", "block", "static", "mx", "int8")
SMOOTHED = ("channel", "int8")
SAMPLES = 96


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        reports = {scheme: judge(scheme, folder) for scheme in SCHEMES}
        fold(folder / "model", folder / "smoothed", smooth=folder / "calibrated")
        reports |= {f"{scheme}, smoothed": judge(scheme, folder, "smoothed") for scheme in SMOOTHED}
    first = reports[SCHEMES[0]]
    assert isinstance(first.quality, LogitQuality)
    result = {
        "settings": demo.SETTINGS,
        "prompts": first.quality.prompts,
        "tokens": first.quality.tokens,
        "perplexity": asdict(first.quality.reference_perplexity),
        "schemes": {scheme: row(report) for scheme, report in reports.items()},
    }
    print(record.write("packing_quality", result))


def prepare(folder: Path) -> Calibration:
    """Train a model and write it to `folder`/model, its texts and its calibration beside it."""
    config = train(folder / "run", "--recipe", "bf16", "--mlp-width", "768")  # a multiple of 128, as block needs
    model = write_model(folder / "run", folder / "model")
    write_texts(config, model, folder)
    texts = [str(folder / "training.txt")]
    return calibrate(model, texts, folder / "calibrated", prompts=PromptOptions(128, 512, 16))


def write_texts(config: Config, model: Path, folder: Path) -> None:
    """Write a part of the training text and the held-out text of the run."""
    corpus = build_corpus(
        read_text(config.data).texts, load_tokenizer(model), config.context, config.validation_fraction
    )
    for name, tokens in (("training", corpus.train[:500_000]), ("heldout", corpus.validation)):
        text = bytes(tokens.astype("uint8")).decode("utf-8", errors="ignore").replace("\0", "\n")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def judge(scheme: str, folder: Path, source: str = "model") -> Report:
    """Pack `folder`/source with a scheme and verify it against `folder`/model; findings end the benchmark."""
    began, out = time.perf_counter(), folder / f"{source} {scheme}"
    calibration = folder / "calibrated" if scheme == "static" else None
    pack(folder / source, out, scheme=scheme, calibration=calibration)
    report = verify(out, folder / "model", [str(folder / "heldout.txt")], prompts=PromptOptions(SAMPLES))
    if not report.ok:
        raise SystemExit("\n".join(map(str, report.findings)))
    print(f"{out.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return report


def row(report: Report) -> dict[str, Any]:
    """The figures of a scheme that the page shows."""
    assert report.quality is not None
    assert report.sizes is not None
    outputs = [layer.output_sqnr for layer in report.layers if layer.output_sqnr is not None]
    found = report.quality.to_dict() | {
        "bytes_to_bf16": report.sizes.packed / report.sizes.packed_bf16,
        "readers": {reader.name: asdict(reader) for reader in report.readers},
    }
    if outputs:  # the layers of a folded model have other inputs
        found["output_sqnr"] = {"mean": sum(outputs) / len(outputs), "least": min(outputs)}
    return found


if __name__ == "__main__":
    main()
