"""The engine on a GPU: a CUDA graph of a step gives what eager steps give, whatever is reused."""

import copy
from functools import partial

import pytest
import torch
from attention_oracle import attention64, given
from bits import on_gpu
from generation_examples import DTYPES, SAMPLED, answers, batch, greedy, model_of, pair, prompts, step_graph
from gpus import no_waits, peak_of
from metrics import sqnr
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.inference.engine import Engine
from octavo.inference.kv_cache import LayerKVCache, Length, ModelKVCache, prompt_attention
from octavo.inference.sampling import Sampling
from octavo.inference.session import pad_prompts
from octavo.inference.transformers_cache import CACHE, QuantizedKVCache
from octavo.models import LlamaConfig, build

pytestmark = pytest.mark.gpu


def pair_on_gpu(name: str, **settings) -> tuple:
    model, fast = pair(name, **settings)
    return model.cuda(), fast.cuda()


def moved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cuda() for name, t in inputs.items()}


def eager(fast):
    """The same model, whose engine captures no graph, because a module has a hook."""
    other = copy.deepcopy(fast)
    other.model.norm.register_forward_hook(lambda *_: None)
    return other


def session(model):
    return model.octavo_engine.sessions[-1]


@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_graph_gives_what_eager_steps_give(name, kv_cache, settings):
    _, fast = pair_on_gpu(name, kv_cache=kv_cache)
    slow = eager(fast)
    for inputs in (batch(), batch(padding=(0, 4, 9)), batch(length=20, padding=(3, 0, 0)), batch()):
        found, required = (answers(each, moved(inputs), **settings) for each in (fast, slow))
        assert torch.equal(found, required)
    assert step_graph(fast.octavo_engine) is not None
    assert session(fast).passes[64].graph is not None
    assert step_graph(slow.octavo_engine) is None


@pytest.mark.filterwarnings("ignore:generate runs on transformers' own loop")
@pytest.mark.parametrize("padding", [(), (0, 4, 9)], ids=["equal", "padded"])
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokens_are_those_of_transformers_loop_with_the_same_cache(name, kv_cache, padding):
    """By the scales of the engine, which leave padding out. A warm-up in transformers' loop counts it."""
    _, fast = pair_on_gpu(name, kv_cache=kv_cache)
    inputs = moved(batch(padding=padding))
    found = answers(fast, inputs, do_sample=False)
    scales = [(store.k_scale, store.v_scale) for store in session(fast).cache.stores] if kv_cache != "bf16" else None
    cache = QuantizedKVCache.for_model(fast, session(fast).capacity, kv_cache, scales=scales)
    assert torch.equal(found, answers(fast, inputs, do_sample=False, **{CACHE: cache}, disable_compile=True))


@pytest.mark.parametrize("padding", [(), (0, 4, 9)], ids=["equal", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokens_are_transformers_most_likely_ones(name, padding):
    """The logits of transformers' own forward pass over the text: the chosen token has the largest, within BF16."""
    model, fast = pair_on_gpu(name)
    inputs = moved(batch(padding=padding))
    text = answers(fast, inputs, do_sample=False, eos_token_id=None)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(text[:, 11:])), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(text, attention_mask=mask, position_ids=positions).logits[:, 10:-1].float()
    chosen = logits.gather(2, text[:, 11:, None])[..., 0]
    assert ((logits.amax(2) - chosen) <= 0.05 * logits.std()).all()
    assert (logits.argmax(2) == text[:, 11:]).float().mean() > 0.9


def test_a_text_ends_early_and_draws_go_on():
    _, fast = pair_on_gpu("llama")
    slow, inputs, found = eager(fast), moved(batch(rows=1)), []
    end = int(answers(fast, inputs, **SAMPLED, eos_token_id=None)[0, 15])
    for each in (fast, slow):
        text = answers(each, inputs, **SAMPLED, eos_token_id=end)
        found.append((text.shape[1], text.tolist(), torch.rand(4, device="cuda").tolist()))
    assert found[0][0] < 35
    assert found[0] == found[1]


def test_a_changed_model_is_captured_again():
    _, fast = pair_on_gpu("llama")
    inputs = moved(batch())
    before, graph = answers(fast, inputs, do_sample=False), step_graph(fast.octavo_engine)
    assert torch.equal(answers(fast, inputs, do_sample=False), before)
    assert step_graph(fast.octavo_engine) is graph
    fast.lm_head = nn.Linear(64, 97, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    after = answers(fast, inputs, do_sample=False)
    assert step_graph(fast.octavo_engine) is not graph
    assert torch.equal(after, answers(eager(fast), inputs, do_sample=False))
    fast.model.layers[0].mlp.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    assert not torch.equal(answers(fast, inputs, do_sample=False), after)
    assert step_graph(fast.octavo_engine) is None


def test_no_graph_needs_memory_that_pytorch_frees():
    """PyTorch frees the workspaces of cuBLAS that it keeps when another graph ends, or when Inductor records one."""
    _, fast = pair_on_gpu("llama")
    answers(fast, moved(batch()), do_sample=False)
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert step_graph(fast.octavo_engine) is not None
    assert torch.cuda.memory_allocated() == held


def test_a_model_that_waits_for_the_device_runs_eagerly():
    model, fast = pair_on_gpu("llama")
    norm = fast.model.norm

    class Waiting(type(norm)):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.abs().max()) > 0 else x

    norm.__class__ = Waiting
    inputs = moved(batch())
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"):
        found = answers(fast, inputs, do_sample=False)
    assert step_graph(fast.octavo_engine) is None
    assert torch.equal(found[:, :12], answers(model, inputs, do_sample=False)[:, :12])
    assert torch.equal(answers(fast, inputs, do_sample=False), found)
    assert torch.rand(4, device="cuda").unique().numel() == 4  # the device is usable, and its random numbers
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - (1 << 30)


@pytest.mark.parametrize("kv_cache", [None, "fp8"])
@pytest.mark.parametrize("ours", [False, True])
def test_prompts_of_any_length_are_replayed(ours, kv_cache):
    """The graphs of a session share their memory. Each prompt has the logits of eager code at the padded length."""
    config = LlamaConfig(vocabulary=97, layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=2048)
    model = (build(config) if ours else model_of("llama", max_position_embeddings=2048)).bfloat16().cuda().eval()
    sessions = [Engine(model, context=2048, kv_cache=kv_cache)._new_session(1, 2048) for _ in range(2)]
    sessions[1].captures = False
    with torch.no_grad():
        for length in (5, 2000, 64, 70, 90, 1500, 40, 130, 2048, 3, 80, 1999, 5, 2):
            prompts, found = pad_prompts(torch.randint(97, (1, length)).tolist(), torch.device("cuda")), []
            for each in sessions:
                logits = [each.prefill(prompts).clone()]
                for token in (3, 4, 5)[: 2048 - length]:
                    logits.append(each.step(torch.tensor([token], device="cuda")).clone())
                found.append(torch.stack(logits))
            assert torch.equal(*found)
    assert {n for n, found in sessions[0].passes.items() if found.graph is not None} >= {1, 64, 96, 2048}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_of_ours(autocast):
    config = LlamaConfig(vocabulary=97, layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=128)
    model = build(config).cuda().eval()
    engine = Engine(model, context=128)

    def text(prompts=((1, 2, 3, 4, 5), (6, 7)), wait: int = 0) -> Tensor:
        def choose(ids: Tensor, logits: Tensor) -> Tensor:
            return torch.cuda._sleep(wait) or logits.argmax(-1)

        batch = pad_prompts(prompts, torch.device("cuda"))
        *_, (ids, _) = engine.run(batch, 20, choose, None, watched=False)
        return ids

    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        captured, again = text(), text()
        assert step_graph(engine) is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            late = text(wait=1 << 23)  # cycles of the device, some milliseconds a step
        text(((9, 9, 9, 9, 9), (8, 8)))  # in another stream
        assert torch.equal(late, captured)
        model.model.norm.register_forward_hook(lambda *_: None)
        assert torch.equal(text(), captured)
        assert step_graph(engine) is None
    assert torch.equal(again, captured)


def test_too_large_a_cache_is_refused():
    _, fast = pair_on_gpu("llama")
    fast.octavo_engine.limit = 1 << 32
    with pytest.raises(MemoryError, match=r"need .* GiB in torch.bfloat16, and .* GiB are free on the GPU. What fits"):
        answers(fast, moved(batch()), max_new_tokens=1 << 31)


def test_the_peak_of_memory_does_not_grow_with_the_prompt():
    _, fast = pair_on_gpu("llama")
    fast.octavo_engine.limit = 1 << 16
    peaks = []
    for length in (8192, 32768):
        inputs = moved(batch(rows=1, length=length))
        answers(fast, inputs, max_new_tokens=2, do_sample=False)
        peaks.append(peak_of(partial(answers, fast, inputs, max_new_tokens=2, do_sample=False)))
    assert peaks[1] < 2 * peaks[0]


# ---- Drawing tokens on a GPU, without a wait for it


SAMPLING = Sampling(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.2, seed=3)


@pytest.mark.parametrize("padding", [(), (0, 3, 7, 1)])
def test_a_choice_does_not_wait_and_is_that_of_a_cpu(padding):
    torch.manual_seed(0)
    ids, logits = torch.randint(5000, (4, 30)), torch.randn(4, 5000) * 3
    first = torch.tensor(padding)[:, None] if padding else None
    required = SAMPLING.process(ids, logits, first)
    choose = SAMPLING.chooser(SAMPLING.generator(torch.device("cuda")), padding)
    ids, logits, first = (None if x is None else x.cuda() for x in (ids, logits, first))
    with no_waits():
        tokens = choose(ids, logits)
        scores = SAMPLING.process(ids, logits, first)
    assert torch.equal(scores.isinf().cpu(), required.isinf())
    assert torch.allclose(scores.cpu(), required, atol=1e-5)
    assert scores.gather(1, tokens[:, None]).isfinite().all()


# ---- A piece of a prompt into a cache that is not empty: float64, the memory it takes, and a count that replays mov


def store_of(kind: str, sizes: tuple[int, ...], used: int) -> tuple[torch.Tensor, LayerKVCache]:
    """Queries, and a cache that holds `used` tokens."""
    q, *filled = on_gpu(given(kind, *sizes))
    batch, _, kv_heads, _, dim, room = sizes
    scales = None if kind == "bf16" else filled[2:]
    store = LayerKVCache((batch, kv_heads, room, dim), kind, Length(room, "cuda"), scales=scales)
    store.keys, store.values = filled[:2]
    store.count.advance(used)
    return q, store


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 2, 40, 64, 300, 130), (1, 4, 4, 77, 128, 200, 200)], ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_against_float64(kind, shape, padded):
    *sizes, used = shape
    first = [(7 * b) % 20 for b in range(sizes[0])] if padded else None
    q, store = store_of(kind, tuple(sizes), used)
    cached = (store.keys, store.values, store.k_scale, store.v_scale)
    expected, size = attention64(q.cpu(), *(None if t is None else t.cpu() for t in cached), used, first, 0.1)
    places = None if first is None else torch.tensor(first, dtype=torch.int32, device="cuda")
    actual = store.attend(q, first=places, scale=0.1)
    assert ((actual.cpu().double() - expected).abs() <= 2**-6 * size).all()  # keys, values and probabilities are BF16


def test_without_padding_no_mask_is_made():
    q, store = store_of("bf16", (1, 8, 2, 40, 64, 300), 130)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert store.attend(q, None, 0.1).isfinite().all()


@pytest.mark.parametrize("kind", DTYPES)
def test_memory_does_not_grow_with_the_room(kind):
    stores = [store_of(kind, (1, 8, 2, 128, 64, room), 400) for room in (512, 65536)]
    peaks = [peak_of(partial(store.attend, q, None, 0.1)) for q, store in stores]
    assert peaks[1] <= peaks[0] + 2**20


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(dtype):
    model = model_of("llama").bfloat16().cuda()
    ids, found = torch.randint(1, 97, (2, 120), device="cuda"), []
    scales = None if dtype == "bf16" else [(torch.tensor([0.05]), torch.tensor([0.05]))] * 2
    for step in (120, 48):
        cache = QuantizedKVCache.for_model(model, 128, dtype, scales=scales)
        with torch.no_grad():
            parts = [model(part, **{CACHE: cache}).logits for part in ids.split(step, 1)]
        found.append(torch.cat(parts, 1).float())
    assert sqnr(*found) > (35 if dtype == "bf16" else 12)  # the whole prompt attends to unrounded keys and values


# ---- Generation on a GPU: transformers compiles its steps there, and the kernels read the cache


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_the_logits_of_the_reference(dtype, padded):
    """A BF16 model, fed the same prompts and eight tokens after them on both devices."""
    ids, mask = prompts(padded).values()
    ids = torch.cat((ids, torch.randint(1, 97, (3, 8))), 1)
    mask, found = torch.nn.functional.pad(mask, (0, 8), value=1), []
    scales = None if dtype == "bf16" else [(torch.tensor([0.05]), torch.tensor([0.05]))] * 2
    for device in ("cpu", "cuda"):
        model = model_of("llama").bfloat16().to(device)
        cache, logits = QuantizedKVCache.for_model(model, 25, dtype, scales=scales), []
        for begin, end in ((0, 9), *((t, t + 1) for t in range(9, 17))):
            inputs = {"input_ids": ids[:, begin:end].to(device), "attention_mask": mask[:, :end].to(device)}
            with torch.no_grad():
                logits.append(model(**inputs, **{CACHE: cache}).logits.float().cpu())
        found.append(torch.cat(logits[1:], 1))
    assert sqnr(*found) > 25  # BF16 arithmetic on two devices, and numbers that round to the other side


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_generation_is_the_same(dtype):
    torch.compiler.reset()
    inputs = {name: x.cuda() for name, x in prompts(False).items()}
    model = model_of("qwen2").cuda().bfloat16()
    found = []
    for disable in (True, False):
        cache = QuantizedKVCache.for_model(model, 25, dtype)
        found.append(greedy(model, inputs, cache, disable_compile=disable, max_new_tokens=6)[1].float())
        assert int(cache.stores[0].length) == 14
    assert sqnr(found[0][0], found[1][0]) > 60
    assert sqnr(found[0][1], found[1][1]) > 25  # tokens may part later


# ---- Long prompts in FP8.


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_long_prompt_in_pieces_in_fp8(kind):
    pytest.importorskip("cudnn")
    q, k, v = (torch.randn(1, n, 6000, 128, device="cuda").bfloat16() for n in (4, 2, 2))
    cache = ModelKVCache(1, 7000, kind, freezes=False)
    cache.fp8_attention = True
    found = []
    for part in (slice(0, 4500), slice(4500, 6000)):
        store = cache.append(0, k[:, :, part], v[:, :, part]).store
        assert store.runs_fp8(q[:, :, part], None)
        found.append(store.attend(q[:, :, part], None, 128**-0.5))
    assert sqnr(prompt_attention(q, k, v, scale=128**-0.5), torch.cat(found, 2)) > 18


def test_an_engine_with_prompts_in_fp8():
    pytest.importorskip("cudnn")
    model = model_of("llama", head_dim=128, max_position_embeddings=8192).bfloat16().cuda()
    ids, found = torch.randint(1, 97, (1, 5000)).tolist(), []
    for attention in ("bf16", "fp8"):
        engine = Engine(copy.deepcopy(model), context=8192, kv_cache="fp8", attention=attention)
        with torch.no_grad():
            found.append(engine._new_session(1, 5001).prefill(pad_prompts(ids, engine.device)).float())
    assert sqnr(*found) > 12
    assert not torch.equal(*found)
