"""`octavo.load`: transformers' models on packed bytes, fused, against training, the layers one by one, and themselves
compiled."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_examples import Example
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

import octavo
from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.scheme import CHANNEL
from octavo.ops import quantize
from octavo.packing import convert_layout, pack
from octavo.runtime import PackedLinear, load_packed
from octavo.runtime.fused import PackedMLP, PackedNormLinear, fuse
from octavo.runtime.packed_linear import swap_linears
from octavo.runtime.stacked_linear import PackedShare, PackedStack

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
}
NAME = "model.layers.0.mlp.up_proj"


def make(name: str) -> Any:
    """A model whose parameters are numbers of BF16, as a folder keeps them, but for what is packed."""
    torch.manual_seed(0)
    architecture, configuration, settings = ARCHITECTURES[name]
    model = architecture(configuration(**SIZES | settings)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_((p + torch.randn_like(p) * 0.3 if p.ndim == 1 else p if "embed" in key else 4 * p).bfloat16())
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each architecture, packed."""
    root = tmp_path_factory.mktemp("models")
    for name in ARCHITECTURES:
        make(name).save_pretrained(root / name)
        pack(root / name, root / f"{name} packed")
    return {name: root / f"{name} packed" for name in ARCHITECTURES}


each = pytest.mark.parametrize("name", ARCHITECTURES)


def tokens(length: int = 21, vocabulary: int = 99) -> Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    found: Tensor = model(tokens() if ids is None else ids).logits
    return found


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def operations(call: Callable[[], Any]) -> Counter[str]:
    seen: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[op.name()] += 1
            return op(*args, **(kwargs or {}))

    with Count():
        call()
    return seen


def layer_by_layer(model: nn.Module) -> nn.Module:
    """A copy that hooks keep from being fused."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, PackedLinear):
            module.register_forward_hook(lambda *_: None)
    return twin


# --- What is loaded ----------------------------------------------------------------------------------------------


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
def test_other_schemes_run_from_their_bytes_layer_by_layer(tmp_path: Path, scheme: str) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "out", scheme=scheme)
    packed = octavo.load(tmp_path / "out")
    seen = operations(lambda: logits(packed))
    assert not seen["octavo::norm_quantize"]
    assert seen["octavo::scaled_mm"] == 14
    assert not any(isinstance(m, PackedStack) for m in packed.modules())
    assert distance(logits(packed), logits(model)) < 0.15


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
def test_an_encoder_runs_too(tmp_path: Path, scheme: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=99, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "out", scheme=scheme)
    packed = octavo.load(tmp_path / "out")
    assert type(packed) is BertModel
    with torch.no_grad():
        found, required = (m(tokens()).last_hidden_state for m in (packed, model))
    assert 1e-3 < distance(found, required) < 0.1


def test_a_damaged_folder_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="truncated"):
        octavo.load(folder)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        octavo.load(folder / "nothing")


# --- Fused -------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_is_that_of_training_to_the_bit(
    folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    trained, packed = make(name), octavo.load(folders[name])
    report = octavo.convert(trained, "rowwise")
    assert len(report.fused) == 4
    if dtype == torch.bfloat16:  # the weights that training casts are the masters, as they were when it was packed
        for key, p in trained.named_parameters():
            if not key.endswith("_proj.weight"):
                p.data = p.data.bfloat16()
    else:
        for p in packed.parameters():
            p.data = p.data.float()
    found, required = logits(packed), logits(trained)
    assert found.dtype == dtype
    assert torch.equal(found, required)


@each
def test_norms_and_activations_are_fused_with_quantization(folders: dict[str, Path], name: str) -> None:
    model = octavo.load(folders[name])
    seen = operations(lambda: logits(model))
    assert seen["octavo::norm_quantize"] == 4
    assert seen["octavo::activation_quantize"] == 2
    assert seen["octavo::quantize"] == 2  # the attention's output
    assert seen["octavo::scaled_mm"] == 8
    twin = layer_by_layer(model)
    apart = operations(lambda: logits(twin))
    assert (apart["octavo::norm_quantize"], apart["octavo::scaled_mm"]) == (0, 14)
    for each_model in (model, twin):
        each_model.float()  # in which a norm's output is not rounded on its way to the quantizer
    assert distance(logits(model), logits(twin)) < 0.018  # 35 dB


@each
def test_each_token_is_the_same_alone_as_among_others(folders: dict[str, Path], name: str) -> None:
    model = octavo.load(folders[name])
    cache, steps = None, []
    for i in range(7):
        with torch.no_grad():
            out = model(tokens(7)[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert distance(torch.cat(steps, 1), logits(model, tokens(7))) < 0.03


def test_our_own_models_are_fused_too(packed: dict[str, Example]) -> None:
    for name, fused in (("llama", 4), ("gpt2", 4)):
        model = load_packed(packed[name].packed).model
        with torch.no_grad():
            seen = operations(lambda model=model: model(tokens(9)))  # type: ignore[misc]
        assert seen["octavo::norm_quantize"] == fused


# --- The stacks --------------------------------------------------------------------------------------------------


def test_the_layers_bytes_are_views_of_one_buffer_and_keep_their_names(folders: dict[str, Path]) -> None:
    model, stored = (
        octavo.load(folders["llama with biases"]),
        load_file(folders["llama with biases"] / "model.safetensors"),
    )
    state = model.state_dict()
    assert state.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(state[key].view(torch.uint8), tensor.view(torch.uint8)), key
    stack = model.model.layers[1].mlp.stack
    assert isinstance(stack, PackedStack)
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, PackedShare)
    assert layer.weight.untyped_storage().data_ptr() == stack.weight.untyped_storage().data_ptr()
    assert torch.equal(layer.weight.view(torch.uint8), stack.weight[96:].view(torch.uint8))
    assert "stack" not in " ".join(state)


def test_a_stack_is_its_layers_side_by_side_whichever_has_a_bias() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(48, n, bias=name != "b") for name, n in (("a", 17), ("b", 5), ("c", 32))})
    state = {}
    for name, linear in model.items():
        q = quantize(linear.weight.detach(), CHANNEL.weight)
        state |= {f"{name}.weight": q.data, f"{name}.weight_scale": q.scale}
        state |= {f"{name}.bias": linear.bias.bfloat16()} if name != "b" else {}
    swap_linears(model, dict.fromkeys(model, CHANNEL))
    model.load_state_dict(state, assign=True)
    x = torch.randn(9, 48)
    apart = [layer(x) for layer in model.values()]
    stack = PackedStack(list(model.values()))
    y = stack(quantize(x, CHANNEL.inputs), torch.float32)
    assert torch.equal(y, torch.cat(apart, 1))
    assert all(torch.equal(layer(x), alone) for layer, alone in zip(model.values(), apart, strict=True))
    assert model.state_dict().keys() == state.keys()


def test_a_saved_model_opens_again(folders: dict[str, Path], tmp_path: Path) -> None:
    model = octavo.load(folders["qwen3"])
    model.save_pretrained(tmp_path / "again")
    required, found = (load_file(path / "model.safetensors") for path in (folders["qwen3"], tmp_path / "again"))
    assert required.keys() == found.keys()
    assert all(torch.equal(found[key].view(torch.uint8), t.view(torch.uint8)) for key, t in required.items())
    assert torch.equal(logits(octavo.load(tmp_path / "again")), logits(model))


def test_another_models_state_is_taken_in_place(folders: dict[str, Path]) -> None:
    model, state = octavo.load(folders["llama"]), octavo.load(folders["llama"]).state_dict()
    before, bytes_at = logits(model), model.model.layers[0].mlp.stack.weight.data_ptr()
    state[f"{NAME}.weight_scale"] = 2 * state[f"{NAME}.weight_scale"]
    model.load_state_dict(state)
    assert model.model.layers[0].mlp.stack.weight.data_ptr() == bytes_at
    assert distance(logits(model), before) > 0.01
    assert torch.equal(logits(model), logits(copy.deepcopy(model)))
    del state[f"{NAME}.weight"]
    with pytest.raises(RuntimeError, match=rf"Missing key.*{NAME}\.weight"):
        model.load_state_dict(state)
    state[f"{NAME}.weight"] = torch.zeros(3, 4)
    with pytest.raises(
        RuntimeError, match=r"up_proj\.weight must be torch\.float8_e4m3fn \[96, 64\], got torch.float32"
    ):
        model.load_state_dict(state)


def test_casting_a_model_leaves_bytes_and_scales_as_they_are(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"])
    before = {key: t.clone() for key, t in model.state_dict().items()}
    model.float()
    for key, tensor in model.state_dict().items():
        packed = "_proj." in key
        assert tensor.dtype == (before[key].dtype if packed else torch.float32), key
        assert torch.equal(tensor.to(before[key].dtype).view(torch.uint8), before[key].view(torch.uint8)), key
    assert logits(model).dtype == torch.float32
    moved = copy.deepcopy(model).to("meta")
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"])
def test_what_a_library_puts_in_a_layers_place_runs(folders: dict[str, Path], path: str) -> None:
    model = octavo.load(folders["llama"])
    before, layer = logits(model), model.model.layers[1].get_submodule(path)
    setattr(model.model.layers[1].get_submodule(path.split(".")[0]), path.split(".")[1], Doubled(layer))
    doubled = logits(model)
    setattr(model.model.layers[1].get_submodule(path.split(".")[0]), path.split(".")[1], layer)
    layer.weight_scale.mul_(2)  # of the stack, where it has one
    assert distance(doubled, before) > 0.01
    assert distance(logits(model), doubled) < 0.03


def test_fusing_twice_is_fusing_once(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"])
    classes = [type(m) for m in model.modules()]
    fuse(model)
    assert [type(m) for m in model.modules()] == classes
    assert sum(isinstance(m, PackedNormLinear) for m in model.modules()) == 2
    assert len({type(m) for m in model.modules() if isinstance(m, PackedMLP)}) == 1


def test_no_tokens_and_a_vector(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"])
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].post_attention_layernorm
    for shape in ((0, 64), (2, 0, 64), (64,), (1, 2, 3, 64)):
        x = torch.randn(shape).bfloat16()
        assert mlp(x).shape == x.shape
        y, total = mlp(x, norm, x)
        assert y.shape == total.shape == x.shape
        assert torch.equal(total, x + x)


# --- Compiled ----------------------------------------------------------------------------------------------------


def static_steps(model: Any, run: Callable[..., Any]) -> Tensor:
    """Logits of a prompt and of three tokens after it, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids, found = tokens(8).to(model.device), []
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            found.append(run(ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_with_a_static_cache_it_gives_the_same(folders: dict[str, Path], name: str) -> None:
    torch.compiler.reset()
    model = octavo.load(folders[name])
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
