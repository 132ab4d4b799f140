"""A packed folder as the model that transformers knows, running on its bytes: `octavo.load`.

    model = octavo.load("packed/first", "cuda")
    model.generate(**inputs, max_new_tokens=200)

The modeling code, `generate` and the configuration are transformers' own; its linear layers are `PackedLinear`, and
its norms and MLPs are fused with quantization where the pattern is known (`octavo.runtime.fused`). With a static
cache every shape is fixed, and the model goes through torch.compile and into CUDA graphs:

    model.generate(**inputs, cache_implementation="static")        transformers compiles it and makes the graphs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.artifact.packed.layouts import PackedFolder
from octavo.device import choose_device
from octavo.hf.meta_model import transformers_meta_model
from octavo.ops.gemm import MAX_SMALL_M
from octavo.runtime.build import fill


def load_transformers(folder: str | Path, device: str | torch.device = "cpu") -> Any:
    """Open a packed folder as a model of transformers. Nothing but its files is read, and none of them is a pickle.

    Args:
        folder: what `octavo pack` wrote, of a Hugging Face model or of a run of ours.
        device: where the model shall be; "auto" is the GPU where there is one.

    Returns:
        The model in evaluation mode: of the class that config.json names, in BF16 but for its packed layers.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ArtifactError: a file is not what it should be; the message names the tensor or the setting.
        ValueError: the device is not there.
        ImportError: transformers is not installed.
    """
    place = choose_device(device)
    path = Path(folder)
    model: Any = fill(transformers_meta_model(PackedFolder(path).read_config(), path), path, place)
    if (path / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@torch.inference_mode()
def warm_up(model: nn.Module, context: int) -> None:
    """Run a language model once in each way that prompts and tokens will, so that no text waits for a compiler.

    Does nothing on a CPU, where nothing is compiled.

    Args:
        model: of ours or of transformers, as it was loaded.
        context: tokens that it can see.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        for tokens in (
            1,
            16,
            32,
            MAX_SMALL_M,
            MAX_SMALL_M + 1,
        ):  # each tile of the GEMM of small M, and cuBLASLt
            model(torch.zeros(1, min(tokens, context), dtype=torch.int64, device=device))
        torch.cuda.synchronize(device)
