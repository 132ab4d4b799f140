"""Folders to verify, changes to their files, and what a report must hold."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import write_text

from octavo.evaluation.prompts import PromptOptions
from octavo.verification import verify


def run_verify(packed: Path, model: Path, **options):
    """Verify with nine prompts."""
    text = write_text(packed.parent / "prompts.txt")
    return verify(packed, model, [str(text)], prompts=PromptOptions(16, batch=4), **options)


def change_json(path: Path, change) -> None:
    if path.is_file():
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))


def change_settings(path: Path, **settings) -> None:
    change_json(path, lambda content: content.update(settings))


def remarks(report) -> list[str]:
    """The remarks, without the one that stored scales need a calibration to be judged."""
    return [remark for remark in report.remarks if "was not judged: give --calibration" not in remark]


def complaints(folder: Path, model: Path, calibration: Path | None = None) -> list[str]:
    report = verify(folder, model, calibration=calibration)
    assert all(layer.weight_sqnr is not None for layer in report.layers)
    return [*map(str, report.findings), *remarks(report)]


def change_config(folder: Path, **settings) -> None:
    """Change settings in quantization_config; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changed = config["quantization_config"] | settings
    config["quantization_config"] = {key: value for key, value in changed.items() if value is not None}
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change) -> None:
    """Let `change` edit the dictionary of tensors in place, as a fault of their writer: checksums are removed."""
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    change_json(folder / "octavo.json", lambda record: record.pop("checksums", None))
    (folder / "checksums.json").unlink(missing_ok=True)
