"""The programs that generate text from a model folder, called as their users call them: Octavo, transformers, vLLM."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.evaluation.prompts import has_tokenizer
from octavo.extras import import_extra, open_local
from octavo.loading import load
from octavo.speed.grid import Grid

Generate = Callable[[Tensor, int], Tensor]
"""generate(ids, tokens): from prompts int64 [B, T] exactly `tokens` new greedy tokens, int64 [B, tokens]."""

OCTAVO, EAGER, STATIC = "octavo", "BF16, eager", "BF16, static"
LOOP = "transformers' loop"


@dataclass(frozen=True)
class Opened:
    """An open model.

    Attributes:
        ways: the ways to generate from it, by name.
        reference: a slower way, with whose tokens those of the first way are compared.
        reference_name: such as "transformers' loop".
        forget: drops the caches that calls left, so that a size does not count the memory of the one before.
        close: ends the use of the model.
    """

    ways: Mapping[str, Generate]
    reference: Generate | None = None
    reference_name: str = ""
    forget: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Program:
    """A program and a folder.

    Attributes:
        name: such as "octavo".
        ways: the names of the ways that it generates in.
        folder: of the model.
        open: opens the model on the device.
        baseline: whether the model is in BF16, so that others are compared with it.
        apart: whether it takes the whole GPU, in a process of its own, as vLLM does.
    """

    name: str
    ways: tuple[str, ...]
    folder: Path
    open: Callable[[], Opened]
    baseline: bool = False
    apart: bool = False


def octavo_program(folder: Path, device: torch.device) -> Program:
    """`octavo.load` of a packed folder."""

    def open_model() -> Opened:
        model = load(folder, device)
        return Opened({OCTAVO: generation(model)}, own_loop(model), LOOP, partial(drop_caches, model))

    return Program(OCTAVO, (OCTAVO,), folder, open_model)


def transformers_program(folder: Path, device: torch.device) -> Program:
    """transformers with a model in BF16: as `generate` runs by itself, and with a static cache, which it compiles."""

    def open_model() -> Opened:
        transformers = import_extra("transformers", "hf", "--against runs a model of transformers")
        model = open_local(transformers.AutoModelForCausalLM, folder, dtype=torch.bfloat16).eval().to(device)
        return Opened({EAGER: generation(model), STATIC: generation(model, cache_implementation="static")})

    return Program("transformers, BF16", (EAGER, STATIC), folder, open_model, baseline=True)


def vllm_program(folder: Path, grid: Grid, *, baseline: bool = False) -> Program:
    """vLLM's `LLM`. Its cache of prefixes is off: the rounds would otherwise compute their prompt once."""
    name = "vLLM, BF16" if baseline else "vLLM, packed"

    def open_model() -> Opened:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to standard output
        import vllm

        llm = vllm.LLM(
            model=str(folder), dtype="bfloat16", max_model_len=max(grid.prompts) + grid.tokens,
            enable_prefix_caching=False, skip_tokenizer_init=not has_tokenizer(folder),
        )  # fmt: skip

        def generate(ids: Tensor, tokens: int) -> Tensor:
            sampling = vllm.SamplingParams(
                temperature=0.0, min_tokens=tokens, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
            results = llm.generate(prompts, sampling, use_tqdm=False)
            return torch.tensor([result.outputs[0].token_ids for result in results])

        return Opened({name: generate})

    return Program(name, (name,), folder, open_model, baseline, apart=True)


def generation(model: Any, **settings: Any) -> Generate:
    """`model.generate`, greedy, which no end token stops early."""

    def generate(ids: Tensor, tokens: int) -> Tensor:
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens,
            **settings,
        )  # fmt: skip
        return made[:, ids.shape[1] :]  # type: ignore[no-any-return]

    return generate


def own_loop(model: Any) -> Generate:
    """transformers' own loop with `model`: a cache that the caller gives turns Octavo's engine off."""
    transformers = import_extra("transformers", "hf", "a packed model is a model of transformers")

    def generate(ids: Tensor, tokens: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "generate runs on transformers' own loop")
            return generation(model, past_key_values=transformers.DynamicCache(config=model.config))(ids, tokens)

    return generate


def drop_caches(model: Any) -> None:
    """Drop the caches of a model of `octavo.load`, with their CUDA graphs."""
    model.octavo_engine.sessions.clear()
