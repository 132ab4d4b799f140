"""Compiling kernels while the files of a packed folder are read."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packed_examples import Example, write_run

from octavo.artifact.packed.layouts import read_config
from octavo.hf.meta_model import MetaModel, read_meta_model, transformers_meta_model
from octavo.models import Llama, LlamaConfig
from octavo.models.decoder import Decoder
from octavo.packing import pack
from octavo.runtime.compiling import compile_meanwhile, run, small_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("open_meta", [read_meta_model, transformers_meta_model])
@pytest.mark.parametrize("kv_cache", [None, "fp8"])
def test_the_small_model_takes_the_prompts(
    example: Example, open_meta: Callable[..., MetaModel], kv_cache: str | None
) -> None:
    meta_model = open_meta(read_config(example.packed), example.packed)
    layer = small_model(meta_model, example.packed)
    if layer is None:
        assert "num_hidden_layers" not in meta_model.config
        return
    assert isinstance(layer.model, Decoder) == isinstance(meta_model.model, Decoder)
    sizes = {tuple(t.shape) for t in meta_model.model.parameters()}
    assert {tuple(t.shape) for name, t in layer.model.named_parameters() if "layers.0" in name} <= sizes
    assert not any("layers.2" in name for name, _ in layer.model.named_parameters())
    assert any("layers.1" in name for name, _ in layer.model.named_parameters())
    layer.model.to_empty(device="cpu")
    run(layer, CPU, kv_cache)


def test_a_model_on_the_cpu_starts_no_thread(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.runtime.compiling.threading.Thread", None)
    meta_model = read_meta_model(read_config(example.packed), example.packed)
    with compile_meanwhile(meta_model, CPU, None):
        pass


CHILD = """
import logging, sys, torch, octavo
logging.basicConfig()
logging.getLogger("octavo").setLevel(logging.DEBUG)
model = octavo.load(sys.argv[1], "cuda")
import triton
names = []
triton.knobs.runtime.jit_post_compile_hook = lambda **found: names.append(found["fn"].name)
for tokens in (128, 256, 91):
    ids = torch.arange(tokens, device="cuda")[None] % 250
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    print(tokens, sorted(names))
    assert not names
"""


@pytest.mark.gpu
def test_a_loaded_model_compiles_nothing_for_a_prompt(tmp_path: Path) -> None:
    config = LlamaConfig(256, layers=3, width=256, heads=4, kv_heads=2, mlp_width=512, context=512)
    trained = write_run(tmp_path / "run", Llama(config).bfloat16(), config.to_hf(), recipe="rowwise", model="llama")
    pack(trained, tmp_path / "packed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "packed")], check=True, env=environment, timeout=300)
