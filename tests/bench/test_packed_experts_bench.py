"""bench/gpu/packed_experts.py at a tiny size, and its table."""

import pytest

from bench.gpu import packed_experts
from bench.gpu.moe import Shape
from bench.report import experts


def test_every_scheme_is_measured_and_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts, "TOKENS", {"decode": (2,), "prefill": (8,)})
    found = packed_experts.measure(Shape(4, 64, 48, 2, 8), rounds=1)
    assert [(cell["tokens"], cell["kind"]) for cell in found["cells"]] == [(2, "decode"), (8, "prefill")]
    result = {"machine": {"gpu": "none"}, "shapes": {"mixtral": found, "small experts": found}}
    text = experts.packed_experts({"gpu_packed_experts": result})
    assert text.startswith("| experts | tokens | BF16, ms | channel | static | block |")
    ms = found["cells"][1]["ms"]
    assert f"| {ms['bf16']['median'] / ms['block']['median']:.3f}x |" in text
    assert experts.packed_experts({}) == "Not measured yet."


def test_wrong_outputs_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts, "LEAST_DB", 100.0)
    with pytest.raises(AssertionError):
        packed_experts.measure(Shape(4, 64, 48, 2, 8), rounds=1)
