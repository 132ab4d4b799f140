"""Running from a packed folder: the layer, the checks of what is read, and the text that comes."""

import gc
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from metrics import distance
from operation_counts import operations
from packed_examples import write_run
from patience import HANG
from runtime_examples import logits, static_steps, tokens
from tiny_models import open_theirs
from torch import Tensor, nn
from verify_examples import change_config, change_tensors
from weight_only_examples import assert_close

import octavo
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.layouts import read_config
from octavo.checkpoint.scheme import CHANNEL, SCHEME_OF, SCHEMES
from octavo.hf.meta_model import read_meta_model, transformers_meta_model
from octavo.inference import opening
from octavo.inference.opening import end_tokens, load_packed, run, small_model
from octavo.inference.packed_linear import PackedLinear, Stacked, swap_linears
from octavo.models import Llama, LlamaConfig
from octavo.models.decoder import Decoder
from octavo.ops import quantize
from octavo.packing import convert_layout, pack

# --- The layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 3, 128), (1, 2, 3, 128), (0, 128), (2, 0, 128)])
@pytest.mark.parametrize("recipe", [recipe for recipe in SCHEME_OF if recipe not in ("delayed", "tensorwise")])
def test_the_layer_is_the_forward_of_training(recipe, dtype, bias, shape):
    trained = nn.Sequential(nn.Linear(128, 256, bias=bias))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())  # the bias is stored so
    model = nn.Sequential(nn.Linear(128, 256, bias=bias))
    scheme = SCHEMES[SCHEME_OF[recipe]]
    swap_linears(model, {"0": scheme})
    q = quantize(trained[0].weight.detach(), scheme.weight)
    stored = {"0.weight": q.data, "0.weight_scale": scheme.stored_scale(q)}
    model.load_state_dict(stored | ({"0.bias": trained[0].bias.bfloat16()} if bias else {}))
    octavo.convert(trained, recipe)
    x = (torch.randn(shape) * 3).to(dtype)
    with torch.no_grad():
        y, want = model(x), trained(x)
    assert y.dtype == dtype
    assert y.shape == want.shape == (*shape[:-1], 256)
    if scheme == CHANNEL and (shape, dtype) == ((128,), torch.bfloat16):  # one row, which is not cast
        assert_close(y[None], x[None], q, trained[0].bias.detach() if bias else None)
    else:
        assert torch.equal(y, want)


# --- What is read ------------------------------------------------------------------------------------------------

NAME = "model.layers.0.mlp.up_proj"


def changed(change):
    return lambda folder: change_tensors(folder, change)


def without(name):
    return lambda folder: [path.unlink() for path in folder.glob(name)]


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])


def as_run(folder):
    (folder / "model").mkdir()
    for place in (folder, folder / "model"):
        (place / "config.json").write_text("{}")


SCALE, W, AGAIN = f"{NAME}.weight_scale", f"{NAME}.weight", ".*pack it again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(lambda t: t.pop(W)), f"{W} is missing{AGAIN}"),
        (changed(lambda t: t.pop(SCALE)), f"{SCALE} is missing{AGAIN}"),
        (changed(lambda t: t.update(extra=torch.ones(1))), f"extra has no place{AGAIN}"),
        (changed(lambda t: t[SCALE].view(-1)[:1].zero_()), f"{SCALE} must be positive{AGAIN}"),
        (lambda folder: change_config(folder, ignore=["lm_head", NAME]), f"{SCALE} has no place"),
        (without("config.json"), "config.json"),
        (without("model.safetensors"), "model.safetensors"),
        (without("tokenizer*"), "tokenizer.json"),
        (pickled, r"pytorch_model.bin, a pickle, .*save the model with safetensors"),
        (truncated, "model.safetensors is truncated"),
        (as_run, "is a run of octavo train, not a packed folder: octavo pack"),
        (shutil.rmtree, "there is no folder .*: give a folder that octavo pack wrote"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(copy_of, change, message):
    folder = copy_of("llama")
    change(folder)
    for load in (load_packed, octavo.load):
        if (load, message) != (octavo.load, "tokenizer.json"):  # of which transformers opens its own
            with pytest.raises((ArtifactError, FileNotFoundError), match=message):
                load(folder)


# --- The text ----------------------------------------------------------------------------------------------------


def test_end_tokens_are_those_of_the_folder(packed, tmp_path):
    assert end_tokens(packed["qwen2"].packed) == {0}
    assert end_tokens(packed["llama"].packed) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert end_tokens(tmp_path) == {2, 3}


# ---- `octavo.load`: packed folders as models of transformers, which generate, compile and run as they do unpacked


def test_every_packed_folder_opens_as_the_model_of_transformers(example):
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
    for each in (model, ours):
        layers = [m for m in each.modules() if isinstance(m, PackedLinear)]
        assert len(layers) == len(example.report.packed)
        assert {layer.weight.dtype for layer in layers} == {torch.float8_e4m3fn}
        assert {p.dtype for p in each.parameters()} == {torch.bfloat16}
        held = sum(t.nbytes for t in (*each.parameters(), *each.buffers()))
        assert held < 1.01 * (example.packed / "model.safetensors").stat().st_size


@pytest.mark.parametrize("scheme", ["tensor", "block", "mx"])
def test_other_schemes_run_from_their_bytes_layer_by_layer(made, scheme):
    packed = octavo.load(made("llama", scheme=scheme))
    seen = operations(lambda: logits(packed))
    assert not seen["octavo::norm_quantize"]
    assert seen["octavo::scaled_mm"] == 14
    assert not any(isinstance(v, Stacked) for m in packed.modules() for v in vars(m).values())
    assert distance(logits(packed), logits(open_theirs(made("llama"), torch.float32))) < 0.15


def test_generation_settings_of_the_folder_count(made, tmp_path):
    out = tmp_path / "out"
    convert_layout(made("qwen2", scheme="channel"), out)
    (out / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3, "eos_token_id": [7, 8]}))
    model = octavo.load(out)
    assert (model.generation_config.max_new_tokens, model.generation_config.eos_token_id) == (3, [7, 8])


@pytest.mark.slow
def test_compiled_with_a_static_cache_it_gives_the_same(made):
    torch.compiler.reset()
    model = octavo.load(made("qwen3", scheme="channel"))
    required = static_steps(model, model)
    assert distance(required, logits(model, tokens(8))) < 0.03
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(static_steps(model, compiled), required)


@pytest.mark.parametrize("scheme", ["channel", "weight", "int8"])
def test_the_code_of_one_layer_is_the_code_of_all(made, scheme):
    torch.compiler.reset()
    model = octavo.load(made("llama", scheme=scheme))
    required = logits(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        found = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(found, required)


# ---- Compiling kernels while the files of a packed folder are read


@pytest.mark.parametrize("open_meta", [read_meta_model, transformers_meta_model])
@pytest.mark.parametrize("kv_cache", [None, "fp8"])
def test_the_small_model_takes_the_prompts(example, open_meta, kv_cache):
    meta_model = open_meta(read_config(example.packed), example.packed)
    small = small_model(meta_model, example.packed)
    if small is None:
        assert "num_hidden_layers" not in meta_model.config
        return
    assert isinstance(small.model, Decoder) == isinstance(meta_model.model, Decoder)
    sizes = {tuple(t.shape) for t in meta_model.model.parameters()}
    shapes = {name: tuple(t.shape) for name, t in small.model.named_parameters()}
    assert {shape for name, shape in shapes.items() if "layers.0" in name} <= sizes
    assert "layers.1" in str(shapes)
    assert "layers.2" not in str(shapes)
    small.model.to_empty(device="cpu")
    run(small, torch.device("cpu"), kv_cache)


def test_loading_leaves_no_tensor_to_the_garbage_collector(made, monkeypatch):
    """On a device with kernels, of which the CPU plays the part: a small model compiles them meanwhile."""
    ran: list[int] = []
    monkeypatch.setattr(opening, "run", lambda *args: (ran.append(1), run(*args)))
    octavo.load(made("llama", scheme="channel"))
    assert ran == []  # on a CPU there is nothing to compile
    monkeypatch.setattr(opening, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    octavo.load(made("llama", scheme="channel"))  # imports leave garbage
    gc.collect()
    gc.disable()
    try:
        model = octavo.load(made("llama", scheme="channel"))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, torch.Tensor) and not each.is_meta]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert ran == [1] * 4
    assert sum(t.nbytes for t in left) == 0
    assert model(torch.arange(9)[None]).logits.isfinite().all()


CHILD = """
import logging, sys, torch, octavo
logging.basicConfig()
logging.getLogger("octavo").setLevel(logging.DEBUG)
model = octavo.load(sys.argv[1], "cuda")
import triton
names = []
triton.knobs.runtime.jit_post_compile_hook = lambda **found: names.append(found["repr"])
for tokens in (128, 256, 91):
    ids = torch.arange(tokens, device="cuda")[None] % 250
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    print(tokens, sorted(names))
    assert not names
"""


@pytest.mark.gpu
def test_a_loaded_model_compiles_nothing_for_a_prompt(tmp_path):
    config = LlamaConfig(256, layers=3, width=256, heads=4, kv_heads=2, mlp_width=512, context=512)
    trained = write_run(tmp_path / "run", Llama(config).bfloat16(), config.to_hf(), recipe="rowwise", model="llama")
    pack(trained, tmp_path / "packed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "packed")], check=True, env=environment, timeout=HANG)
