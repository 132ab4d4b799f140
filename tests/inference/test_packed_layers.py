"""The weight that a packed layer caches is that of its buffers, whatever changes them."""

import copy
import re
from functools import partial

import pytest
import torch
from metrics import distance, sqnr
from model_examples import GPT, GQA, lively
from operation_counts import operations, saved_tensors
from packed_layers import INPUTS, TOKENS, gradients, packed_layer, worst_row
from runtime_examples import ARCHITECTURES, Doubled, layer_by_layer, logits, tokens
from safetensors.torch import load_file
from tiny_models import IDS, built, open_theirs, same_bits, same_bytes
from torch import nn
from transformers import AutoModelForCausalLM

import octavo
from octavo.checkpoint.scheme import CHANNEL, INT8, SCHEMES, find_gemm, scheme_on
from octavo.inference import packed_linear
from octavo.inference.opening import load_packed, quantize_head
from octavo.inference.transformers_cache import CACHE, QuantizedKVCache
from octavo.models.decoder import logits_of
from octavo.ops import quantize
from octavo.ops.launching import ARCHITECTURES as GPUS


def opened(made, name="llama", scheme="channel", **options):
    return octavo.load(made(name, scheme=scheme), **options)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_state(scheme, assign):
    layer, other, x = packed_layer(scheme), packed_layer(scheme, seed=1), torch.randn(3, INPUTS).bfloat16()
    first = layer(x)
    assert torch.equal(layer(x), first)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(layer(x), first)
    layer.weight_scale.mul_(2 if layer.weight_scale.is_floating_point() else 1)
    other.weight_scale.copy_(layer.weight_scale)
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("name", ["ours", "gpt2", "llama", "qwen2"])  # all but llama with a tied head
def test_a_head_in_eight_bits_has_the_logits_of_its_dequantized_weight(name):
    model = built(name).bfloat16() if name in ARCHITECTURES else lively(GQA if name == "ours" else GPT)
    model = model.float().eval()
    wide, ids = copy.deepcopy(model), tokens(17, 61)
    quantize_head(model)
    weight, kept = model.lm_head.packed_weight().dequantize(), dict(wide.named_parameters())
    assert all(torch.equal(p, kept[key]) for key, p in model.named_parameters())
    wide.lm_head = nn.Linear(*weight.shape[::-1], bias=False)
    wide.lm_head.weight.data = weight
    found, required = (logits_of(each(ids)).detach() for each in (model.float(), wide))
    assert sqnr(required, found) > 25  # that of the input's cast
    assert not sqnr(required, found) > 60
    with pytest.raises(ValueError, match="must have a linear layer as its head, got PackedLinear"):
        quantize_head(model)


def test_load_quantizes_the_head_on_request(made):
    model, wide = opened(made, head="rowwise"), opened(made)
    quantize_head(wide)
    assert torch.equal(logits(model), logits(wide))
    assert model.generate(tokens(), max_new_tokens=3, do_sample=False).shape == (2, 24)


def test_an_input_of_another_width_names_the_layer():
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(24, 8, bias=False))
    packed_linear.swap_linears(model, {"1": SCHEMES["channel"]})
    what = "the layer '1', a PackedLinear with a weight [8, 24], takes an input [..., 24], got [3, 16]: give"
    with pytest.raises(ValueError, match=re.escape(what)):
        model(torch.randn(3, 32))


def test_copies_and_moves_have_a_weight_of_their_own():
    layer, x = packed_layer("channel"), torch.randn(3, INPUTS).bfloat16()
    layer.bias.zero_()
    first = layer(x)
    twin = copy.deepcopy(layer)
    twin.weight_scale.mul_(2)
    assert torch.equal(twin(x), 2 * first)
    assert torch.equal(layer(x), first)
    layer.to("meta")
    assert layer._known is None


# ---- The gradient of the input of packed layers, against the gradient of the dequantized weight in float64


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_is_that_of_the_dequantized_weight(scheme):
    """dy is rounded to three bits after the leading one (31 dB on average), or not at all where dx is not in FP8."""
    layer = packed_layer(scheme)
    dx, expected = gradients(layer)
    granularity = layer.scheme.weight.granularity
    in_fp8 = scheme not in ("weight", "int8") and (granularity.cols is None or granularity.transposes)
    assert worst_row(dx, expected) > (26 if in_fp8 else 120)
    dx, expected = gradients(layer, torch.bfloat16)
    assert dx.dtype == torch.bfloat16
    assert worst_row(dx, expected) > 26


def test_blocks_at_the_edge_may_be_smaller():
    assert worst_row(*gradients(packed_layer("block", inputs=200, outputs=328))) > 26


@pytest.mark.parametrize(("scheme", "products"), [("channel", 2), ("block", 2), ("mx", 1), ("weight", 0)])
def test_the_gemm_of_the_gradient_runs_in_eight_bits_where_the_scales_allow_it(scheme, products):
    layer = packed_layer(scheme)
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    counts = operations(lambda: layer(x).sum().backward())
    assert counts["octavo::scaled_mm"] == products
    assert products or not counts["octavo::quantize"]
    for rows in (x.detach(), x[:1].detach().bfloat16()):  # the second is not cast
        assert torch.equal(layer(rows), layer(rows.clone().requires_grad_()))


def test_the_weight_is_frozen_and_nothing_of_the_input_is_saved():
    layer = packed_layer("channel")
    saved = saved_tensors(lambda: layer(torch.randn(TOKENS, INPUTS, requires_grad=True)))
    assert {t.data_ptr() for t in saved} == {layer.weight.data_ptr(), layer.weight_scale.data_ptr()}
    assert "frozen" in repr(layer)
    assert list(layer.parameters()) == []


def test_compiled_code_has_the_gradient_too():
    layer = packed_layer("channel")
    eager, _ = gradients(layer)
    layer.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(eager, gradients(layer)[0])


@pytest.mark.parametrize("scheme", ["channel", "mx"])  # the first is fused with quantization
def test_the_gradient_goes_through_a_whole_model(made, scheme):
    model = octavo.load(made("llama", scheme=scheme))
    assert not model(IDS).logits.requires_grad
    before = logits(model, IDS)
    source = AutoModelForCausalLM.from_pretrained(made("llama"), dtype=torch.float32)
    found = []
    for each in (model, source):
        embedding = each.get_input_embeddings().weight.requires_grad_()
        now = each(IDS).logits
        now.float().log_softmax(-1)[..., 0].sum().backward()
        found.append(embedding.grad.double())
        if each is model:
            assert torch.equal(now, before)
    assert distance(*found) < 0.2  # eight bits in either pass


# ---- Packed layers in the format of AMD's MI300: the same numbers, by emulation. The device is said to take FNUZ


CPU = torch.device("cpu")
OUTER = ["channel", "tensor", "static"]


@pytest.fixture
def mi300(monkeypatch):
    monkeypatch.setattr("octavo.checkpoint.scheme.takes_fnuz", lambda place: True)


def test_every_byte_is_half_the_number():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide, half = codes.float(), packed_linear.fnuz_data(codes).float()
    assert torch.equal(half.isnan(), wide.isnan())
    finite = ~wide.isnan()
    assert torch.equal(2 * half[finite], wide[finite])


@pytest.mark.parametrize("scheme", OUTER)
def test_a_layer_holds_the_same_weight_and_computes_in_fnuz(mi300, scheme):
    layer, model = packed_layer(scheme), nn.Sequential(packed_layer(scheme))
    packed_linear.use_formats_of(model, CPU)
    own = model[0]
    assert own.weight.dtype == torch.float8_e4m3fnuz
    assert torch.equal(own.packed_weight().dequantize(), layer.packed_weight().dequantize())
    x = torch.randn(33, own.in_features)
    assert own.operand(x).data.dtype == torch.float8_e4m3fnuz
    if scheme == "static":  # the same grid: only the scale has another factor
        assert torch.equal(own(x), layer(x))
        assert own.input_limit < 1.1 * layer.input_limit
    assert worst_row(own(x), (x @ layer.packed_weight().dequantize().T + layer.bias).double()) > 22
    actual, expected = gradients(own)
    assert worst_row(actual, expected) > 40  # dx is computed with the widened weight
    before = own(x)
    own.freeze_input(x.abs().max())
    assert worst_row(own(x), before.double()) > 18


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_is_opened_in_fnuz(mi300, made, name):
    model = opened(made, name)
    dtypes = {tensor.dtype for tensor in model.state_dict().values()}
    assert torch.float8_e4m3fnuz in dtypes
    assert torch.float8_e4m3fn not in dtypes
    assert "octavo::scaled_mm" in operations(lambda: logits(model))
    assert distance(logits(model), logits(open_theirs(made(name), torch.float32))) < 0.2


def test_the_gemm_of_an_mi300():
    mi300, mi350 = GPUS["mi300"], GPUS["mi350"]
    for name, scheme in SCHEMES.items():
        assert scheme_on(scheme, mi350) is scheme
        assert scheme_on(scheme, CPU) is scheme
        cast, backend = find_gemm(scheme_on(scheme, mi300), mi300)
        assert (backend.name == "hipblaslt") == (name in OUTER)
        assert (cast is None) == (name not in (*OUTER, "int8"))


# ---- The buffers that packed layers share, and what a model's state says of them


NAME = "model.layers.0.mlp.up_proj"


def test_the_layers_bytes_are_views_of_one_buffer_and_keep_their_names(made):
    folder = made("llama with biases", scheme="channel")
    model = octavo.load(folder)
    state = model.state_dict()
    assert same_bits(state, load_file(folder / "model.safetensors"))
    stack = model.model.layers[1].mlp.stacked.weight
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, packed_linear.PackedLinear)
    assert layer.weight.untyped_storage().data_ptr() == stack.data.untyped_storage().data_ptr()
    assert torch.equal(layer.weight.view(torch.uint8), stack.data[256:].view(torch.uint8))
    assert "stack" not in " ".join(state)


@pytest.mark.parametrize("scheme", [CHANNEL, INT8], ids=lambda scheme: scheme.name)
def test_a_stack_is_its_layers_side_by_side_whichever_has_a_bias(scheme):
    model = nn.ModuleDict({name: nn.Linear(48, n, bias=name != "b") for name, n in (("a", 17), ("b", 5), ("c", 32))})
    state = {}
    for name, linear in model.items():
        q = quantize(linear.weight.detach(), scheme.weight)
        state |= {f"{name}.weight": q.data, f"{name}.weight_scale": q.scale}
        state |= {f"{name}.bias": linear.bias.bfloat16()} if name != "b" else {}
    packed_linear.swap_linears(model, dict.fromkeys(model, scheme))
    model.load_state_dict(state, assign=True)
    x = torch.randn(9, 48)
    apart = [layer(x) for layer in model.values()]
    stack = packed_linear.Stacked()
    assert stack.update(list(model.values()))
    assert stack.cast == scheme.inputs
    y = packed_linear.packed_product(quantize(x, scheme.inputs), stack.weight, stack.bias, torch.float32)
    assert torch.equal(y, torch.cat(apart, 1))
    assert all(torch.equal(layer(x), alone) for layer, alone in zip(model.values(), apart, strict=True))
    assert model.state_dict().keys() == state.keys()


def test_a_saved_model_opens_again(made, tmp_path):
    model = opened(made, "qwen3")
    model.save_pretrained(tmp_path / "again")
    assert same_bytes(made("qwen3", scheme="channel"), tmp_path / "again")
    assert torch.equal(logits(octavo.load(tmp_path / "again")), logits(model))


def test_another_models_state_is_taken_in_place(made):
    model, state = opened(made), opened(made).state_dict()
    before, bytes_at = logits(model), model.model.layers[0].mlp.stacked.weight.data.data_ptr()
    state[f"{NAME}.weight_scale"] = 2 * state[f"{NAME}.weight_scale"]
    model.load_state_dict(state)
    assert model.model.layers[0].mlp.stacked.weight.data.data_ptr() == bytes_at
    assert distance(logits(model), before) > 0.01
    assert torch.equal(*(logits(each, tokens(1)[:1]) for each in (model, copy.deepcopy(model))))
    del state[f"{NAME}.weight"]
    with pytest.raises(RuntimeError, match=rf"Missing key.*{NAME}\.weight"):
        model.load_state_dict(state)
    state[f"{NAME}.weight"] = torch.zeros(256, 128)
    message = r"up_proj\.weight must be torch\.float8_e4m3fn \[256, 128\], got torch.float32"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)


def test_casting_a_model_leaves_bytes_and_scales_as_they_are(made):
    model = opened(made)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    model.float()
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == (before[key].dtype if "_proj." in key else torch.float32), key
        assert torch.equal(tensor.to(before[key].dtype).view(torch.uint8), before[key].view(torch.uint8)), key
    assert logits(model).dtype == torch.float32
    assert {t.device.type for t in copy.deepcopy(model).to("meta").state_dict().values()} == {"meta"}


@pytest.mark.parametrize("change", ["assigned", "copied", "moved"])
def test_layers_with_other_buffers_are_stacked_again(made, change):
    model = opened(made, "llama with biases")
    required, mlp = logits(model), model.model.layers[0].mlp
    if change == "assigned":
        model.load_state_dict({key: t.clone() for key, t in model.state_dict().items()}, assign=True)
    elif change == "moved":
        model._apply(torch.clone)
    else:
        model = copy.deepcopy(model)
        mlp = model.model.layers[0].mlp
    assert torch.equal(logits(model), required)
    assert mlp.stacked.views[0] is mlp.gate_proj.weight
    mlp.up_proj.weight_scale.mul_(2)
    assert distance(logits(model), required) > 0.01


def test_a_layer_with_a_frozen_scale_leaves_its_stack(made):
    model = opened(made)
    mlp, before = model.model.layers[0].mlp, logits(model)
    mlp.up_proj.freeze_input(torch.tensor(4.0))
    assert 0 < distance(logits(model), before) < 0.2
    assert mlp.stacked.views == []


def test_what_inference_mode_made_can_be_trained_around(made):
    model = opened(made)
    model.load_state_dict({key: t.clone() for key, t in model.state_dict().items()}, assign=True)
    with torch.inference_mode():
        model(torch.arange(9)[None])
    embedding = model.get_input_embeddings().weight.requires_grad_()
    model(torch.arange(9)[None]).logits.sum().backward()
    assert embedding.grad.isfinite().all()


# ---- Norms and MLPs of packed models, fused, against training and against the layers one by one


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_is_that_of_training_to_the_bit(made, name, dtype):
    trained, packed = open_theirs(made(name), torch.float32), opened(made, name)
    assert len(octavo.convert(trained, "rowwise").fused) == 4
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


PRODUCTS = {"channel": "octavo::scaled_mm", "int8": "octavo::int8_mm", "weight": "octavo::weight_only_mm"}


@pytest.mark.parametrize(
    ("name", "scheme", "limit"),
    [*((name, "channel", 0.018) for name in ARCHITECTURES),  # 35 dB
     *((name, "int8", 2e-3) for name in ("llama with biases", "qwen3")),
     *((name, "weight", 1e-5) for name in ARCHITECTURES)],
)  # fmt: skip
def test_norms_and_activations_are_fused_and_layers_stacked(made, name, scheme, limit):
    model = opened(made, name, scheme)
    seen, casts = operations(lambda: logits(model)), scheme != "weight"
    assert seen["octavo::norm_quantize"] == 4 * casts
    assert seen["octavo::activation_quantize"] == 2 * casts
    assert seen["octavo::quantize"] == 2 * casts  # the attention's output
    assert {product: seen[product] for product in PRODUCTS.values() if seen[product]} == {PRODUCTS[scheme]: 8}
    reference = layer_by_layer(model)
    apart = operations(lambda: logits(reference))
    assert (apart["octavo::norm_quantize"], apart[PRODUCTS[scheme]]) == (0, 14)
    for each in (model, reference):
        each.float()  # in which a norm's output is not rounded on its way to the quantizer
    assert distance(logits(model), logits(reference)) < limit


@pytest.mark.parametrize(("name", "scheme"), [*((name, "channel") for name in ARCHITECTURES), ("llama", "weight")])
def test_one_row_is_not_quantized(made, name, scheme):
    model, row = opened(made, name, scheme), tokens(1)[:1]
    seen = operations(lambda: logits(model, row))
    assert seen["octavo::weight_only_mm"] == 8
    assert sum(seen[operation] for operation in ("octavo::norm_quantize", "octavo::quantize", "octavo::scaled_mm")) == 0
    wide = open_theirs(made(name), torch.float32)
    for path, layer in wide.named_modules():
        if path.endswith("_proj"):
            layer.weight.data = model.get_submodule(path).packed_weight().dequantize()
    model.get_input_embeddings().weight.requires_grad_()
    for y in (logits(model, row), model(row).logits.detach()):  # without a gradient and with one
        assert distance(y, logits(wide, row)) < 0.01


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_our_own_models_are_fused_too(packed, name):
    model = load_packed(packed[name].packed).model
    with torch.no_grad():
        assert operations(lambda: model(tokens(9)))["octavo::norm_quantize"] == 4


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("path", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj", "self_attn"])
def test_what_a_library_puts_in_a_layers_place_runs(made, path, hooked):
    model = opened(made).float()
    block, embedded = model.model.layers[1], model.get_input_embeddings()(tokens().t()).transpose(0, 1)
    run = partial(logits, lambda _: model(inputs_embeds=embedded, **{CACHE: QuantizedKVCache.for_model(model, 21)}))
    before, layer = run(), block.get_submodule(path)
    if hooked:
        layer.register_forward_hook(lambda module, args, y: Doubled(nn.Identity())(y))
    else:
        block.set_submodule(path, type(type(layer).__name__, (Doubled,), {})(layer))  # of the same name
    doubled = run()
    layer._forward_hooks.clear()
    block.set_submodule(path, layer)
    getattr(layer, "o_proj", layer).weight_scale.mul_(2)  # of the stack, where it has one
    assert distance(doubled, before) > 0.01
    assert distance(run(), doubled) < 0.03


def test_fusing_twice_is_fusing_once(made):
    model = opened(made)
    classes = [type(m) for m in model.modules()]
    packed_linear.fuse(model)
    assert [type(m) for m in model.modules()] == classes
    assert sum(isinstance(m, packed_linear.PackedNormLinear) for m in model.modules()) == 2
    assert len({type(m) for m in model.modules() if isinstance(m, packed_linear.PackedMLP)}) == 1


def test_no_tokens_and_a_vector(made):
    model = opened(made)
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].post_attention_layernorm
    for shape in ((0, 128), (2, 0, 128), (128,), (1, 2, 3, 128)):
        x = torch.randn(shape).bfloat16()
        assert mlp(x).shape == x.shape
        y, total = mlp(x, norm, x)
        assert y.shape == total.shape == x.shape
        assert torch.equal(total, x + x)
