"""Opening a packed folder as a model of transformers that computes with the packed weights: `octavo.load`.

    model = octavo.load("packed/first", "cuda")
    model.generate(**inputs, max_new_tokens=200)

The modeling code and the configuration are transformers' own. The linear layers are `PackedLinear`, and norms and MLPs
are fused with quantization in the architectures that `octavo.runtime.fused` knows. `generate` of a language model runs
on `octavo.generation.Engine`, that of a model with an encoder and a decoder on transformers' loop. Importing this
module imports transformers.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from octavo.artifact.packed.layouts import read_config
from octavo.device import choose_device
from octavo.generation.engine import AUTO
from octavo.generation.prompt_attention import check_attention
from octavo.generation.transformers_generate import accelerate_generate
from octavo.hf.inputs import has_decoder
from octavo.hf.meta_model import transformers_meta_model
from octavo.kv_cache.layer import check_settings
from octavo.runtime.build import fill


def load_transformers(
    folder: str | Path, device: str | torch.device = "cpu", kv_cache: str = AUTO, attention: str = "bf16"
) -> Any:
    """Open a packed folder as a model of transformers. Only its files are read, and none of them is a pickle.

    Args:
        folder: a folder that `octavo pack` wrote, from a Hugging Face model or from a run of `octavo train`.
        device: for the model; "auto" takes the GPU if there is one.
        kv_cache: dtype of the keys and values in `generate`, see `octavo.load`.
        attention: of prompts in `generate`, see `octavo.load`.

    Returns:
        The model in evaluation mode, of the class that config.json names. All but its packed layers is BF16.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ArtifactError: a file is damaged or does not fit, or the folder is a run; the message names the tensor or the
            setting.
        ValueError: the device does not exist, the dtype or the attention is unknown, or the model takes neither.
    """
    if kv_cache != AUTO:
        check_settings(kv_cache, None, None)
    check_attention(attention)
    place = choose_device(device)
    path = Path(folder)
    meta_model = transformers_meta_model(read_config(path), path)
    model: Any = meta_model.model
    accelerated = model.can_generate() and not has_decoder(model)
    if not accelerated and (kv_cache, attention) != (AUTO, "bf16"):
        raise ValueError(
            f"{path} holds a {type(model).__name__}, and kv_cache and attention are for the text that a language model "
            "generates: leave them out"
        )
    model, kv_scales = fill(meta_model, path, place, kv_cache)
    if (path / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if accelerated:
        accelerate_generate(model, meta_model.context, kv_cache, kv_scales, attention)
    return model
