"""Tensors with planted damage: one clear finding that names it, nothing run, and no traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model
from torch import Tensor
from verify_examples import Damage, change_tensors, damaged, expect

from octavo.verification import verify

pytestmark = pytest.mark.usefixtures("no_reader")

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def change(edit: Callable[[dict[str, Tensor]], None]) -> Damage:
    return lambda folder: change_tensors(folder, edit)


def put(name: str, place: Any, value: float) -> Damage:
    """Overwrite elements of a tensor; those of one byte are overwritten with a byte."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensor = tensors[name]
        tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype)[place] = value

    return change(edit)


def replaced(name: str, function: Callable[[Tensor], Tensor]) -> Damage:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = function(tensors[name])

    return change(edit)


def renamed(old: str, new: str) -> Damage:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change(edit)


TENSORS: list[tuple[str, Damage, str, str, str]] = [
    ("channel", put(f"{Q}.weight_scale", (3, 0), torch.nan), "scale", f"{Q}.weight_scale", "1 of 128 are NaN"),
    ("channel", put(f"{Q}.weight_scale", (3, 0), torch.inf), "scale", f"{Q}.weight_scale", "1 of 128 are inf"),
    ("channel", put(f"{Q}.weight_scale", slice(2), 0), "scale", f"{Q}.weight_scale", "2 of 128 are zero"),
    ("block", put(f"{DOWN}.weight_scale", (0, 1), -1), "scale", f"{DOWN}.weight_scale", "1 of 2 are negative"),
    ("mx", put(f"{Q}.weight_scale", (0, 0), 255), "scale", f"{Q}.weight_scale", "1 of 512 are NaN (255)"),
    ("static", put(f"{Q}.input_scale", 0, 0), "scale", f"{Q}.input_scale", "1 of 1 are zero"),
    ("channel", put(f"{Q}.weight", (5, 5), 0xFF), "tensor", f"{Q}.weight", "must be finite: 1 of 16384 are NaN"),
    ("channel", put("model.norm.weight", 4, torch.inf), "tensor", "model.norm.weight", "must be finite: 1 of 128"),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("tensor", replaced(f"{Q}.weight_scale", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("fp8", replaced(f"{Q}.weight_scale_inv", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("mx", replaced(f"{Q}.weight_scale", lambda s: 254 - s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s * 2), "weights", f"{Q}.weight", "128 of 128 scales are not"),
    ("block", replaced(f"{DOWN}.weight_scale", lambda s: s * 0.7), "weights", f"{DOWN}.weight", "2 of 2 scales are"),
    ("mx", put(f"{Q}.weight_scale", (9, 1), 110), "weights", f"{Q}.weight", "1 of 512 scales are not: [9, 1] is "),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s[:64]), "scale", f"{Q}.weight_scale", "have shape [128, 1]"),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s.T), "scale", f"{Q}.weight_scale", "it has [1, 128]"),
    ("channel", replaced(f"{Q}.weight_scale", Tensor.double), "scale", f"{Q}.weight_scale", "it is F64"),
    ("channel", replaced(f"{Q}.weight", lambda w: w[:64]), "tensor", f"{Q}.weight", "must have shape [128, 128]"),
    ("channel", renamed(f"{Q}.weight_scale", f"{Q}.weight_scale_inv"), "scale", f"{Q}.weight_scale", "another layout"),
    ("fp8", renamed(f"{Q}.weight_scale_inv", f"{Q}.scale"), "scale", f"{Q}.weight_scale_inv", "is missing"),
    ("static", renamed(f"{Q}.input_scale", f"{Q}.old_scale"), "scale", f"{Q}.input_scale", "is missing"),
    ("channel", renamed("model.norm.weight", "model.norm.w"), "tensor", "model.norm.weight", "is missing, and the"),
    ("channel", renamed(f"{Q}.weight", f"{Q}.w"), "tensor", f"{Q}.weight", "is missing, and the model needs it"),
    (
        "channel", replaced(f"{Q}.weight", lambda w: w.float().bfloat16()), "config", f"{Q}.weight",
        f"is stored in BF16, and the list of ignored modules lacks {Q}",
    ),
    (
        "channel", replaced(f"{Q}.weight", lambda w: w.view(torch.uint8).flip(0).view(w.dtype)), "weights",
        f"{Q}.weight", "the bytes are not MODEL's weight",
    ),
    (
        "channel", replaced("model.norm.weight", lambda w: w * 1.5), "weights", "model.norm.weight",
        "is not MODEL's, rounded to bfloat16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "kind", "where", "message"), TENSORS)
def test_tensors(
    good: dict[str, Path], model: Path, tmp_path: Path, name: str, damage: Damage, kind: str, where: str, message: str
) -> None:
    expect(verify(damaged(good[name], tmp_path / "bad", damage), model), kind, where, message)


def test_another_model(good: dict[str, Path], tmp_path: Path) -> None:
    """It has the same sizes, other sizes, or another architecture."""
    report = verify(good["block"], make_model(tmp_path / "seed", "llama", seed=1))
    assert any("the bytes are not MODEL's weight" in str(finding) for finding in report.findings)
    report = verify(good["block"], make_model(tmp_path / "wide", "llama", intermediate_size=384))
    assert any("MODEL has shape [384, 128], the folder [256, 128]" in str(finding) for finding in report.findings)
    report = verify(good["block"], make_model(tmp_path / "opt", "opt"))
    assert any("MODEL has no such tensor: the folder is of another model" in str(f) for f in report.findings)
