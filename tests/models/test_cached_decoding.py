"""Our models with a KV cache: the logits of a text in pieces, and of padded batches, against the text as a whole."""

from contextlib import nullcontext

import model_examples
import pytest
import torch
from model_examples import BOTH, GQA, tokens

from octavo.inference.kv_cache import ModelKVCache
from octavo.models import llama

TOLERANCES = {  # of the root mean square of the logits
    "float32": 1e-5, "bfloat16": 0.03, "autocast": 0.03,
    "float32 on a GPU": 1e-3, "bfloat16 on a GPU": 0.08, "autocast on a GPU": 0.08,
}  # fmt: skip
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])


def model_of(config, precision):
    model = model_examples.lively(config).eval()
    return model.bfloat16() if precision == "bfloat16" else model


def computing(precision):
    return torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()


def check(found, required, precision):
    assert found.shape == required.shape
    error, size = (x.float().square().mean(-1).sqrt() for x in (found - required, required))
    assert (error <= TOLERANCES[precision] * size).all()


@BOTH
@PRECISIONS
@pytest.mark.parametrize("pieces", [[15], [12, 1, 1, 1], [4, 8, 1, 2], [1] * 15], ids=str)
@torch.no_grad()
def test_each_row_of_a_padded_batch_is_the_row_alone(config, precision, pieces):
    model, text = model_of(config, precision), tokens(4, 15)
    first = [0, 3, 11, 5]
    cache = ModelKVCache(config.layers, 15)
    cache.first = torch.tensor(first, dtype=torch.int32)
    with computing(precision):
        found = torch.cat([model(piece, cache) for piece in text.split(pieces, dim=1)], dim=1)
        last = torch.tensor(pieces).cumsum(0) - 1
        for row, begin in enumerate(first):
            seen = last[last >= begin]
            check(found[row, last >= begin], model(text[row : row + 1, begin:])[0, seen - begin], precision)
    assert cache.tokens == int(cache.length.tensor) == 15
    wanted = {"float32": torch.float32}.get(precision, torch.bfloat16)
    assert {store.keys.dtype for store in cache.stores} == {wanted}


@PRECISIONS
@pytest.mark.parametrize("pieces", [[12, 1, 1, 1], [4, 8, 1, 2]], ids=str)
@pytest.mark.parametrize("dtype", [None, "fp8"])
@torch.no_grad()
def test_rotary_embedding_and_cache_as_one_operation_give_the_same(monkeypatch, precision, pieces, dtype):
    """The operation that a GPU has a kernel for. A CPU runs its reference here."""
    model, text, found = model_of(GQA, precision), tokens(4, 15), []
    for one in (False, True):
        monkeypatch.setattr(llama, "has_kernel", lambda q, one=one: one)
        cache = ModelKVCache(GQA.layers, 15, dtype)
        cache.first = torch.tensor([0, 3, 11, 5], dtype=torch.int32)
        with computing(precision):
            found.append(torch.cat([model(piece, cache) for piece in text.split(pieces, dim=1)], dim=1))
    check(found[1], found[0], precision)


@BOTH
@torch.no_grad()
def test_a_cache_serves_the_next_text_after_reset(config):
    model, text = model_of(config, "float32"), tokens(2, 9)
    cache = ModelKVCache(config.layers, 9)
    cache.first = torch.tensor([0, 4], dtype=torch.int32)
    model(text, cache)
    cache.reset()
    check(model(text, cache)[:, 0], model(text)[:, -1], "float32")  # GEMMs of other sizes round in another order


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@torch.no_grad()
def test_eight_bits_round_the_keys_and_values(dtype):
    model, text = model_of(GQA, "float32"), tokens(2)
    cache = ModelKVCache(GQA.layers, 17, dtype)
    model(text[:, :9], cache)
    found, required = model(text[:, 9:], cache)[:, 0], model(text)[:, -1]
    error = (found - required).square().mean().sqrt() / required.square().mean().sqrt()
    assert 1e-3 < error < 0.1


@BOTH
@torch.no_grad()
def test_a_text_beyond_the_context_is_an_error(config):
    model = model_of(config, "float32")
    cache = ModelKVCache(config.layers, 99)
    model(tokens(1, config.context - 1), cache)
    with pytest.raises(ValueError, match=f"got 2 after {config.context - 1} cached; pass fewer tokens"):
        model(tokens(1, 2), cache)


@pytest.mark.gpu
@BOTH
@PRECISIONS
@pytest.mark.parametrize("first", [None, [0, 3, 11, 5]])
@pytest.mark.parametrize("pieces", [[12, 1, 1, 1], [4, 8, 1, 2]], ids=str)
@torch.inference_mode()
def test_a_gpu_gives_the_logits_of_a_cpu(config, precision, first, pieces):
    model, text = model_examples.lively(config).eval(), tokens(4, 15)
    begin = first or [0] * 4
    required = [model(text[row : row + 1, begin[row] :])[0] for row in range(4)]
    model = model.cuda().bfloat16() if precision == "bfloat16" else model.cuda()
    cache = ModelKVCache(config.layers, 15)
    if first:
        cache.first = torch.tensor(first, dtype=torch.int32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16) if precision == "autocast" else nullcontext():
        found = torch.cat([model(piece, cache) for piece in text.cuda().split(pieces, dim=1)], dim=1).float().cpu()
    last = torch.tensor(pieces).cumsum(0) - 1
    for row in range(4):
        seen = last >= begin[row]
        check(found[row, seen], required[row][last[seen] - begin[row]], f"{precision} on a GPU")
