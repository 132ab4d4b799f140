"""A fresh directory with what the pages ask their reader to bring: a text, and a Hugging Face model folder."""

import argparse
import inspect
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from octavo.models.tokenizer import ByteTokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`book.txt`, `texts/` and `models/qwen`, a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("brought")
    text = inspect.getsource(argparse)
    (folder / "book.txt").write_text(text)
    (folder / "texts").mkdir()
    (folder / "texts" / "first.txt").write_text(text[:20_000])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, bos_token_id=None, eos_token_id=0))
    model.save_pretrained(folder / "models" / "qwen")
    ByteTokenizer().save(folder / "models" / "qwen")
    return folder


@pytest.fixture
def workspace(brought: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory, which becomes the working directory."""
    shutil.copytree(brought, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
