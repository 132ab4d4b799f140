"""In a process of its own: a packed folder in vLLM, which takes the weights of a model in training, then those of the
folder that this model was packed to. The log-probabilities of a prompt before, between and after are the last line.

    python reload_with_vllm.py FOLDER MODEL PACKED
"""

import json
import sys
from typing import Any

import torch
import verify_with_vllm


def logprobs(engine: Any) -> list[float]:
    import vllm

    prompt = list(range(8, 28))
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    engine.reset_prefix_cache()  # by vLLM's own rule after a reload
    (result,) = engine.generate([{"prompt_token_ids": prompt}], sampling)
    return [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)]


def main(folder: str, source: str, packed: str) -> None:
    import vllm
    from transformers import AutoModelForCausalLM

    import octavo

    engine: Any = vllm.LLM(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=32)
    found = [logprobs(engine)]
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    octavo.convert(model, "rowwise")
    for weights in ({"weights_iterator": octavo.rl.served_weights(model)}, {"weights_path": packed}):
        engine.collective_rpc("reload_weights", kwargs=weights)
        found.append(logprobs(engine))
    print(json.dumps(found))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        verify_with_vllm.complete()
    main(*sys.argv[1:])
