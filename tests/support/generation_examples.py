"""Tiny models of transformers, one of each pair with its `generate` on the engine, and prompts for them."""

import copy

import torch
from kv_cache_examples import model_of

from octavo.inference.transformers_generate import accelerate_generate

END = 7  # the token that ends a text
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}


def pair(name: str, dtype: torch.dtype = torch.bfloat16, **settings) -> tuple:
    """A model, and the same with an engine."""
    model = model_of(name).to(dtype)
    model.generation_config.eos_token_id = END
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128, **settings)
    return model, fast


def batch(rows: int = 3, length: int = 11, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
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


def answers(model, inputs: dict[str, torch.Tensor], seed: int = 0, **settings) -> torch.Tensor:
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": 24} | settings)


def sessions(model):
    return model.octavo_engine.sessions
