"""`generate` of transformers, its decoding loop replaced by `octavo.inference.engine.Engine`.

transformers validates the call, and makes the processors of logits, the criteria of stopping and the streamer. Only the
loop of greedy search and of sampling, `_sample`, is ours. A call that the engine does not cover runs on transformers'
own loop, and a warning says so once. Importing this module imports transformers.
"""

import inspect
import warnings
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria
from transformers.cache_utils import DynamicCache, StaticCache

from octavo.inference.engine import Engine, Stop
from octavo.inference.kv_cache import UnservedError
from octavo.inference.sampling import draw
from octavo.inference.session import read_prompts
from octavo.inference.transformers_cache import CACHE
from octavo.nn.module_tools import mix_classes
from octavo.ops import index_of_largest

# Inputs of the model that transformers prepares, and the tokenizers, of which it makes the criteria of stopping.
KNOWN = {
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "synced_gpus", "tokenizer",
    "assistant_tokenizer",
}  # fmt: skip


def accelerate_generate(model: Any, context: int, **settings: Any) -> None:
    """Let `model.generate` of a model of transformers run on an `Engine` of these settings. The class keeps its name.

    If the cache does not serve the model's attention, `generate` runs on transformers' own loop. Where `kv_cache` names
    a dtype, it raises an UnservedError instead.
    """
    model.octavo_engine = Engine(model, context=context, **settings)
    model.octavo_notices = set()
    model.__class__ = mix_classes(Accelerated, type(model))


class UncoveredError(UnservedError):
    """The engine does not cover a call of `generate`; the message says why."""


class Accelerated:
    """The class of a model whose `generate` runs on `octavo_engine`."""

    octavo_engine: Engine
    octavo_notices: set[str]

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Tokens [B, N] of prompts and texts: greedy search or sampling, as transformers' own `_sample`."""
        engine = self.octavo_engine
        settings = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        try:
            return _run(self, engine, input_ids, logits_processor, stopping_criteria, generation_config, **settings)
        except UnservedError as error:
            if not isinstance(error, UncoveredError):
                if engine.asked:
                    raise UnservedError(f"{error}: open the model without kv_cache, for transformers' loop") from None
                engine.sessions.clear()  # the model does not take their caches
            reason = str(error)
        _say_once(self, reason)
        return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **settings)  # type: ignore[misc]

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        _say_once(self, "beams are asked for (num_beams)")
        return super()._beam_search(*args, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, inputs_tensor: Tensor | None = None, **kwargs: Any) -> Any:
        """transformers' own, which gets `inputs_tensor` because the signature has it."""
        _say_once(self, "candidates of an assistant or of the prompt are asked for")
        return super()._assisted_decoding(*args, inputs_tensor=inputs_tensor, **kwargs)  # type: ignore[misc]


def _say_once(model: Any, reason: str) -> None:
    """Warn, once for each reason, that a call of `generate` runs on transformers' own loop, at the line of the call."""
    if reason in model.octavo_notices:
        return
    model.octavo_notices.add(reason)
    frame, level = inspect.currentframe(), 1  # decorators of transformers and torch stand between the call and us
    while frame is not None and frame.f_globals["__name__"].split(".")[0] in ("octavo", "transformers", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"generate runs on transformers' own loop, which is slower: {reason}", stacklevel=level)


def _run(
    model: Any, engine: Engine, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any, **kwargs: Any
) -> Tensor:
    """`_sample` on the engine: an UncoveredError if the engine does not cover the call, an UnservedError if the cache
    does not serve the model, or texts of this length."""
    _check_covered(model, config, kwargs)
    prompts = read_prompts(ids, kwargs.get("attention_mask"), engine.device)
    if (positions := kwargs.get("position_ids")) is not None:  # which transformers makes from the mask
        usual = torch.arange(ids.shape[1], device=engine.device) - prompts.first[:, None]
        if not bool(((positions.to(engine.device) == usual) | (usual < 0)).all()):
            raise UncoveredError("position_ids are given that do not count the tokens")
    if engine.limit < min(engine.context, config.max_length - 1):
        raise UnservedError(f"the text may exceed the sliding window of {engine.limit} tokens")
    padding, stop = config._pad_token_tensor, None  # texts end at their number of tokens alone
    if not all(isinstance(each, MaxLengthCriteria) for each in criteria):
        stop = Stop(lambda ids: criteria(ids, None), 0 if padding is None else padding)

    def choose(ids: Tensor, logits: Tensor) -> Tensor:
        if processors or config.do_sample:
            logits = processors(ids, logits.to(torch.float32, copy=True))
        return draw(logits) if config.do_sample else index_of_largest(logits)

    new, watched = config.max_length - ids.shape[1], streamer is not None
    steps = engine.run(prompts, new, choose, stop, watched=watched, piece=config.prefill_chunk_size)
    text = prompts.ids
    with closing(steps):
        for text, tokens in steps:  # noqa: B007
            if streamer is not None:
                streamer.put(tokens)
    if streamer is not None:
        streamer.end()
    return text.to(ids.device).contiguous()


def _check_covered(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get(CACHE)
    unknown = sorted(name for name, value in kwargs.items() if name not in KNOWN and value is not None)
    reasons = {
        "the GPUs of several processes are synchronized (synced_gpus)": kwargs["synced_gpus"],
        "a dictionary is asked for (return_dict_in_generate)": config.return_dict_in_generate,
        "attentions or hidden states are asked for": config.output_attentions or config.output_hidden_states,
        "use_cache is False": config.use_cache is False,
        f"a cache is given ({CACHE})": getattr(cache, "_is_user_defined", False),
        f"the cache is a {type(cache).__name__}": type(cache) not in (DynamicCache, StaticCache),
        "the cache is offloaded": str(config.cache_implementation).startswith("offloaded"),
        f"the model takes other inputs ({', '.join(unknown)})": unknown,
        "the model is in training mode": model.training,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UncoveredError(reason)
