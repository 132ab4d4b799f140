"""Verifying right folders: every reader agrees with the bytes, and the numbers are those that transformers gives."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from packed_examples import Example, small_shards
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from verify_examples import change_config, change_tensors, make_model, write_text

from octavo.artifact.safetensors_files import ShardReader
from octavo.calibration import calibrate
from octavo.evaluation import Budget, PromptOptions, metrics
from octavo.evaluation.metrics import EmbeddingQuality, LogitQuality
from octavo.hf.meta_model import transformers_meta_model
from octavo.packing import pack
from octavo.verification import pipeline as verification_pipeline
from octavo.verification.checks import check_folder
from octavo.verification.files import CheckpointFiles, read_files
from octavo.verification.kv_cache import cache_scales
from octavo.verification.pipeline import verify
from octavo.verification.reference import PackedLayers
from octavo.verification.result import Report
from octavo.verification.streamed_model import StreamedModel, required_by

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    write_text(root / "text.txt")
    made = {name: make_model(root / name, name) for name in ("llama", "mistral", "qwen2", "opt", "bert")}
    return made | {"text": root / "text.txt"}


def run(packed: Path, model: Path, text: Path, **how: Any) -> Report:
    return verify(packed, model, [str(text)], prompts=PromptOptions(16, batch=4), **how)


# How far transformers' own emulation is from ours: 0 where it widens in float32 and scales by token.
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


@pytest.mark.parametrize(("name", "how", "exact"), READERS)
def test_readers_agree_with_the_bytes(
    models: dict[str, Path], tmp_path: Path, name: str, how: dict[str, Any], exact: float | None
) -> None:
    pack(models[name], tmp_path / "out", **how)
    report = run(tmp_path / "out", models[name], models["text"])
    assert not report.findings
    theirs, ours, vllm = report.readers
    assert (theirs.name, theirs.outcome) == ("transformers", "agrees")
    assert (ours.name, ours.outcome) == ("octavo", "agrees")
    assert (vllm.outcome, vllm.note) == ("not run", "not installed")
    assert theirs.distance is not None
    assert theirs.tolerance is not None
    assert theirs.distance < (1e-5 if exact == 0 else theirs.tolerance)
    assert 0 < theirs.tolerance < 0.25
    assert ours.distance is not None
    assert 0 < ours.distance < 0.12
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
def test_what_was_packed_from_a_run(packed: dict[str, Example], models: dict[str, Path], name: str) -> None:
    report = run(packed[name].packed, packed[name].run, models["text"])
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]
    assert len(report.layers) == {"gpt2": 12, "llama untied": 12}.get(name, 14)  # on disk, q, k and v are three
    assert isinstance(report.quality, LogitQuality)
    assert 0 < report.quality.kl.value < 0.2


def prompts_of(text: Path) -> list[Tensor]:
    """The windows of 64 bytes that verify takes of the text, longest first."""
    data = text.read_bytes()
    rows = [torch.tensor(list(data[i : i + 64]))[None] for i in range(0, len(data), 64)]
    return sorted(rows, key=lambda row: -row.shape[1])


def test_quality_is_that_of_transformers(models: dict[str, Path], tmp_path: Path) -> None:
    pack(models["llama"], tmp_path / "out")
    found = run(tmp_path / "out", models["llama"], models["text"]).quality
    plain, theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (models["llama"], tmp_path / "out")
    )
    want = metrics.compare_logits(
        lambda ids: plain(ids).logits, lambda ids: theirs(ids).logits, prompts_of(models["text"])
    )
    assert isinstance(found, LogitQuality)
    assert found.prompts == want.prompts
    for name in ("kl", "perplexity", "reference_perplexity", "perplexity_ratio", "top1"):
        mine, other = getattr(found, name), getattr(want, name)
        assert (mine.value, mine.low, mine.high) == pytest.approx((other.value, other.low, other.high), rel=1e-3)


def test_int8_is_the_layers_in_int8(models: dict[str, Path], tmp_path: Path) -> None:
    """Against a BF16 model of transformers whose packed layers a hook replaces."""
    pack(models["qwen2"], tmp_path / "out", skip=["*.down_proj"])
    found = run(tmp_path / "out", models["qwen2"], models["text"]).int8
    plain, other = (AutoModelForCausalLM.from_pretrained(models["qwen2"], dtype=torch.float32).eval() for _ in "ab")

    def hook(module: Any, args: tuple[Tensor], y: Tensor) -> Tensor:
        x, w = args[0].double(), module.weight.double()
        s_x, s_w = (t.abs().amax(-1, keepdim=True) / 127 for t in (x, w))
        y = ((x / s_x).round() * s_x) @ ((w / s_w).round() * s_w).T
        return (y if module.bias is None else y + module.bias.double()).float()

    for name, module in other.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")):
            module.register_forward_hook(hook)
    want = metrics.compare_logits(
        lambda ids: plain(ids).logits, lambda ids: other(ids).logits, prompts_of(models["text"])
    )
    assert isinstance(found, LogitQuality)
    assert found.kl.value == pytest.approx(want.kl.value, rel=0.02)  # a tie goes the other way in float64


def test_embeddings_are_those_of_transformers(models: dict[str, Path], tmp_path: Path) -> None:
    pack(models["bert"], tmp_path / "out")
    found = run(tmp_path / "out", models["bert"], models["text"]).quality
    plain, theirs = (
        AutoModel.from_pretrained(f, dtype=torch.float32).eval() for f in (models["bert"], tmp_path / "out")
    )
    want = metrics.compare_embeddings(
        lambda ids: plain(ids).last_hidden_state, lambda ids: theirs(ids).last_hidden_state, prompts_of(models["text"])
    )
    assert isinstance(found, EmbeddingQuality)
    assert 1 - found.cosine.value == pytest.approx(1 - want.cosine.value, rel=0.01)
    assert 1 - found.least == pytest.approx(1 - want.least, rel=0.01)


def inputs_of(model: Path, layer: str, batches: list[Tensor]) -> np.ndarray[Any, Any]:
    """What the layer reads in the BF16 model, [tokens, K]."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    seen: list[Tensor] = []
    plain.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for ids in batches:
        plain(ids)
    return torch.cat([x.flatten(0, -2) for x in seen]).numpy()


def test_the_errors_of_a_layer(models: dict[str, Path], tmp_path: Path) -> None:
    pack(models["mistral"], tmp_path / "out")
    report = run(tmp_path / "out", models["mistral"], models["text"])
    found = next(layer for layer in report.layers if layer.name == DOWN)
    x = inputs_of(models["mistral"], DOWN, prompts_of(models["text"])).astype(float)
    w = load_file(models["mistral"] / "model.safetensors")[f"{DOWN}.weight"].double().numpy()
    x_q, w_q = rows_of_e4m3(x), rows_of_e4m3(w)
    assert found.weight_sqnr == pytest.approx(db(w, w_q), abs=0.01)
    assert found.output_sqnr == pytest.approx(db(x @ w.T, x_q @ w_q.T), abs=0.05)
    assert found.clip_rate is None
    assert found.headroom is None
    assert found.shape == (128, 256)


def rows_of_e4m3(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30) / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale


def db(truth: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10((truth**2).sum() / ((truth - found) ** 2).sum()))


def test_clipping_and_headroom(models: dict[str, Path], tmp_path: Path) -> None:
    calibrate(models["mistral"], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(16, 64))
    pack(models["mistral"], tmp_path / "out", scheme="static", calibration=tmp_path / "c")
    x = inputs_of(models["mistral"], DOWN, prompts_of(models["text"]))

    def of(folder: Path) -> Any:
        report = run(folder, models["mistral"], models["text"])
        assert not report.findings
        return next(layer for layer in report.layers if layer.name == DOWN)

    right = of(tmp_path / "out")
    assert right.headroom == pytest.approx(1, abs=0.05)  # calibrated in BF16
    assert right.clip_rate < 1e-3
    shutil.copytree(tmp_path / "out", tmp_path / "clips")
    change_tensors(tmp_path / "clips", lambda t: t.update({f"{DOWN}.input_scale": t[f"{DOWN}.input_scale"] / 8}))
    wrong = of(tmp_path / "clips")
    limit = 448 * float(load_file(tmp_path / "clips" / "model.safetensors")[f"{DOWN}.input_scale"])
    assert wrong.headroom == pytest.approx(limit / np.abs(x).max(), rel=1e-4)
    assert wrong.clip_rate == pytest.approx((np.abs(x) > limit).mean(), rel=1e-3)
    assert wrong.clip_rate > 0.01
    assert wrong.output_sqnr < right.output_sqnr - 5


def test_budgets(models: dict[str, Path], tmp_path: Path) -> None:
    pack(models["llama"], tmp_path / "out")
    report = run(tmp_path / "out", models["llama"], models["text"], budgets=[Budget("kl", 1e-4), Budget("ppl", -0.9)])
    assert [(finding.kind, finding.where) for finding in report.findings] == [("budget", "kl"), ("budget", "ppl")]
    assert "the limit is kl=0.0001" in str(report.findings[0])
    assert run(tmp_path / "out", models["llama"], models["text"], budgets=[Budget("kl", 1), Budget("ppl", 1)]).ok
    with pytest.raises(ValueError, match="a budget is measured on text: give --data"):
        verify(tmp_path / "out", models["llama"], budgets=[Budget("kl", 1)])
    with pytest.raises(ValueError, match="budgets of kl and ppl are for language models, those of cosine for encoders"):
        run(tmp_path / "out", models["bert"], models["text"], budgets=[Budget("kl", 1)])
    with pytest.raises(ValueError, match="those of cosine for encoders"):
        run(tmp_path / "out", models["llama"], models["text"], budgets=[Budget("cosine", 0.9)])
    pack(models["bert"], tmp_path / "bert")
    assert run(tmp_path / "bert", models["bert"], models["text"], budgets=[Budget("cosine", 0.9)]).ok
    (finding,) = run(tmp_path / "bert", models["bert"], models["text"], budgets=[Budget("cosine", 0.99999999)]).findings
    assert (finding.kind, finding.where) == ("budget", "cosine")
    assert "the limit is cosine=1" in str(finding)


def test_without_data(models: dict[str, Path], tmp_path: Path) -> None:
    with small_shards(100_000):
        pack(models["opt"], tmp_path / "out")
    told: list[tuple[int, int, str]] = []
    report = verify(tmp_path / "out", models["opt"], progress=lambda *what: told.append(what))
    assert report.ok
    assert report.quality is None
    assert [reader.outcome for reader in report.readers] == ["agrees", "agrees", "not run"]
    assert all(layer.output_sqnr is None and layer.weight_sqnr for layer in report.layers)
    assert {doing for _, _, doing in told} == {"reading tensors", "comparing weights", "opening with every reader"}


def test_folded_weights_are_compared_by_what_they_do(models: dict[str, Path], tmp_path: Path) -> None:
    """down_proj's input scaled in up_proj, and back in down_proj: the same function, other weights."""
    folded = shutil.copytree(models["llama"], tmp_path / "folded")

    def fold(tensors: dict[str, Tensor]) -> None:
        factor = torch.exp2(torch.randint(-2, 3, (256,)).float()).bfloat16()
        tensors["model.layers.0.mlp.up_proj.weight"] *= factor[:, None]
        tensors["model.layers.0.mlp.down_proj.weight"] /= factor

    change_tensors(folded, fold)
    pack(folded, tmp_path / "out")
    assert not run(tmp_path / "out", models["llama"], models["text"]).ok
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    (tmp_path / "out" / "octavo.json").write_text(json.dumps(record | {"folded": ["smooth"]}))
    report = run(tmp_path / "out", models["llama"], models["text"])
    assert report.ok
    assert "something was folded into the weights" in report.remarks[0]
    (tmp_path / "out" / "octavo.json").unlink()
    assert verify(tmp_path / "out", models["llama"], folded=True).ok
    assert isinstance(report.quality, LogitQuality)
    assert report.quality.kl.value < 0.1


def test_settings_that_cannot_be(models: dict[str, Path], tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device cuda was asked for"):
            verify(tmp_path, models["llama"], device="cuda")
    with pytest.raises(FileNotFoundError, match="is missing: give a run of octavo train, or"):
        verify(tmp_path, tmp_path / "none")


def test_weights_are_widened_one_at_a_time(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts run, no tensor of a layer outlives the layer."""
    pack(models["llama"], tmp_path / "out")
    monkeypatch.setattr(verification_pipeline, "try_readers", lambda *_: iter(()))  # those hold whole models
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
    run(tmp_path / "out", models["llama"], models["text"])
    assert most == 1  # MODEL's and the packed one of the same layer


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "opt"])
def test_keys_and_values_are_rounded_as_transformers_does(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    calibrate(models[name], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(8, 64))
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    pack(models[name], plain)
    pack(models[name], cached, calibration=tmp_path / "c", kv_cache="fp8")
    change_tensors(
        cached, lambda t: t.update({key: 9 * s for key, s in t.items() if key.endswith(("k_scale", "v_scale"))})
    )
    before, after = (run(folder, models[name], models["text"]) for folder in (plain, cached))
    assert not after.findings
    assert "keys and values are rounded by the folder's scales, as its cache does" in after.remarks
    theirs, ours = after.readers[:2]
    assert (theirs.outcome, ours.outcome) == ("agrees", "agrees")
    assert theirs.distance is not None
    assert theirs.distance < 1e-5
    assert isinstance(before.quality, LogitQuality)
    assert isinstance(after.quality, LogitQuality)
    assert before.quality.kl.value < after.quality.kl.value < 2


def test_scales_of_keys_and_values_by_every_name(models: dict[str, Path], tmp_path: Path) -> None:
    calibrate(models["llama"], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(8, 64))
    found = []
    for layout in ("compressed-tensors", "modelopt", "autofp8"):
        how = {"scheme": "static", "calibration": tmp_path / "c", "kv_cache": "fp8", "layout": layout}
        pack(models["llama"], tmp_path / layout, **how)
        found.append(cache_scales(read_files(tmp_path / layout)))
    assert list(found[0]) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for other in found[1:]:
        assert other == found[0]

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".k_scale")]:
            tensors[f"{name.removesuffix('k_scale')}kv_scale"] = tensors.pop(name)
            del tensors[f"{name.removesuffix('k_scale')}v_scale"]

    change_tensors(tmp_path / "autofp8", rename)
    assert {name: k for name, (k, v) in cache_scales(read_files(tmp_path / "autofp8")).items() if k == v} == {
        name: k for name, (k, _) in found[0].items()
    }
    change_tensors(tmp_path / "autofp8", lambda tensors: tensors.pop("model.layers.1.self_attn.kv_scale"))
    assert cache_scales(read_files(tmp_path / "autofp8")) == {}


def test_layouts_of_other_writers(models: dict[str, Path], tmp_path: Path) -> None:
    """One scale a tensor as ModelOpt and AutoFP8 name and shape it, with those of a KV cache: read, and run here."""
    calibrate(models["mistral"], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(8, 64))
    pack(models["mistral"], tmp_path / "ours", scheme="static", calibration=tmp_path / "c")
    ours = read_files(tmp_path / "ours")
    meta_model = partial(transformers_meta_model, ours.config, tmp_path / "ours")
    required = required_by(meta_model())
    ids = torch.randint(256, (2, 20))

    def logits(read: CheckpointFiles) -> Tensor:
        layers = check_folder(read, required)
        assert not read.findings, [str(finding) for finding in read.findings]
        assert len(layers) == 14
        return StreamedModel(meta_model(), read.get, read.shapes, PackedLayers(read, layers, "cpu"))(ids)

    want = logits(ours)
    for name, settings, cache in (
        ("modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, "k_proj.k"),
        ("autofp8", {"quant_method": "fp8", "activation_scheme": "static"}, "kv"),
    ):
        theirs = shutil.copytree(tmp_path / "ours", tmp_path / name)
        change_config(theirs, config_groups=None, format=None, quantization_status=None, **settings)

        def flatten(tensors: dict[str, Tensor], cache: str = cache) -> None:
            tensors.update({key: t.reshape(()) for key, t in tensors.items() if key.endswith("_scale")})
            tensors[f"model.layers.0.self_attn.{cache}_scale"] = torch.tensor(0.5)

        change_tensors(theirs, flatten)
        assert torch.equal(logits(read_files(theirs)), want)
    side = shutil.copytree(tmp_path / "modelopt", tmp_path / "side")
    config = json.loads((side / "config.json").read_text())
    said = config.pop("quantization_config")
    (side / "config.json").write_text(json.dumps(config))
    words = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": said["ignore"]}
    (side / "hf_quant_config.json").write_text(json.dumps({"quantization": words}))
    assert torch.equal(logits(read_files(side)), want)
