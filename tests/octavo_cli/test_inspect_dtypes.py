"""octavo inspect --dtypes: presets, settings, Hugging Face folders, and what is no model of a training."""

import json

import pytest

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 64,
}  # fmt: skip
SETTINGS = """
model = "llama"
layers = 3
width = 64
heads = 4
kv_heads = 4
mlp_width = 128
context = 32
batch = 2
"""


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SETTINGS)
    return str(path)


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_tables_of_settings(octavo, settings):
    code, out, err = octavo("inspect", settings, "--dtypes")
    assert (code, err) == (0, "")
    for line in ("FLOPs by dtype", "FP32 in the forward pass, and why", "products that do not run in FP8"):
        assert line in out
    assert "model.layers.*.mlp.gate_proj" in out
    assert "model.layers.0" not in out
    assert "autocast runs pow in FP32" in out


def test_flops_are_those_of_the_shapes(octavo, settings):
    found = json.loads(octavo("inspect", settings, "--dtypes", "--json")[1])
    tokens, layer, head, scores = 64, 64 * 64 * 4 + 3 * 64 * 128, 64 * 256, 2 * 32 * 32 * 64
    assert found["flops"]["forward"] == {"BF16": 2 * tokens * head + 3 * 4 * scores, "FP8": 2 * tokens * layer * 3}
    assert found["flops"]["backward"]["FP8"] == 2 * found["flops"]["forward"]["FP8"]


def test_operations_of_a_module_and_another_recipe(octavo, settings):
    words = ("--dtypes", "--module", "*.mlp.up_proj", "--recipe", "bf16", "--batch", "1", "--json")
    found = json.loads(octavo("inspect", settings, *words)[1])
    assert {row["module"] for row in found["operations"]} == {"model.layers.*.mlp.up_proj"}
    assert {(row["name"], row["computes_in"]) for row in found["operations"] if row["kind"] == "product"} == {
        ("mm", "BF16")
    }
    assert found["flops"]["forward"] == {"BF16": 3 * 2 * 32 * 64 * 128}


def test_recomputation(octavo, tmp_path, settings):
    (tmp_path / "more.toml").write_text(f'{SETTINGS}\n[activation_checkpointing]\nmode = "full"\n')
    found = json.loads(octavo("inspect", tmp_path / "more.toml", "--dtypes", "--json")[1])
    assert found["flops"]["recomputation"]["FP8"] == found["flops"]["forward"]["FP8"]


@pytest.mark.parametrize("source", ["", "config.json"])
def test_a_hugging_face_folder_without_weights(octavo, llama, source):
    pytest.importorskip("transformers")
    code, out, err = octavo("inspect", llama / source, "--dtypes", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["model"] == "LlamaForCausalLM"
    assert {each["module"] for each in found["left_out"]} == {"lm_head", "model.layers.*.self_attn"}


def test_experts_run_in_fp8(octavo, llama):
    pytest.importorskip("transformers")
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (llama / "config.json").write_text(json.dumps(LLAMA | mixtral))
    code, out, _ = octavo("inspect", llama, "--dtypes", "--weights", "bf16", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["flops"]["backward"]["FP8"] == 2 * found["flops"]["forward"]["FP8"]
    products = [row for row in found["operations"] if row["module"] == "model.layers.*.mlp.experts" and row["flops"]]
    expected = 3 * 2 * 64 * 2 * 3 * 64 * 128  # layers, 64 tokens, 2 experts of each, 3 matrices
    assert sum(row["flops"] for row in products if row["phase"] == "forward") == expected
    assert sum(row["flops"] for row in products if row["phase"] == "backward") == 2 * expected
    assert {row["computes_in"] for row in products} == {"FP8"}
    assert "3-D weight" not in [each["what"] for each in found["left_out"]]


@pytest.mark.slow
def test_a_preset_needs_no_memory(octavo):
    found = json.loads(octavo("inspect", "llama-1b", "--dtypes", "--batch", "1", "--json")[1])
    assert found["flops"]["forward"]["FP8"] == 2 * 4096 * 16 * (2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama-9b", "--dtypes"], "the presets are"),
        ([".", "--dtypes"], "holds no config.json"),
        (["packed", "--module", "*"], "--module is for --dtypes, which is not given: add it"),
        (["small.toml"], "small.toml is no packed folder; to trace the dtypes of a model, add --dtypes"),
        (["llama-1b", "--dtypes", "--recipe", "fp4"], "recipe"),
        (["llama-1b", "--dtypes", "--context", "0"], "context must be"),
    ],
)
def test_bad_input(refused, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused("inspect", *words)


def test_bad_folders(refused, llama):
    (llama / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    assert "quantized" in refused("inspect", llama, "--dtypes")
    (llama / "config.json").write_text(json.dumps(LLAMA | {"model_type": "vit", "architectures": []}))
    assert "octavo.dtype_flow(model, inputs) shows its dtypes" in refused("inspect", llama, "--dtypes")
    (llama / "config.json").write_text("{")
    assert "is not valid JSON" in refused("inspect", llama, "--dtypes")
    (llama / "config.json").write_text("{}")
    assert "names no model_type" in refused("inspect", llama, "--dtypes")
    (llama / "config.json").write_text(json.dumps(LLAMA | {"model_type": "unheard"}))
    assert "model_type 'unheard', which transformers" in refused("inspect", llama, "--dtypes")
