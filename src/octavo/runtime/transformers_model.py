"""Opening a packed folder as a model of transformers that computes with the packed weights: `octavo.load`.

    model = octavo.load("packed/first", "cuda")
    model.generate(**inputs, max_new_tokens=200)

The modeling code, `generate` and the configuration are transformers' own. The linear layers are `PackedLinear`, and
norms and MLPs are fused with quantization in the architectures that `octavo.runtime.fused` knows. With a static cache
every shape is fixed, so that transformers compiles the model and captures CUDA graphs:

    model.generate(**inputs, cache_implementation="static")
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.artifact.packed.layouts import read_config
from octavo.device import choose_device
from octavo.hf.meta_model import transformers_meta_model
from octavo.ops.gemm import MAX_SMALL_M
from octavo.runtime.build import fill


def load_transformers(folder: str | Path, device: str | torch.device = "cpu") -> Any:
    """Open a packed folder as a model of transformers. Only its files are read, and none of them is a pickle.

    Args:
        folder: a folder that `octavo pack` wrote, from a Hugging Face model or from a run of `octavo train`.
        device: for the model; "auto" takes the GPU if there is one.

    Returns:
        The model in evaluation mode, of the class that config.json names. All but its packed layers is BF16.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ArtifactError: a file is damaged or does not fit; the message names the tensor or the setting.
        ValueError: the device does not exist.
        ImportError: transformers is not installed.
    """
    place = choose_device(device)
    path = Path(folder)
    model: Any = fill(transformers_meta_model(read_config(path), path), path, place)
    if (path / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@torch.inference_mode()
def warm_up(model: nn.Module, context: int) -> None:
    """On a GPU, run a language model once for each kernel that texts use, so that no text waits for a compiler."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        for tokens in (1, 16, 32, MAX_SMALL_M, MAX_SMALL_M + 1):  # each tile of the small-M GEMM, and cuBLASLt
            model(torch.zeros(1, min(tokens, context), dtype=torch.int64, device=device))
        torch.cuda.synchronize(device)
