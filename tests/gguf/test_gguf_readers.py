"""GGUF files that transformers' reader stumbles over."""

from pathlib import Path

import torch
from gguf_examples import expected, logits, write_model
from metrics import distance
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.gguf import export_gguf


def off(folder: Path, wanted: torch.Tensor, **how: object) -> float:
    opened = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32, **how)
    return distance(logits(opened.eval()), wanted)


def test_a_folder_called_mistral(tmp_path: Path) -> None:
    source = write_model(tmp_path / "mistral", "mistral")
    report = export_gguf(source, tmp_path / "model.gguf")
    assert report.remarks == []
    assert off(tmp_path, logits(expected(source, "q8_0"))) < 1e-6


def test_biases_of_a_llama_are_said_to_be_left_out(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "llama biased")
    [remark] = export_gguf(source, tmp_path / "model.gguf").remarks
    assert "llama.cpp reads them, and transformers leaves them out" in remark
    wanted = logits(expected(source, "q8_0"))
    assert off(tmp_path, wanted) > 0.1
    assert f"config=AutoConfig.from_pretrained('{source}')" in remark
    assert off(tmp_path, wanted, config=AutoConfig.from_pretrained(source)) < 1e-6
