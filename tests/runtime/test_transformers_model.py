"""`octavo.load`: packed folders as models of transformers, which generate, compile and run as they do unpacked."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from metrics import distance
from operation_counts import operations
from packed_examples import Example
from runtime_examples import logits, static_steps, tokens
from safetensors.torch import load_file
from tiny_models import Folders, open_theirs, outputs
from torch import Tensor
from transformers import BertModel

import octavo
from octavo.artifact.files import ArtifactError
from octavo.packing import convert_layout
from octavo.runtime import PackedLinear, load_packed
from octavo.runtime.stacked_linear import PackedStack


def test_every_packed_folder_opens_as_the_model_of_transformers(example: Example) -> None:
    model = octavo.load(example.packed)
    config = json.loads((example.packed / "config.json").read_text())
    assert [type(model).__name__] == config["architectures"]
    assert type(model).__module__.startswith("transformers.")
    assert not model.training
    ours = load_packed(example.packed).model
    with torch.no_grad():
        required = ours(tokens(40, 256))
    required = required if isinstance(required, Tensor) else required.logits
    assert distance(logits(model, tokens(40, 256)), required) < 0.1  # BF16, in another order
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == sum(name.endswith("_scale") for name in load_file(example.packed / "model.safetensors"))
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert held < 1.01 * (example.packed / "model.safetensors").stat().st_size


@pytest.mark.parametrize("scheme", ["tensor", "block", "mx"])
def test_other_schemes_run_from_their_bytes_layer_by_layer(made: Folders, scheme: str) -> None:
    packed = octavo.load(made("llama", scheme=scheme))
    seen = operations(lambda: logits(packed))
    assert not seen["octavo::norm_quantize"]
    assert seen["octavo::scaled_mm"] == 14
    assert not any(isinstance(m, PackedStack) for m in packed.modules())
    assert distance(logits(packed), logits(open_theirs(made("llama"), torch.float32))) < 0.15


def test_an_unknown_dtype_of_the_cache_is_refused_before_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'fp4' of keys and values: choose one of"):
        octavo.load(tmp_path, kv_cache="fp4")
    with pytest.raises(ValueError, match="attention must be one of bf16, fp8, got 'fp4'"):
        octavo.load(tmp_path, attention="fp4")


def test_a_model_that_transformers_generates_with(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"]).float()  # so that rounding turns no choice
    mask = torch.ones(2, 7, dtype=torch.int64)
    text = model.generate(tokens(7), attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 16)
    ids = tokens(7)
    for _ in range(9):
        ids = torch.cat((ids, logits(model, ids)[:, -1:].argmax(-1)), 1)
    assert torch.equal(text, ids)
    assert model.generation_config.eos_token_id == 2  # of Llama's configuration


def test_generation_settings_of_the_folder_count(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_layout(folders["qwen2"], out)
    (out / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3, "eos_token_id": [7, 8]}))
    model = octavo.load(out)
    assert (model.generation_config.max_new_tokens, model.generation_config.eos_token_id) == (3, [7, 8])


@pytest.mark.parametrize("scheme", ["channel", "tensor"])
def test_an_encoder_runs_too(made: Folders, scheme: str) -> None:
    packed = octavo.load(made("bert", scheme=scheme))
    assert type(packed) is BertModel
    assert 1e-3 < distance(outputs(packed), outputs(open_theirs(made("bert"), torch.float32))) < 0.1


def test_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for folder in (tmp_path, tmp_path / "model"):
        (folder / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is a run of octavo train, not a packed folder: octavo pack"):
        octavo.load(tmp_path)


def test_a_damaged_folder_is_refused(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for load in (octavo.load, load_packed):
        with pytest.raises(ArtifactError, match=r"model.safetensors is truncated"):
            load(path.parent)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing: give a folder that octavo pack wrote"):
        octavo.load(path.parent / "nothing")


@pytest.mark.slow
def test_compiled_with_a_static_cache_it_gives_the_same(folders: dict[str, Path]) -> None:
    torch.compiler.reset()
    model = octavo.load(folders["qwen3"])
    required = static_steps(model, model)
    assert distance(required, logits(model, tokens(8))) < 0.03
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(static_steps(model, compiled), required)


def test_the_code_of_one_layer_is_the_code_of_all(folders: dict[str, Path]) -> None:
    torch.compiler.reset()
    model = octavo.load(folders["llama"])
    required = logits(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        found = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(found, required)
