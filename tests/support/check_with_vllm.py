"""In a process of its own: `octavo.check` of a folder's model in vLLM, and again without the scale of LAYER.

Attention returns its queries, as there is no request. The last line has what was found.

    python check_with_vllm.py FOLDER [LAYER]
"""

import json
import sys
from typing import Any

import torch
import verify_with_vllm


def main(folder: str, *planted: str) -> None:
    import vllm
    import vllm._custom_ops

    import octavo

    vllm._custom_ops._supports_onednn = False  # that packs weights in BF16 away
    engine: Any = vllm.LLM(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=32)
    batch = {"input_ids": torch.arange(64), "positions": torch.arange(64) % 32}

    def check(model: Any) -> dict[str, Any]:
        for layer in model.model.layers:
            layer.self_attn.attn.forward = lambda q, *_: q
        found = octavo.check(model, folder, batch)
        faults = [(fault.kind, fault.where) for fault in found.faults]
        return {"faults": faults, "remarks": found.remarks, "verdict": found.verdict}

    found = engine.apply_model(check)
    for name in planted:
        engine.apply_model(lambda model, name=name: model.get_submodule(name).weight_scale.data.fill_(1))
        found += engine.apply_model(check)
    print(json.dumps(found))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        verify_with_vllm.complete()
    main(*sys.argv[1:])
