"""bench/gpu/gradients.py, the model small and on the CPU."""

from pathlib import Path

import pytest
import torch

from bench.gpu import gradients
from bench.gpu.gpt_trainer import Data
from bench.gpu.pretrain import CONFIGS
from octavo.models.tokenizer import ByteTokenizer
from octavo.text import ReadReport, read_text
from octavo.train.data import build_corpus

CONFIG = CONFIGS["300m"].change(
    layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=32, vocabulary=256, batch=2, accumulate=2,
    warmup=2, compile=False,
)  # fmt: skip


def test_gradients_in_fp8_are_those_in_fp32_and_noise() -> None:
    corpus = build_corpus(read_text([str(Path(__file__))]).texts, ByteTokenizer(), 32, 0.2)
    data = Data(corpus, ByteTokenizer(), ReadReport((), 0, 0, 0, {}, ()))
    bf16, rowwise = gradients.measure(["bf16", "rowwise"], CONFIG, data, 3)
    assert rowwise["converted"] == 14
    for kind, found in bf16["kinds"].items():
        assert found["error"] <= found["largest"] < 0.05, kind
        assert found["projection"] == pytest.approx(1, abs=0.01), kind
    for kind in ("q_proj", "o_proj", "gate_proj", "down_proj"):
        assert rowwise["kinds"][kind]["error"] > 2 * bf16["kinds"][kind]["error"], kind
        assert rowwise["kinds"][kind]["projection"] == pytest.approx(1, abs=0.1), kind
    assert rowwise["cached"] == rowwise["fresh"] != bf16["fresh"]


def test_a_lost_part_lowers_the_projection() -> None:
    e = torch.tensor([3.0, 4.0])
    (found,) = gradients.compared({"a.q.weight": torch.tensor([3.0, 0.0])}, {"a.q.weight": e}).values()
    assert found == {"error": 0.8, "largest": 0.8, "projection": 0.36}
