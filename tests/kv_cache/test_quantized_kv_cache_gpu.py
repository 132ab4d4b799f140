"""Generation on a GPU: transformers compiles its steps there, and the kernels read the cache."""

import pytest
import torch
from kv_cache_examples import DTYPES, greedy, model_of, prompts
from metrics import sqnr

from octavo.kv_cache.transformers_cache import QuantizedKVCache

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_the_logits_of_the_reference(dtype, padded):
    """A BF16 model, fed the same tokens on both devices."""
    scales = None if dtype == "bf16" else [(torch.tensor([0.05]), torch.tensor([0.05]))] * 2
    inputs, found = prompts(padded), []
    following = torch.randint(1, 97, (3, 8))
    for device in ("cpu", "cuda"):
        model = model_of("llama").bfloat16().to(device)
        cache = QuantizedKVCache.for_model(model, 25, dtype, scales=scales)
        mask = inputs["attention_mask"].to(device)
        logits = []
        with torch.no_grad():
            model(inputs["input_ids"].to(device), attention_mask=mask, past_key_values=cache)
            for token in following.to(device).split(1, 1):
                mask = torch.cat((mask, torch.ones_like(token)), 1)
                logits.append(model(token, attention_mask=mask, past_key_values=cache).logits.float().cpu())
        found.append(torch.cat(logits, 1))
    assert sqnr(*found) > 25  # BF16 arithmetic on two devices, and numbers that round to the other side


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
