"""Fused decoder layers of transformers, against the same model layer by layer and against the unconverted one."""

from functools import partial, wraps

import pytest
import torch
from linear_examples import converted_model
from metrics import sqnr
from operation_counts import operations
from runtime_examples import ARCHITECTURES, Doubled, layer_by_layer, tokens
from tiny_models import built
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention

import octavo
from octavo.inference.transformers_cache import CACHE
from octavo.nn import FusedMLP, fused_modules, heads

# Limits in dB of sqnr.
SAME_QUANTIZATION_DB = 30  # of logits, fused or cached against layer by layer
GRADIENTS_DB = 20  # of gradients, fused against layer by layer
EXACT_DB = 18  # of logits against the unconverted model
EXACT_GRADIENTS_DB = 5
QUANTIZED_DB = 40  # nothing quantized reaches it

make_decoder = partial(built, gain=0.64, num_key_value_heads=2)
each = pytest.mark.parametrize("name", ARCHITECTURES)


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@each
def test_fused_is_what_the_layers_are_one_by_one(name):
    model = make_decoder(name)
    state, keys = model.state_dict(), list(model.state_dict())
    exact = model(tokens()).logits
    exact_gradients = gradients(model)
    report = octavo.convert(model, "rowwise")
    assert len(report.converted) == 14
    assert set(report.fused) == {f"model.layers.{i}.{part}" for i in range(2) for part in ("qkv", "mlp")}
    assert "fused: 2 x " in str(report)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())

    seen = operations(lambda: model(tokens()))
    assert seen["octavo::norm_quantize"] == 4
    assert seen["octavo::activation_quantize"] == 2
    assert seen["octavo::quantize"] == 4  # the attention's output and the layer that gets it
    other = layer_by_layer(model)
    assert not operations(lambda: other(tokens()))["octavo::norm_quantize"]

    logits = model(tokens()).logits
    assert sqnr(other(tokens()).logits, logits) > SAME_QUANTIZATION_DB
    assert QUANTIZED_DB > sqnr(exact, logits) > EXACT_DB
    apart, actual = gradients(other), gradients(model)
    for key, gradient in actual.items():
        assert sqnr(apart[key], gradient) > GRADIENTS_DB, key
        assert sqnr(exact_gradients[key], gradient) > EXACT_GRADIENTS_DB, key


def test_the_gradient_of_the_residual_stream_is_added_in_the_norms():
    model = converted_model(make_decoder("llama"), "rowwise")
    layer, x = model.model.layers[1], torch.randn(2, 5, model.config.hidden_size, requires_grad=True)
    y = layer(x, position_embeddings=model.model.rotary_emb(x, torch.arange(5)[None]))
    assert not operations(lambda: y.backward(torch.ones_like(y)))["aten::add.Tensor"]


@each
def test_a_norm_that_feeds_no_quantized_layer_rounds_once_in_training(name):
    model = converted_model(make_decoder(name).bfloat16(), "rowwise")
    norm, x = model.model.norm, torch.randn(2, 5, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    norm.weight.data.uniform_(0.5, 2)
    exact_x, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    exact = torch.nn.functional.rms_norm(exact_x, weight.shape, weight, norm.variance_epsilon)
    y, dy = norm(x), torch.randn(x.shape).bfloat16()
    y.backward(dy)
    exact.backward(dy.double())
    assert (y == exact.bfloat16()).float().mean() > 0.99
    for actual, expected in ((x.grad, exact_x.grad), (norm.weight.grad, weight.grad)):
        assert sqnr(expected, actual) > QUANTIZED_DB
    octavo.restore(model)
    theirs = norm(x)
    assert (theirs == exact.bfloat16()).float().mean() < 0.95
    octavo.convert(model, "rowwise")
    with torch.no_grad():
        assert torch.equal(norm(x), theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16


def turns(call) -> int:
    return operations(call)["octavo::turn_heads"]


@each
@pytest.mark.parametrize(("mode", "cached"), [("bfloat16", True), ("float32", True), ("autocast", False)])
def test_heads_turn_in_one_pass_forward_and_one_backward(name, cached, mode, monkeypatch):
    """With the bits of transformers' own code, and a gradient that is one too. With autocast transformers turns in
    float32, and rounds the parts of a gradient before it adds them: last bits, which casts turn into steps."""
    model = converted_model(make_decoder(name).to(torch.bfloat16 if mode == "bfloat16" else torch.float32), "rowwise")

    def passes() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            output = model(tokens(), labels=tokens(), use_cache=cached)
        output.loss.backward()
        stored = [] if not cached else [t for layer in output[CACHE].layers for t in (layer.keys, layer.values)]
        return [output.logits, *stored, *(p.grad for p in model.parameters())]

    assert turns(passes) == 2 * 2
    actual = passes()
    monkeypatch.setattr(fused_modules, "turning", lambda attention, arguments: attention)
    for index, (one, other) in enumerate(zip(actual, passes(), strict=True)):
        # The gradients of Qwen3's norms of heads lie in another order, in which PyTorch adds them.
        limit = GRADIENTS_DB if mode == "autocast" else QUANTIZED_DB
        near = index > 0 and (name == "qwen3" or mode == "autocast")
        assert torch.equal(one, other) or (near and sqnr(other, one) > limit)


def test_heads_turn_in_training_alone(monkeypatch):
    model = converted_model(make_decoder("llama"), "rowwise")
    assert turns(lambda: model(tokens())) == 2
    with torch.no_grad():
        assert not turns(lambda: model(tokens()))
    x, table = torch.randn(1, 2, 3, 16, requires_grad=True).bfloat16(), torch.ones(1, 3, 16)
    for kind in (torch.float16, torch.bfloat16):  # of autocast: q and k are rounded by that to their own dtype alone
        with torch.autocast("cpu", kind, enabled=kind != torch.bfloat16):
            assert heads._rotate(lambda *given: "theirs", x, x, table, table) == "theirs"
    seen = []
    forward = LlamaAttention.forward
    replaced = wraps(forward)(lambda *given, **others: seen.append(1) or forward(*given, **others))
    with monkeypatch.context() as patch:  # as other libraries do
        patch.setattr(LlamaAttention, "forward", replaced)
        assert not turns(lambda: model(tokens()))
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_heads_turn_with_every_attention_and_cache():
    model = converted_model(make_decoder("llama"), "rowwise")
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = StaticCache(model.config, max_cache_len=32)
        assert turns(lambda: model(tokens(), **{CACHE: cache})) == 2  # noqa: B023
    layer, x = model.model.layers[0], torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
    old, tables = DynamicCache(), model.model.rotary_emb(x, torch.arange(3)[None])
    layer(x, position_embeddings=tables, past_key_values=old)
    assert old.get_seq_length() == 3


def test_tables_that_get_gradients_or_turn_a_part_of_a_head_are_left_to_transformers():
    model = converted_model(make_decoder("llama"), "rowwise")
    layer, x = model.model.layers[0], torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
    cos, sin = (t.clone().requires_grad_() for t in model.model.rotary_emb(x, torch.arange(3)[None]))
    assert not turns(lambda: layer(x, position_embeddings=(cos, sin)))
    layer(x, position_embeddings=(cos, sin)).sum().backward()
    assert all(t.grad.any() for t in (cos, sin))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):  # as Llama's class says
        layer(x, position_embeddings=(cos[..., :8].detach(), sin[..., :8].detach()))


@each
def test_text_is_generated_with_a_cache(name):
    """Each token has scales of its own, so that it is the same alone as among others."""
    model = converted_model(make_decoder(name).eval(), "rowwise")
    prompt = tokens(7)
    with torch.no_grad():
        full = model(prompt).logits
        cache, steps = None, []
        for i in range(7):
            out = model(prompt[:, i : i + 1], **{CACHE: cache}, use_cache=True)
            cache = out[CACHE]
            steps.append(out.logits)
        assert sqnr(full, torch.cat(steps, 1)) > SAME_QUANTIZATION_DB
        text = model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])  # biases change no trace
def test_compiled_without_a_break(name):
    torch.compiler.reset()
    model = converted_model(make_decoder(name, num_hidden_layers=1), "rowwise")  # tracing takes most of the time
    expected = model(tokens(), labels=tokens())
    expected_gradients = torch.autograd.grad(expected.loss, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if name == "llama" else "eager")
    actual = compiled(tokens(), labels=tokens())
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(torch.autograd.grad(actual.loss, list(model.parameters())), expected_gradients)


def checkpoint_layers(model):
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def checkpoint_mlps(model):
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)


@pytest.mark.parametrize("wrap", [checkpoint_layers, checkpoint_mlps])
def test_checkpointed_parts_run_again_and_give_the_same_gradients(wrap, monkeypatch):
    """A module that wraps a part of a fused layer is called: the part is not called directly."""
    model, runs, run = converted_model(make_decoder("llama").train(), "rowwise"), [], FusedMLP.run
    expected = list(gradients(model).values())
    monkeypatch.setattr(FusedMLP, "run", lambda *given: runs.append(1) or run(*given))
    wrap(model)
    assert all(map(torch.equal, gradients(model).values(), expected))
    assert len(runs) == 2 * 2


@pytest.mark.parametrize("path", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"])
def test_what_a_library_puts_in_a_layers_place_runs(path):
    model = converted_model(make_decoder("llama"), "rowwise")
    parent = model.model.layers[1].get_submodule(path.split(".")[0])
    leaf = path.split(".")[1]
    original = getattr(parent, leaf)
    before = model(tokens()).logits
    setattr(parent, leaf, Doubled(original))
    doubled = model(tokens()).logits
    setattr(parent, leaf, original)
    with torch.no_grad():
        original.weight.mul_(2)
    assert sqnr(model(tokens()).logits, doubled) > SAME_QUANTIZATION_DB
    assert not torch.equal(doubled, before)


@pytest.mark.parametrize(
    "path", ["self_attn", "mlp", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm"]
)
def test_hooks_see_tensors(path):
    model, seen = converted_model(make_decoder("mistral"), "rowwise"), []

    def hook(module, args, kwargs, output):
        first = output[0] if isinstance(output, tuple) else output
        seen.append([*args, *kwargs.values()][0].shape[:2] + first.shape[:2])

    model.model.layers[0].get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    model(tokens())
    assert seen == [(2, 21, 2, 21)]


def test_another_recipe_runs_the_class_own_forward():
    model, other = converted_model(make_decoder("llama"), "rowwise"), make_decoder("llama")
    assert octavo.convert(model, "tensorwise").fused == {}
    octavo.convert(other, "tensorwise")
    assert torch.equal(model(tokens()).logits, other(tokens()).logits)
    assert octavo.convert(model, "rowwise").fused


def test_a_skipped_layer_leaves_its_neighbours_apart():
    model = make_decoder("llama")
    report = octavo.convert(model, "rowwise", skip=["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"])
    assert set(report.fused) == {"model.layers.0.mlp", "model.layers.1.qkv"}
    assert model(tokens()).logits.isfinite().all()


def test_an_mlp_of_another_activation_is_not_recognised():
    model = make_decoder("llama", hidden_act="gelu")
    assert octavo.convert(model, "rowwise").fused == {}
    assert not operations(lambda: model(tokens()))["octavo::norm_quantize"]
