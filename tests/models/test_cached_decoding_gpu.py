"""Our models with a KV cache on a GPU, against the text as a whole on a CPU."""

from contextlib import nullcontext

import pytest
import torch
from model_examples import BOTH, lively, tokens

from octavo.inference.kv_cache import ModelKVCache
from octavo.models import GPT2Config, LlamaConfig

pytestmark = pytest.mark.gpu
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.08, "autocast": 0.08}  # of the root mean square of the logits


@BOTH
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("first", [None, [0, 3, 11, 5]])
@pytest.mark.parametrize("pieces", [[12, 1, 1, 1], [4, 8, 1, 2]], ids=str)
@torch.inference_mode()
def test_pieces_give_the_logits_of_the_whole(
    config: LlamaConfig | GPT2Config, precision: str, first: list[int] | None, pieces: list[int]
) -> None:
    model, text = lively(config).eval(), tokens(4, 15)
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
        wanted = required[row][last[seen] - begin[row]]
        error, size = (x.square().mean(-1).sqrt() for x in (found[row, seen] - wanted, wanted))
        assert (error <= TOLERANCES[precision] * size).all()
