"""`octavo.load` on CUDA: against training, against the layers one by one, compiled, and in CUDA graphs."""

import copy
from pathlib import Path

import pytest
import torch
from hopper import ONLY_HOPPER
from metrics import distance
from runtime_examples import layer_by_layer, logits, static_steps, tokens
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import octavo
from octavo.packing import pack

pytestmark = [
    pytest.mark.gpu,
    ONLY_HOPPER,
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]

SIZES = {
    "vocab_size": 99, "hidden_size": 512, "intermediate_size": 1104, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 256,
}  # fmt: skip
Pair = tuple[LlamaForCausalLM, Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model in BF16, and its packed folder."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    for p in model.parameters():  # and not the rotary frequencies
        p.data = (p + torch.randn_like(p) * 0.2 if p.ndim == 1 else p * 2).detach().bfloat16()
    root = tmp_path_factory.mktemp("model")
    model.save_pretrained(root / "model")
    pack(root / "model", root / "packed")
    return model, root / "packed"


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 99, (batch, length), generator=torch.Generator().manual_seed(2)).cuda()


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 13), (16, 1), (2, 100)])
def test_the_forward_pass_is_that_of_training_to_the_bit(trained: Pair, batch: int, length: int) -> None:
    model = copy.deepcopy(trained[0]).cuda()
    octavo.convert(model, "rowwise")
    packed = octavo.load(trained[1], "cuda")
    assert torch.equal(logits(packed, ids(batch, length)), logits(model, ids(batch, length)))


def unquantized(trained: Pair, text: Tensor) -> Tensor:
    return logits(copy.deepcopy(trained[0]).float().cuda(), text.cuda())


def check_as_near(found: Tensor, known: Tensor, exact: Tensor) -> None:
    """Both are off the unquantized model by as much; in BF16 they differ, for a last bit turns an activation's code."""
    assert 0.01 < distance(known, exact) < 0.3
    assert distance(found, exact) < 1.25 * distance(known, exact)
    assert distance(found, known) < distance(known, exact)


def test_fused_is_what_the_layers_are_one_by_one(trained: Pair) -> None:
    packed = octavo.load(trained[1], "cuda")
    for batch, length in ((16, 1), (3, 50)):
        text = ids(batch, length)
        fused, apart = (logits(m, text) for m in (packed, layer_by_layer(packed)))
        assert not torch.equal(fused, apart)
        check_as_near(fused, apart, unquantized(trained, text))


def test_the_gpu_gives_what_the_cpu_gives(trained: Pair) -> None:
    text = ids(2, 30)
    gpu, cpu = logits(octavo.load(trained[1], "cuda"), text), logits(octavo.load(trained[1]), text.cpu())
    check_as_near(gpu.cpu(), cpu, unquantized(trained, text).cpu())


def test_moving_to_the_gpu_keeps_one_buffer_for_each_stack(trained: Pair) -> None:
    before = torch.cuda.memory_allocated()
    model = octavo.load(trained[1]).cuda()
    held = torch.cuda.memory_allocated() - before
    assert held < 1.1 * (trained[1] / "model.safetensors").stat().st_size
    assert torch.equal(logits(model, ids(2, 9)), logits(octavo.load(trained[1], "cuda"), ids(2, 9)))


def test_compiled_with_a_static_cache_it_gives_the_same(trained: Pair) -> None:
    torch.compiler.reset()
    model = octavo.load(trained[1], "cuda")
    required = static_steps(model, model)
    found = static_steps(model, torch.compile(model, fullgraph=True))
    check_as_near(found, required, unquantized(trained, tokens(8)))


def test_a_step_in_a_cuda_graph(trained: Pair) -> None:
    model = octavo.load(trained[1], "cuda")
    cache, prompt = StaticCache(config=model.config, max_cache_len=16), ids(1, 5)
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True)
        token, position = prompt[:, -1:].clone(), torch.tensor([[5]], device="cuda")
        lengths = [layer.cumulative_length for layer in cache.layers]

        def step() -> Tensor:
            for length in lengths:
                length.fill_(5)
            found: Tensor = model(token, position_ids=position, past_key_values=cache, use_cache=True).logits
            return found

        required = step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, required)
        token.fill_(7)
        graph.replay()
        assert not torch.equal(found, required)
        assert torch.equal(found, step())


def test_generate_runs_on_one_graph_of_a_step(trained: Pair) -> None:
    model = octavo.load(trained[1], "cuda")
    mask = torch.ones(1, 5, dtype=torch.int64, device="cuda")
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids(1, 5), **settings)
    assert text.shape == (1, 17)
    assert torch.equal(text, model.generate(ids(1, 5), cache_implementation="static", **settings))
    (session,) = model.octavo_engine.sessions
    assert session.graph is not None
