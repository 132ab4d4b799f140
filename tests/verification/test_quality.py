"""The quality of the model and of each layer is that of transformers' models, and of NumPy."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from metrics import sqnr
from quality import compare_embeddings, compare_logits
from safetensors.torch import load_file
from tiny_models import TEXT, Folders, open_theirs, outputs
from torch import Tensor
from verify_examples import change_tensors, run_verify

from octavo.evaluation.metrics import EmbeddingQuality, LogitQuality
from octavo.packing import pack
from octavo.verification.result import LayerReport

DOWN = "model.layers.1.mlp.down_proj"


def prompts() -> list[Tensor]:
    """The windows of 64 bytes that `run_verify` takes, longest first."""
    data = TEXT.encode()
    rows = [torch.tensor(list(data[i : i + 64]))[None] for i in range(0, len(data), 64)]
    return sorted(rows, key=lambda row: -row.shape[1])


def open_float32(folder: Path) -> Any:
    return open_theirs(folder, torch.float32)


def test_quality_is_that_of_transformers(made: Folders) -> None:
    folder = made("llama", scheme="channel")
    actual = run_verify(folder, made("llama")).quality
    expected = compare_logits(*(partial(outputs, open_float32(path)) for path in (made("llama"), folder)), prompts())
    assert isinstance(actual, LogitQuality)
    assert actual.prompts == expected.prompts
    for name in ("kl", "perplexity", "reference_perplexity", "perplexity_ratio", "top1"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), rel=1e-3)


def test_int8_is_the_layers_in_int8(made: Folders, tmp_path: Path) -> None:
    """The oracle is the BF16 model in transformers, with a hook on each packed layer."""
    pack(made("qwen2"), tmp_path / "out", skip=["*.down_proj"])
    actual = run_verify(tmp_path / "out", made("qwen2")).int8
    plain, int8 = open_float32(made("qwen2")), open_float32(made("qwen2"))

    def hook(module: Any, args: tuple[Tensor], y: Tensor) -> Tensor:
        x, w = args[0].double(), module.weight.double()
        s_x, s_w = (t.abs().amax(-1, keepdim=True) / 127 for t in (x, w))
        y = ((x / s_x).round() * s_x) @ ((w / s_w).round() * s_w).T
        return (y if module.bias is None else y + module.bias.double()).float()

    for name, module in int8.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")):
            module.register_forward_hook(hook)
    expected = compare_logits(partial(outputs, plain), partial(outputs, int8), prompts())
    assert isinstance(actual, LogitQuality)
    assert actual.kl.value == pytest.approx(expected.kl.value, rel=0.02)  # in float64, ties round to the other side


def test_embeddings_are_those_of_transformers(made: Folders) -> None:
    folder = made("bert", scheme="channel")
    actual = run_verify(folder, made("bert")).quality
    expected = compare_embeddings(*(partial(outputs, open_float32(path)) for path in (made("bert"), folder)), prompts())
    assert isinstance(actual, EmbeddingQuality)
    assert 1 - actual.cosine.value == pytest.approx(1 - expected.cosine.value, rel=0.01)
    assert 1 - actual.least == pytest.approx(1 - expected.least, rel=0.01)


def inputs_of(model: Path, layer: str, batches: list[Tensor]) -> Tensor:
    """The inputs [tokens, K] of a layer in the BF16 model."""
    plain = open_float32(model)
    inputs: list[Tensor] = []

    def hook(module: Any, args: tuple[Tensor]) -> None:
        inputs.append(args[0].detach().flatten(0, -2))

    plain.get_submodule(layer).register_forward_pre_hook(hook)
    for ids in batches:
        plain(ids)
    return torch.cat(inputs)


def report_of(layer: str, packed: Path, model: Path) -> LayerReport:
    report = run_verify(packed, model)
    assert not report.findings
    return next(row for row in report.layers if row.name == layer)


def test_the_errors_of_a_layer(made: Folders) -> None:
    layer = report_of(DOWN, made("mistral", scheme="channel"), made("mistral"))
    x = inputs_of(made("mistral"), DOWN, prompts()).double()
    w = load_file(made("mistral") / "model.safetensors")[f"{DOWN}.weight"].double()
    x_q, w_q = rows_of_e4m3(x), rows_of_e4m3(w)
    assert layer.weight_sqnr == pytest.approx(sqnr(w, w_q), abs=0.01)
    assert layer.output_sqnr == pytest.approx(sqnr(x @ w.T, x_q @ w_q.T), abs=0.05)
    assert layer.clip_rate is None
    assert layer.headroom is None
    assert layer.shape == (128, 256)


def rows_of_e4m3(x: Tensor) -> Tensor:
    """x [M, K], each row rounded to e4m3 by its amax."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return torch.from_numpy((x / scale).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float64)) * scale


def test_clipping_and_headroom(made: Folders, tmp_path: Path) -> None:
    folder = made("mistral", scheme="static")
    right = report_of(DOWN, folder, made("mistral"))
    assert right.headroom == pytest.approx(1, abs=0.05)  # calibrated in BF16
    assert right.clip_rate is not None
    assert right.clip_rate < 1e-3

    shutil.copytree(folder, tmp_path / "clips")
    change_tensors(tmp_path / "clips", lambda t: t.update({f"{DOWN}.input_scale": t[f"{DOWN}.input_scale"] / 8}))
    wrong = report_of(DOWN, tmp_path / "clips", made("mistral"))
    x = inputs_of(made("mistral"), DOWN, prompts()).abs()
    limit = 448 * float(load_file(tmp_path / "clips" / "model.safetensors")[f"{DOWN}.input_scale"])
    assert wrong.headroom == pytest.approx(limit / float(x.max()), rel=1e-4)
    assert wrong.clip_rate == pytest.approx(float((x > limit).double().mean()), rel=1e-3)
    assert wrong.clip_rate > 0.01
    assert wrong.output_sqnr is not None
    assert right.output_sqnr is not None
    assert wrong.output_sqnr < right.output_sqnr - 5
