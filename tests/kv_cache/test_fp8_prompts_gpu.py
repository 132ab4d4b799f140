"""Long prompts in FP8 on a GPU: whole and in pieces, into caches of each dtype, and through an engine."""

import copy

import pytest
import torch
from kv_cache_examples import model_of
from metrics import sqnr

from octavo.generation import Engine
from octavo.generation.prompts import pad_prompts
from octavo.kv_cache.layer import LayerKVCache
from octavo.kv_cache.prompts import prompt_attention

pytest.importorskip("cudnn")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_prompt_in_pieces(kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 6000, 128, device="cuda").bfloat16() for n in (4, 2, 2))
    store = LayerKVCache((1, 2, 7000, 128), kind, device="cuda", fp8_attention=True)
    found = []
    for begin, end in ((0, 4500), (4500, 6000)):
        part = slice(begin, end)
        store.append(k[:, :, part], v[:, :, part])
        assert store.runs_fp8(q[:, :, part], None)
        found.append(store.attend(q[:, :, part]))
    expected = prompt_attention(q, k, v, scale=128**-0.5)
    assert sqnr(expected, torch.cat(found, 2)) > 18


def test_an_engine():
    model = model_of("llama", head_dim=128, max_position_embeddings=8192).bfloat16().cuda()
    ids, found = torch.randint(1, 97, (1, 5000)).tolist(), []
    for attention in ("bf16", "fp8"):
        engine = Engine(copy.deepcopy(model), context=8192, kv_cache="fp8", attention=attention)
        with torch.no_grad():
            found.append(engine._new_session(1, 5001).prefill(pad_prompts(ids, engine.device)).float())
    assert sqnr(*found) > 12
    assert not torch.equal(*found)
