"""The engine on a GPU: a CUDA graph of a step gives what eager steps give, whatever is reused."""

import copy
from typing import Any

import pytest
import torch
from generation_examples import answers, batch, pair
from torch import Tensor, nn

from octavo.generation import Engine
from octavo.generation.prompts import pad_prompts
from octavo.kv_cache.transformers_cache import QuantizedKVCache
from octavo.models import LlamaConfig, build

pytestmark = pytest.mark.gpu

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}


def on_gpu(name: str, **settings: Any) -> tuple[Any, Any]:
    model, fast = pair(name, **settings)
    return model.cuda(), fast.cuda()


def moved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cuda() for name, t in inputs.items()}


def eager(fast: Any) -> Any:
    """The same model, whose engine captures no graph, because a module has a hook."""
    other = copy.deepcopy(fast)
    other.model.norm.register_forward_hook(lambda *_: None)
    return other


def session(model: Any) -> Any:
    return model.octavo_engine.sessions[-1]


@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_graph_gives_what_eager_steps_give(name, kv_cache, settings):
    _, fast = on_gpu(name, kv_cache=kv_cache)
    slow = eager(fast)
    for inputs in (batch(), batch(padding=(0, 4, 9)), batch(length=20, padding=(3, 0, 0)), batch()):
        found, required = (answers(each, moved(inputs), **settings) for each in (fast, slow))
        assert torch.equal(found, required)
    assert session(fast).graph is not None
    assert session(slow).graph is None


@pytest.mark.filterwarnings("ignore:generate runs on transformers' own loop")
@pytest.mark.parametrize("padding", [(), (0, 4, 9)], ids=["equal", "padded"])
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokens_are_those_of_transformers_loop_with_the_same_cache(name, kv_cache, padding):
    _, fast = on_gpu(name, kv_cache=kv_cache)
    inputs = moved(batch(padding=padding))
    found = answers(fast, inputs, do_sample=False)
    cache = QuantizedKVCache.for_model(fast, session(fast).capacity, kv_cache)
    assert torch.equal(found, answers(fast, inputs, do_sample=False, past_key_values=cache, disable_compile=True))


@pytest.mark.parametrize("padding", [(), (0, 4, 9)], ids=["equal", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokens_are_transformers_most_likely_ones(name, padding):
    """The logits of transformers' own forward pass over the text: the chosen token has the largest, or one as large to
    the precision of BF16."""
    model, fast = on_gpu(name)
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
    _, fast = on_gpu("llama")
    slow, inputs, found = eager(fast), moved(batch(rows=1)), []
    end = int(answers(fast, inputs, **SAMPLED, eos_token_id=None)[0, 15])
    for each in (fast, slow):
        text = answers(each, inputs, **SAMPLED, eos_token_id=end)
        found.append((text.shape[1], text.tolist(), torch.rand(4, device="cuda").tolist()))
    assert found[0][0] < 35
    assert found[0] == found[1]


def test_a_changed_model_is_captured_again():
    _, fast = on_gpu("llama")
    inputs = moved(batch())
    before, graph = answers(fast, inputs, do_sample=False), session(fast).graph
    assert torch.equal(answers(fast, inputs, do_sample=False), before)
    assert session(fast).graph is graph
    head = nn.Linear(64, 97, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    fast.lm_head = head
    after = answers(fast, inputs, do_sample=False)
    assert session(fast).graph is not graph
    assert torch.equal(after, answers(eager(fast), inputs, do_sample=False))
    fast.model.layers[0].mlp.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    assert not torch.equal(answers(fast, inputs, do_sample=False), after)
    assert session(fast).graph is None


def test_a_model_that_waits_for_the_device_runs_eagerly():
    model, fast = on_gpu("llama")
    norm = fast.model.norm

    class Waiting(type(norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.abs().max()) > 0 else x

    norm.__class__ = Waiting
    inputs = moved(batch())
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"):
        found = answers(fast, inputs, do_sample=False)
    assert session(fast).graph is None
    assert torch.equal(found[:, :12], answers(model, inputs, do_sample=False)[:, :12])
    assert torch.equal(answers(fast, inputs, do_sample=False), found)
    assert torch.cuda.memory_allocated() > 0  # the device is usable


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_of_ours(autocast):
    config = LlamaConfig(vocabulary=97, layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=128)
    torch.manual_seed(0)
    model = build(config).cuda().eval()
    engine = Engine(model, context=128)

    def text() -> Tensor:
        prompts = pad_prompts([[1, 2, 3, 4, 5], [6, 7]], torch.device("cuda"))
        steps = engine.run(prompts, 20, lambda ids, logits: logits.argmax(-1), None, watched=False)
        *_, (ids, _) = steps
        return ids

    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        captured, again = text(), text()
        assert engine.sessions[-1].graph is not None
        model.model.norm.register_forward_hook(lambda *_: None)
        assert torch.equal(text(), captured)
        assert engine.sessions[-1].graph is None
    assert torch.equal(again, captured)


def test_too_large_a_cache_is_refused_before_anything_runs():
    _, fast = on_gpu("llama")
    fast.octavo_engine.limit = 1 << 32
    seen: list[int] = []
    fast.model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(MemoryError, match=r"need .* GiB in torch.bfloat16, and .* GiB are free on the GPU. What fits"):
        answers(fast, moved(batch()), max_new_tokens=1 << 31)
    assert seen == []


def test_the_peak_of_memory_does_not_grow_with_the_prompt():
    _, fast = on_gpu("llama")
    fast.octavo_engine.limit = 1 << 16
    peaks = []
    for length in (8192, 32768):
        inputs = moved(batch(rows=1, length=length))
        answers(fast, inputs, max_new_tokens=2, do_sample=False)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answers(fast, inputs, max_new_tokens=2, do_sample=False)
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[1] < 2 * peaks[0]
