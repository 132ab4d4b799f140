"""The mode of the same bits on a GPU: products and attention of any size, and models that decode from their cache."""

from itertools import product

import pytest
import torch
from attention_oracle import attention64, given
from bits import bits, on_gpu
from gemm_examples import operands, wide, wide_in_bf16, worst_row
from generation_examples import step_graph
from gpus import ONLY_HOPPER, poison
from same_bits_examples import NEW, answer, forward, pair, prompts
from tiny_models import Folders, folder_maker
from torch import Tensor

from octavo.ops.attention import ordered_attention
from octavo.ops.launching import compile_only
from octavo.rl import log_probabilities, same_bits

pytestmark = [pytest.mark.gpu, ONLY_HOPPER, pytest.mark.filterwarnings("ignore")]  # the compiler's own

MOST = 1500
ROWS = [1, 2, 7, 8, 15, 16, 17, 32, 33, 63, 64, 65, 100, 128, 512, MOST]
BATCHES = [1, 2, 7, 33, 64]


@pytest.mark.parametrize(
    ("fp8", "k", "n"), [(True, 1024, 4096), (True, 1040, 136), (True, 14336, 64), (False, 1024, 1000)]
)
def test_a_row_of_a_product_is_the_same_in_every_product(k, n, fp8):
    a, b = operands("row", MOST, k, n)
    exact = wide(a) @ wide(b).T if fp8 else wide_in_bf16(a) @ wide_in_bf16(b).T
    data = (a.data, b.data, a.scale, b.scale) if fp8 else (*(q.dequantize(torch.bfloat16) for q in (a, b)), None, None)
    x, w, s_x, s_w = on_gpu(data)
    bias, residual = torch.randn(n).cuda().bfloat16(), torch.randn(MOST, n).cuda().bfloat16()

    def run(rows: slice) -> Tensor:
        return torch.ops.octavo.ordered_mm(x[rows], w, None if s_x is None else s_x[rows], s_w, bias, residual[rows])

    places = [slice(start := (7 * m) % (MOST - m + 1), start + m) for m in ROWS]
    with compile_only():  # in several threads
        for rows in places:
            run(rows)
    poison()
    plain = torch.ops.octavo.ordered_mm(x, w, s_x, s_w, None, None)
    # The result is rounded, and fast accumulation loses 2^-13 in each instruction (test_gemm_gpu).
    assert worst_row(plain.cpu(), exact) < 2**-7 + fp8 * k / 32 * 2**-13
    whole = run(slice(0, MOST))
    for rows in places:
        assert torch.equal(bits(run(rows)), bits(whole[rows])), rows


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (6, 2, 80)])
def test_a_query_has_the_same_result_in_every_pass(heads, kv_heads, dim, padded):
    room, used = 1100, 1031
    q, keys, values, *_ = given("bf16", 3, heads, kv_heads, used, dim, room)
    first = [0, 5, 700] if padded else None
    some = slice(used - 40, used)
    exact, size = attention64(q[:, :, some], keys, values, None, None, used, first, 0.1)
    q, keys, values = on_gpu((q, keys, values))

    def attend(start: int, stop: int, rows: slice = slice(None)) -> Tensor:
        places = None if first is None else torch.tensor(first, dtype=torch.int32, device="cuda")[rows]
        length, cache = torch.tensor(stop, device="cuda"), (keys[rows].contiguous(), values[rows].contiguous())
        return ordered_attention(q[rows, :, start:stop], *cache, length, first=places, scale=0.1)

    pieces = [(0, 1), (63, 64), (255, 256), (256, 257), (700, 701), (1030, 1031), (1, 4), (500, 601), (0, 900)]
    with compile_only():
        for piece in pieces:
            attend(*piece)
    poison()
    whole = attend(0, used)
    assert ((whole[:, :, some].cpu().double() - exact).abs() <= 2**-7 * size).all()
    for start, stop in pieces:
        assert torch.equal(attend(start, stop), whole[:, :, start:stop]), (start, stop)
    assert torch.equal(attend(900, used, slice(1, 2)), whole[1:2, :, 900:])
    if padded:  # the text without its padding
        text = [x[1:2, :, 5:used].contiguous() for x in (q, keys, values)]
        alone = ordered_attention(*text, torch.tensor(used - 5, device="cuda"), scale=0.1)
        assert torch.equal(alone, whole[1:2, :, 5:])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "max_position_embeddings": 512}
    return folder_maker(tmp_path_factory.mktemp("models"), num_key_value_heads=2, **sizes)


@pytest.mark.parametrize(("name", "recipe"), [("qwen3", "rowwise_forward"), ("llama", "rowwise")])
def test_training_prompts_and_decoding_give_the_same_bits(folders, name, recipe):
    trained, served = pair(folders, name, recipe, device="cuda")
    with same_bits(trained, served):
        with compile_only(), torch.no_grad():
            for count, length in product(BATCHES, (1, 16, 16 + NEW)):
                trained(torch.zeros(count, length, dtype=torch.int64, device="cuda"))
        for count, padded in product(BATCHES, (False, True)):
            inputs = prompts(count, padded, "cuda")
            for piece in (None, 1, 3) if count == 7 else (None, None):  # the second time replays graphs
                texts, steps = answer(served, inputs, piece)
                logits, new = forward(trained, texts, inputs["attention_mask"]), texts[:, -NEW:]
                assert torch.equal(logits.float(), steps), (count, padded, piece)
                found = log_probabilities(logits, new)
                assert torch.equal(found, log_probabilities(steps.bfloat16(), new))
                assert torch.equal(found[-1:], log_probabilities(logits[-1:], new[-1:]))
        assert step_graph(served.octavo_engine) is not None
        found.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.parameters())
    assert served.octavo_notices == set()
