"""Sizes from the files, and the forecast from arithmetic."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from torch import Tensor
from verify_examples import make_model

from octavo.hf.meta_model import transformers_meta_model
from octavo.packing import pack
from octavo.verification.checks import check_folder
from octavo.verification.files import Bytes, read_bytes
from octavo.verification.forecast import forecast, measure_sizes, weighted_gain
from octavo.verification.layer_spec import Words
from octavo.verification.streamed_model import required_by

CHANNEL = Words(1, 0, "token")


def layer(n: int, k: int, words: Words = CHANNEL, scales: int = 4) -> tuple[Bytes, dict[str, Words]]:
    """A folder of one layer, of which only sizes are known."""
    dtypes = {"a.weight": "F8_E4M3", "a.weight_scale": "F32"}
    return Bytes(Path(), dtypes=dtypes, shapes={"a.weight": (n, k), "a.weight_scale": (scales // 4,)}), {"a": words}


def test_few_tokens_are_the_ratio_of_bytes() -> None:
    [row] = forecast(*layer(4096, 1024, scales=4 * 4096))
    n, k = 4096, 1024
    for tokens in (1, 16, 64):
        activations = 2 * tokens * (n + k)
        assert row.gains[tokens] == pytest.approx((2 * n * k + activations) / (n * k + 4 * n + activations))
    assert 1.9 < row.gains[1] < 2  # type: ignore[operator]


def test_many_tokens_are_the_table() -> None:
    [row] = forecast(*layer(4096, 1024))
    table = json.loads((files("octavo.nn.speedup") / "gains_h100.json").read_text())
    for tokens in (512, 2048, 8192):
        [point] = [p for p in table["grid"] if (p["recipe"], p["M"], p["K"], p["N"]) == ("rowwise", tokens, 1024, 4096)]
        assert row.gains[tokens] == pytest.approx(point["bf16_ms"] / point["fp8_ms"])


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (Words(0, 0, "static"), True),
        (Words(128, 128, "token", 128), True),
        (Words(0, 0, "tensor"), True),
        (Words(1, 32, "token", 32, exponents=True), False),
        (Words(1, 64, "token", 64), False),
        (Words(1, 0, "token", integers=True), False),
        (Words(1, 0, "none"), False),
    ],
)
def test_what_no_table_has_is_unknown(words: Words, known: bool) -> None:
    [row] = forecast(*layer(2048, 2048, words))
    assert [row.gains[tokens] is not None for tokens in (1, 16, 64, 512, 2048, 8192)] == [True] * 3 + [known] * 3
    assert (weighted_gain([row], 512) is None) == (not known)


def test_sizes_and_rows_of_a_folder(tmp_path: Path) -> None:
    report = pack(make_model(tmp_path / "model", "llama"), tmp_path / "out", layers={"*.o_proj": "block"})
    read = read_bytes(tmp_path / "out")
    layers = check_folder(read, required_by(transformers_meta_model(tmp_path / "out")))
    sizes = measure_sizes(read, layers)
    assert (sizes.packed, sizes.packed_bf16) == (report.packed_bytes, report.bf16_bytes)
    assert sizes.whole_bf16 == sum(t.nbytes for t in tensors(tmp_path / "model"))
    assert sizes.whole == sum(t.nbytes for t in tensors(tmp_path / "out"))
    rows = forecast(read, layers)
    assert [(row.shape, row.count) for row in rows] == [
        ((256, 128), 4), ((128, 128), 6), ((128, 256), 2), ((128, 128), 2)
    ]  # fmt: skip
    work = [row.count * row.shape[0] * row.shape[1] for row in rows]
    gains = [row.gains[16] for row in rows]
    want = sum(work) / sum(w / g for w, g in zip(work, gains, strict=True) if g)
    assert weighted_gain(rows, 16) == pytest.approx(want)


def tensors(folder: Path) -> list[Tensor]:
    read = read_bytes(folder)
    return [read.get(name) for name in read.shapes]
