"""In a process of its own: a live model of vLLM. What a function found is the last line.

python live_vllm.py reload FOLDER MODEL PACKED      weights of a model in training, then those of its packed folder
python live_vllm.py check FOLDER [LAYER]            `octavo.check`, and again without the scale of LAYER
"""

import json
import sys

import torch
import verify_with_vllm


def logprobs(engine) -> list[float]:
    import vllm

    prompt = list(range(8, 28))
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    engine.reset_prefix_cache()  # by vLLM's own rule after a reload
    (result,) = engine.generate([{"prompt_token_ids": prompt}], sampling)
    return [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)]


def reload(engine, _: str, source: str, packed: str) -> list:
    """The log-probabilities of a prompt before, between and after."""
    from transformers import AutoModelForCausalLM

    import octavo

    found = [logprobs(engine)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    octavo.convert(model, "rowwise")
    for weights in ({"weights_iterator": octavo.rl.served_weights(model)}, {"weights_path": packed}):
        engine.collective_rpc("reload_weights", kwargs=weights)
        found.append(logprobs(engine))
    return found


def check(engine, folder: str, *planted: str) -> list:
    """Attention returns its queries, as there is no request."""
    import octavo

    batch = {"input_ids": torch.arange(64), "positions": torch.arange(64) % 32}

    def checked(model, *without: str) -> dict:
        for name in without:
            model.get_submodule(name).weight_scale.data.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.attn.forward = lambda q, *_: q
        found = octavo.check(model, folder, batch)
        faults = [(fault.kind, fault.where) for fault in found.faults]
        return {"faults": faults, "remarks": found.remarks, "verdict": found.verdict}

    return [engine.apply_model(lambda model, each=each: checked(model, *each))[0] for each in [(), planted]]


def main(name: str, folder: str, *words: str) -> list:
    import vllm
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = name != "check"  # that packs weights in BF16 away
    engine = vllm.LLM(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=32)
    return {"reload": reload, "check": check}[name](engine, folder, *words)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        verify_with_vllm.complete()
    print(json.dumps(main(*sys.argv[1:])))
