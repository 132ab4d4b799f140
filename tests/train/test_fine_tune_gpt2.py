"""GPT-2 of transformers, whose linear layers are `Conv1D`, from fine-tuning to the packed folder."""

import pytest
import torch
from safetensors.torch import load_file

from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import pack
from octavo.runtime import load_packed

transformers = pytest.importorskip("transformers")


@pytest.fixture
def source(tmp_path):
    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "source")
    ByteTokenizer().save(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_it_trains_under_its_own_names_and_packs(begin, go_on, records, source, tmp_path, recipe):
    begin(model=str(source), recipe=recipe, context=None, steps=4, seed=3).run()
    trainer = go_on(tmp_path / "run", "--steps", "5")
    trainer.run()
    losses = list(records(tmp_path / "run").values())
    assert losses[4] < losses[0] - 0.2
    published = load_file(source / "model.safetensors")
    saved = load_file(tmp_path / "run" / "step-00000005" / "model.safetensors")
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in published.items()}
    pack(tmp_path / "run", tmp_path / "packed")
    packed = load_packed(tmp_path / "packed").model
    tokens = torch.arange(32)[None] + 97
    with torch.no_grad():
        found, trained = packed(tokens), trainer.model.eval()(tokens).logits
    found = getattr(found, "logits", found).float()
    assert (found - trained).norm() < 0.1 * trained.norm()


def test_what_a_run_left_in_bf16_and_its_scales_are_found_under_its_names(begin, source, tmp_path):
    trainer = begin(model=str(source), recipe="delayed", steps=4, skip=("transformer.h.0.mlp.*",))
    trainer.run()
    pack(tmp_path / "run", tmp_path / "packed")
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    dtypes = {layer: packed[f"model.decoder.layers.{layer}.fc1.weight"].dtype for layer in (0, 1)}
    assert dtypes == {0: torch.bfloat16, 1: torch.float8_e4m3fn}
    history = trainer.model.get_submodule("transformer.h.1.attn.c_attn").histories["w"]
    for part in "qkv":
        scale = packed[f"model.decoder.layers.1.self_attn.{part}_proj.weight_scale"]
        assert torch.equal(scale.view(()), history.scale.view(()))
