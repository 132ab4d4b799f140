"""`octavo.load` on CUDA: against training, against the layers one by one, compiled, and in CUDA graphs."""

import copy

import pytest
import torch
from generation_examples import step_graph
from gpus import ONLY_HOPPER, capture, no_waits, poison
from metrics import distance
from packed_examples import write_run
from packed_experts import packed_experts, packed_mixtral, routed
from packed_layers import gradients, packed_layer, worst_row
from runtime_examples import layer_by_layer, logits, static_steps, tokens
from safetensors.torch import save_file
from tiny_models import folder_maker, open_theirs
from transformers import StaticCache

import octavo
from octavo import convert, models
from octavo.checkpoint import scheme as gemm_path
from octavo.checkpoint.folder import RunFolder
from octavo.inference.opening import load_packed
from octavo.inference.transformers_cache import CACHE
from octavo.ops import Backend
from octavo.packing import pack
from octavo.scales import scale_state, update_scales

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own

SIZES = {"hidden_size": 512, "intermediate_size": 1104, "num_hidden_layers": 3, "num_key_value_heads": 2}
SIZES |= {"head_dim": 128, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    make = folder_maker(tmp_path_factory.mktemp("model"), **SIZES)
    return open_theirs(make("llama")), make("llama", scheme="channel")


def ids(batch, length):
    return torch.randint(0, 99, (batch, length), generator=torch.Generator().manual_seed(2)).cuda()


@ONLY_HOPPER
@pytest.mark.parametrize(("batch", "length"), [(2, 1), (1, 13), (16, 1), (2, 100)])
def test_the_forward_pass_is_that_of_training_to_the_bit(trained, batch, length):
    model = copy.deepcopy(trained[0]).cuda()
    octavo.convert(model, "rowwise")
    packed = octavo.load(trained[1], "cuda")
    assert torch.equal(logits(packed, ids(batch, length)), logits(model, ids(batch, length)))


def unquantized(trained, text):
    return logits(copy.deepcopy(trained[0]).float().cuda(), text.cuda())


def check_as_near(found, known, exact):
    """Both are off the unquantized model by as much; in BF16 they differ, for a last bit turns an activation's code."""
    assert 0.01 < distance(known, exact) < 0.3
    assert distance(found, exact) < 1.25 * distance(known, exact)
    assert distance(found, known) < distance(known, exact)


@ONLY_HOPPER
def test_fused_is_what_the_layers_are_one_by_one(trained):
    packed = octavo.load(trained[1], "cuda")
    for batch, length in ((16, 1), (3, 50)):
        text = ids(batch, length)
        fused, apart = (logits(m, text) for m in (packed, layer_by_layer(packed)))
        assert not torch.equal(fused, apart)
        check_as_near(fused, apart, unquantized(trained, text))


@ONLY_HOPPER
def test_the_gpu_gives_what_the_cpu_gives(trained):
    text = ids(2, 30)
    gpu, cpu = logits(octavo.load(trained[1], "cuda"), text), logits(octavo.load(trained[1]), text.cpu())
    check_as_near(gpu.cpu(), cpu, unquantized(trained, text).cpu())


@ONLY_HOPPER
def test_moving_to_the_gpu_keeps_one_buffer_for_each_stack(trained):
    def requested():  # a block of the allocator's cache may be larger than what was requested
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    before = requested()
    model = octavo.load(trained[1]).cuda()
    assert requested() - before < 1.1 * (trained[1] / "model.safetensors").stat().st_size
    assert torch.equal(logits(model, ids(2, 9)), logits(octavo.load(trained[1], "cuda"), ids(2, 9)))


@ONLY_HOPPER
def test_compiled_with_a_static_cache_it_gives_the_same(trained):
    torch.compiler.reset()
    model = octavo.load(trained[1], "cuda")
    required = static_steps(model, model)
    found = static_steps(model, torch.compile(model, fullgraph=True))
    check_as_near(found, required, unquantized(trained, tokens(8)))


@ONLY_HOPPER
def test_a_step_in_a_cuda_graph(trained):
    model = octavo.load(trained[1], "cuda")
    cache, prompt = StaticCache(config=model.config, max_cache_len=16), ids(1, 5)
    with torch.no_grad():
        model(prompt, **{CACHE: cache}, use_cache=True)
        token, position = prompt[:, -1:].clone(), torch.tensor([[5]], device="cuda")
        lengths = [layer.cumulative_length for layer in cache.layers]

        def step():
            for length in lengths:
                length.fill_(5)
            return model(token, position_ids=position, **{CACHE: cache}, use_cache=True).logits

        required = step()
        graph, found = capture(step, warm_up=1)
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, required)
        token.fill_(7)
        graph.replay()
        assert not torch.equal(found, required)
        assert torch.equal(found, step())


@ONLY_HOPPER
def test_generate_runs_on_one_graph_of_a_step(trained):
    model = octavo.load(trained[1], "cuda")
    mask = torch.ones(1, 5, dtype=torch.int64, device="cuda")
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids(1, 5), **settings)
    assert text.shape == (1, 17)
    assert torch.equal(text, model.generate(ids(1, 5), cache_implementation="static", **settings))
    assert len(model.octavo_engine.sessions) == 1
    assert step_graph(model.octavo_engine) is not None


# ---- A packed run's forward pass on a GPU is that of training, bit for bit: the same bytes, scales and GEMMs


CONFIGS = {
    "llama": models.LlamaConfig(256, layers=2, width=256, heads=4, kv_heads=4, mlp_width=512, context=48),
    "gpt2": models.GPT2Config(256, 2, 256, 4, 48),
}


def batch(seed):
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("recipe", "scheme"), [("rowwise", "channel"), ("blockwise", "block"), ("delayed", "static")])
def test_a_packed_run_repeats_its_forward_pass(tmp_path, recipe, scheme, name):
    config = CONFIGS[name]
    model = models.build(config).cuda().bfloat16().train()
    convert(model, recipe)
    for step in range(2):
        model(batch(step)).float().square().mean().backward()
        update_scales(model)
    run = write_run(tmp_path / "run", model, config.to_hf(), recipe=recipe, model=name)
    state = {key: t.detach().cpu().clone() for key, t in scale_state(model).items()}
    save_file(state | {"random.cpu": torch.zeros(1)}, RunFolder(run).newest() / "state.safetensors")
    assert set(pack(run, tmp_path / "out").packed.values()) == {scheme}
    packed = load_packed(tmp_path / "out", "cuda").model
    with torch.no_grad():
        want, found = model.eval()(batch(9)), packed(batch(9))
    assert want.isfinite().all()
    assert want.std() > 0.01
    assert torch.equal(found, want)


# ---- The gradient of the input of packed layers on CUDA, eager and compiled, against the dequantized weight in floa


@ONLY_HOPPER
@pytest.mark.parametrize("scheme", ["channel", "tensor", "static", "block"])
def test_the_gradient_is_that_of_the_dequantized_weight(scheme):
    layer = packed_layer(scheme).cuda()
    eager, expected = gradients(layer, torch.bfloat16)
    assert worst_row(eager, expected) > 26
    layer.compile(fullgraph=True)
    compiled, _ = gradients(layer, torch.bfloat16)
    assert worst_row(compiled, expected) > 26


# ---- Packed experts on a Hopper GPU: against float64 from the bytes, training's bits, and a CUDA graph


@ONLY_HOPPER
@pytest.mark.parametrize("scheme", ["channel", "static", "block", "mx", "weight"])
def test_a_step_waits_for_nothing_and_becomes_a_graph(scheme):
    experts, _, _ = packed_experts((scheme, scheme), "cuda")
    x, index, weight = (t.cuda() for t in routed())
    with torch.inference_mode():
        expected = [experts(x, index, weight), experts(2 * x, index.flip(0), weight)]
        with no_waits():
            experts(x, index, weight)
        graph, y = capture(lambda: experts(x, index, weight))
        graph.replay()
        assert torch.equal(y, expected[0])
        x.mul_(2)
        index.copy_(index.flip(0))
        poison()
        graph.replay()
        assert torch.equal(y, expected[1])


@ONLY_HOPPER
def test_blocks_of_a_mixtral_give_the_numbers_of_a_cpu(tmp_path):
    _, folder = packed_mixtral(tmp_path, "block")
    ids = torch.randint(0, 99, (2, 13), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = octavo.load(folder)(ids).logits
        actual = octavo.load(folder, "cuda")(ids.cuda()).logits
    assert distance(actual, expected) < 0.2  # a router may choose another of two near experts


# ---- A packed model whose weights alone are in FP8, on CUDA: against the CPU, compiled, and through `generate`


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    make = folder_maker(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=544, head_dim=64)
    return lambda scheme: make("llama with biases", scheme=scheme)


@pytest.mark.parametrize("length", [1, 13, 300])  # one row, tiles, the widened weight
def test_the_gpu_gives_what_the_cpu_gives_weight_only_model(packed, length):
    models = [octavo.load(packed("weight"), device) for device in ("cuda", "cpu")]
    text = tokens(length)[:1]
    gpu, cpu = logits(models[0], text.cuda()).cpu(), logits(models[1], text)
    assert distance(gpu, cpu) < 0.02  # BF16's own
    assert distance(gpu, logits(layer_by_layer(models[0]), text.cuda()).cpu()) < 0.02


def test_compiled_it_gives_the_same(packed):
    torch.compiler.reset()
    model = octavo.load(packed("weight"), "cuda")
    text = tokens(7).cuda()
    eager = logits(model, text)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    assert distance(logits(model, text), eager) < 0.02


def test_generate_takes_the_tokens_of_the_whole_forward_pass(packed):
    model = octavo.load(packed("weight"), "cuda")
    ids = model.generate(tokens(9)[:1].cuda(), max_new_tokens=8, do_sample=False)
    scores = logits(model, ids[:, :-1])[0, 8:].float()
    chosen = scores.gather(1, ids[0, 9:, None]).squeeze(1)
    assert (scores.amax(1) - chosen < 0.05 * scores.std()).all()  # but for ties within BF16's rounding


def test_a_gpu_without_an_fp8_gemm_runs_a_channel_folder_so(packed, monkeypatch):
    expected = logits(octavo.load(packed("weight"), "cuda"), tokens(5).cuda())
    monkeypatch.setattr("octavo.checkpoint.scheme.product_backend", lambda *args: Backend("none", "an Ampere"))
    monkeypatch.setattr(gemm_path, "_find_cached", gemm_path._input_cast)
    with pytest.warns(UserWarning, match="of the scheme channel .an Ampere: weight-only."):
        model = octavo.load(packed("channel"), "cuda")
    assert torch.equal(logits(model, tokens(5).cuda()), expected)
