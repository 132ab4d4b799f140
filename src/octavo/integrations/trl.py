"""Answers for TRL's GRPOTrainer from a model that is served in FP8, with the weights that TRL trains.

octavo.convert(model := AutoModelForCausalLM.from_pretrained(folder), "rowwise_forward")
served = octavo.load("packed/model", "auto")                       packed from the same folder
trainer = GRPOTrainer(model, rewards, args, train_dataset=prompts, rollout_func=Rollouts(served))
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from octavo.inference.session import pad_prompts
from octavo.rl.pushing import Pushed, push


class Rollouts:
    """Samples the answers to TRL's prompts from `served`, a model of `octavo.load`.

    After each optimizer step the first call writes the trained weights into `served` (`octavo.rl.push`); `pushed` is
    the record of it. The settings of generation are the trainer's. The trainer must not use vLLM beside this one.
    """

    def __init__(self, served: Any) -> None:
        self.served = served
        self.pushed: Pushed | None = None
        self._step: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The token ids of prompts and answers, as TRL's `rollout_func` returns them."""
        if trainer.use_vllm:
            raise ValueError("the answers come from the served model: leave use_vllm of GRPOConfig False")
        if trainer.state.global_step != self._step:
            self.pushed = push(trainer.accelerator.unwrap_model(trainer.model), self.served)
            self._step = trainer.state.global_step
        prompt_ids = token_ids(prompts, trainer)
        answers = sample(self.served, prompt_ids, trainer.generation_config)
        return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": None}


def token_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """The ids of texts, or of conversations in the template of the trainer."""
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts)["input_ids"]
    templated = trainer.processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True, chat_template=trainer.chat_template,
        **trainer.chat_template_kwargs,
    )  # fmt: skip
    return templated["input_ids"]


@torch.no_grad()
def sample(served: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> list[list[int]]:
    """The answer to each prompt, up to the first token that ends a text, which it includes."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    padding_token = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)
    ids, padding = pad_prompts(prompts, served.device, padding_token)
    mask = torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]
    output = served.generate(ids, attention_mask=mask.long().to(ids.device), generation_config=config)
    answers = output[:, ids.shape[1] :].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in answers]
