"""Tiny models of transformers, beside their `generate` on the engine, prompts, and an emulated quantized KV cache."""

import copy

import ml_dtypes
import numpy as np
import torch
import transformers
from tiny_models import MODELS
from torch import Tensor

from octavo.inference.transformers_cache import CACHE
from octavo.inference.transformers_generate import accelerate_generate

END = 7  # the token that ends a text
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
LARGEST = {"fp8": 448.0, "int8": 127.0}
MARGIN = {"fp8": 2.0, "int8": 1.25}
DTYPES = ("bf16", "fp8", "int8")


def model_of(name: str, **changes):
    cls = getattr(transformers, MODELS[name][0])
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    sizes |= {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 16}
    sizes |= {"ffn_dim": 96, "word_embed_proj_dim": 64}  # of OPT
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(1)
    model = cls(cls.config_class(**sizes | ends | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


def pair(name: str, dtype: torch.dtype = torch.bfloat16, **settings) -> tuple:
    """A model, and the same with an engine."""
    model = model_of(name).to(dtype)
    model.generation_config.eos_token_id = END
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128, **settings)
    return model, fast


def batch(rows: int = 3, length: int = 11, padding: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Random prompts, whose first `padding[i]` tokens are padding, and their mask."""
    ids = torch.randint(8, 97, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
        ids[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def step_graph(engine) -> torch.cuda.CUDAGraph | None:
    """The graph of a step in the last session of an engine, if it is captured."""
    step = engine.sessions[-1].passes.get(1)
    return step and step.graph


def answers(model, inputs: dict[str, Tensor], seed: int = 0, **settings) -> Tensor:
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": 24} | settings)


def sessions(model):
    return model.octavo_engine.sessions


# ---- With a cache of the caller's


class Emulated(transformers.DynamicCache):
    """transformers' cache with rounded keys and values. A prompt into the empty cache attends to unrounded ones."""

    def __init__(self, config, dtype: str, scales: list[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__(config=config)
        self.dtype, self.scales = dtype, dict(enumerate(scales or []))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx not in self.scales and self.dtype != "bf16":
            self.scales[layer_idx] = tuple(self.scale(x) for x in (key_states, value_states))
        scales = self.scales.get(layer_idx, (torch.ones(1), torch.ones(1)))
        rounded = [self.rounded(x, s) for x, s in zip((key_states, value_states), scales, strict=True)]
        is_prompt = super().get_seq_length(layer_idx) == 0 and key_states.shape[2] > 1
        cached = super().update(*rounded, layer_idx, *args, **kwargs)
        return (key_states, value_states) if is_prompt else cached

    def scale(self, x: Tensor) -> Tensor:
        """One scale a tensor in E4M3, one a head in INT8."""
        amax = x.abs().amax((0, 2, 3)) if self.dtype == "int8" else x.abs().amax().view(1)
        return amax * MARGIN[self.dtype] / LARGEST[self.dtype]

    def rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.dtype == "bf16":
            return x.bfloat16().to(x.dtype)
        s = scale.double().view(-1, 1, 1).numpy()
        y = np.clip(x.double().numpy() / s, -LARGEST[self.dtype], LARGEST[self.dtype])
        y = np.rint(y) if self.dtype == "int8" else y.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return torch.from_numpy(y * s).to(x.dtype)


def prompts(padded: bool) -> dict[str, Tensor]:
    return batch(length=9, padding=(0, 4, 1) if padded else ())


def greedy(model, inputs: dict[str, Tensor], cache, **settings) -> tuple[Tensor, Tensor]:
    """Generate; returns the tokens [B, T] and the logits [steps, B, V]."""
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    out = model.generate(**inputs, **{CACHE: cache}, return_dict_in_generate=True, output_logits=True, **settings)
    return out.sequences, torch.stack(out.logits)
