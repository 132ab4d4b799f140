"""Verifying right folders: every reader agrees with the bytes, and budgets are held against the quality."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_examples import Example, small_shards
from tiny_models import Folders
from torch import Tensor
from verify_examples import change_tensors, run_verify

from octavo.artifact.safetensors_files import ShardReader
from octavo.evaluation import Budget
from octavo.evaluation.metrics import EmbeddingQuality, LogitQuality
from octavo.packing import pack
from octavo.verification import pipeline, verify
from octavo.verification.files import CheckpointFiles
from octavo.verification.result import Report

# The last is the distance of transformers' emulation from the reference: 0 if it widens in float32 and scales by token.
READERS = [
    ("llama", {"scheme": "channel"}, 0.0),
    ("mistral", {"scheme": "tensor"}, 0.0),
    ("qwen2", {"scheme": "block"}, 0.0),
    ("llama", {"scheme": "mx", "layers": {"*.o_proj": "channel", "*.down_proj": "block"}}, None),
    ("qwen2", {"scheme": "block", "layout": "fp8"}, None),
    ("opt", {"scheme": "mx"}, None),
    ("bert", {"scheme": "channel"}, 0.0),
    ("bert", {"scheme": "block", "layout": "fp8"}, None),
]


@pytest.mark.parametrize(("name", "options", "exact"), READERS)
def test_readers_agree_with_the_bytes(made: Folders, name: str, options: dict[str, Any], exact: float | None) -> None:
    report = run_verify(made(name, **options), made(name))
    assert not report.findings
    transformers, octavo, vllm = report.readers
    assert (transformers.name, transformers.outcome) == ("transformers", "agrees")
    assert (octavo.name, octavo.outcome) == ("octavo", "agrees")
    assert (vllm.outcome, vllm.note) == ("not run", "not installed")
    assert transformers.distance is not None
    assert transformers.tolerance is not None
    assert transformers.distance < (1e-5 if exact == 0 else transformers.tolerance)
    assert 0 < transformers.tolerance < 0.25
    assert octavo.distance is not None
    assert 0 < octavo.distance < 0.12
    assert report.sizes is not None
    assert 0.5 < report.sizes.packed / report.sizes.packed_bf16 < 0.53
    assert all(layer.output_sqnr and 25 < layer.output_sqnr < 32 for layer in report.layers)
    if name == "bert":
        assert isinstance(report.quality, EmbeddingQuality)
        assert isinstance(report.int8, EmbeddingQuality)
        assert 0.99 < report.quality.least <= report.quality.cosine.value < 1
        assert report.quality.cosine.value < report.int8.cosine.value < 1
    else:
        assert isinstance(report.quality, LogitQuality)
        assert isinstance(report.int8, LogitQuality)
        assert 0 < report.int8.kl.value < report.quality.kl.value < 0.1
        assert report.quality.prompts == 9


@pytest.mark.parametrize("name", ["llama", "llama untied", "gpt2", "qwen2"])
def test_what_was_packed_from_a_run(packed: dict[str, Example], made: Folders, name: str) -> None:
    report = run_verify(packed[name].packed, packed[name].run)
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]
    assert len(report.layers) == {"gpt2": 12, "llama untied": 12}.get(name, 14)  # on disk, q, k and v are three
    assert isinstance(report.quality, LogitQuality)
    assert 0 < report.quality.kl.value < 0.2


def test_budgets(made: Folders) -> None:
    """In one report those that are held and those that are not."""

    def check(name: str, *budgets: Budget) -> Report:
        return run_verify(made(name, scheme="channel"), made(name), budgets=list(budgets))

    report = check("llama", Budget("kl", 1e-4), Budget("kl", 1), Budget("ppl", -0.9), Budget("ppl", 1))
    assert [(finding.kind, finding.where) for finding in report.findings] == [("budget", "kl"), ("budget", "ppl")]
    assert "the limit is kl=0.0001" in str(report.findings[0])
    (finding,) = check("bert", Budget("cosine", 0.9), Budget("cosine", 0.99999999)).findings
    assert (finding.kind, finding.where) == ("budget", "cosine")
    assert "the limit is cosine=1" in str(finding)
    with pytest.raises(ValueError, match="a budget is measured on text: give --data"):
        verify(made("llama", scheme="channel"), made("llama"), budgets=[Budget("kl", 1)])
    with pytest.raises(ValueError, match="budgets of kl and ppl are for language models, those of cosine for encoders"):
        check("bert", Budget("kl", 1))
    with pytest.raises(ValueError, match="those of cosine for encoders"):
        check("llama", Budget("cosine", 0.9))


def test_without_data(made: Folders, tmp_path: Path) -> None:
    with small_shards(100_000):
        pack(made("opt"), tmp_path / "out")
    stages: set[str] = set()
    report = verify(tmp_path / "out", made("opt"), progress=lambda done, total, doing: stages.add(doing))
    assert report.ok
    assert report.quality is None
    assert [reader.outcome for reader in report.readers] == ["agrees", "agrees", "not run"]
    assert all(layer.output_sqnr is None and layer.weight_sqnr for layer in report.layers)
    assert stages == {"reading tensors", "comparing weights", "opening with every reader"}


def test_folded_weights_are_compared_by_their_outputs(made: Folders, tmp_path: Path) -> None:
    """The fold multiplies the rows of up_proj and divides the columns of down_proj: the same function."""
    folded = shutil.copytree(made("llama"), tmp_path / "folded")

    def fold(tensors: dict[str, Tensor]) -> None:
        factor = torch.exp2(torch.randint(-2, 3, (256,)).float()).bfloat16()
        tensors["model.layers.0.mlp.up_proj.weight"] *= factor[:, None]
        tensors["model.layers.0.mlp.down_proj.weight"] /= factor

    change_tensors(folded, fold)
    pack(folded, tmp_path / "out")
    assert not run_verify(tmp_path / "out", made("llama")).ok
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    (tmp_path / "out" / "octavo.json").write_text(json.dumps(record | {"folded": ["smooth"]}))
    report = run_verify(tmp_path / "out", made("llama"))
    assert report.ok
    assert "something was folded into the weights" in report.remarks[0]
    (tmp_path / "out" / "octavo.json").unlink()
    assert verify(tmp_path / "out", made("llama"), folded=True).ok
    assert isinstance(report.quality, LogitQuality)
    assert report.quality.kl.value < 0.1


def test_a_device_or_a_model_that_is_not_there(made: Folders, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device cuda was asked for"):
            verify(tmp_path, made("llama"), device="cuda")
    with pytest.raises(FileNotFoundError, match="there is no folder .*: give a run of octavo train, or"):
        verify(tmp_path, tmp_path / "none")


def test_weights_are_widened_one_at_a_time(made: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While prompts run, a layer's weights are freed before the next layer's are read."""
    monkeypatch.setattr(pipeline, "try_readers", lambda *_: iter(()))  # readers hold whole models
    alive: list[Any] = []
    most = 0
    for cls in (CheckpointFiles, ShardReader):

        def counted(self: Any, name: str, get: Any = cls.get) -> Tensor:
            nonlocal most
            alive[:] = [t for t in alive if t() is not None]
            tensor: Tensor = get(self, name)
            if name.endswith("proj.weight"):
                most = max(most, len(alive))
                alive.append(torch.utils.weak.WeakIdRef(tensor))
            return tensor

        monkeypatch.setattr(cls, "get", counted)
    run_verify(made("llama", scheme="channel"), made("llama"))
    assert most == 1  # MODEL's weight, while the packed weight of the same layer is read


def test_right_folders_have_no_findings(good: dict[str, Path], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "try_readers", lambda *_: iter(()))
    for folder in good.values():
        assert not verify(folder, model).findings
