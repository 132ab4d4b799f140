"""A trained model, the served one of its weights, texts that the latter generates, and logits of both."""

import torch
from tiny_models import open_theirs
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import octavo

NEW = 9  # tokens of an answer
LENGTHS = [11, 4, 16, 1, 9, 16, 2]  # of prompts, again and again


def pair(make, name, recipe="rowwise", dtype=torch.bfloat16, device="cpu"):
    trained = open_theirs(make(name), dtype).to(device).train()
    octavo.convert(trained, recipe)
    return trained, octavo.load(make(name, scheme="channel"), device)


class Recorder(LogitsProcessor):
    """The logits [B, V] of each step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores.clone())
        return scores


def prompts(count: int, padded: bool, device: str = "cpu") -> dict[str, Tensor]:
    """The first prompts, of the same tokens in every batch; with padding on the left, or all of one length."""
    ids = torch.randint(1, 256, (64, 16), generator=torch.Generator().manual_seed(5))[:count]
    lengths = torch.tensor([LENGTHS[i % 7] if padded else 16 for i in range(count)])
    mask = (torch.arange(16) >= 16 - lengths[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def answer(served, given: dict[str, Tensor], piece: int | None = None) -> tuple[Tensor, Tensor]:
    """Texts [B, T + NEW], and the logits [B, NEW, V] of the steps, by `generate` from the cache."""
    recorder = Recorder()
    torch.manual_seed(1)
    texts = served.generate(
        **given, max_new_tokens=NEW, do_sample=True, logits_processor=LogitsProcessorList([recorder]),
        prefill_chunk_size=piece, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return texts, torch.stack(recorder.seen, 1)


def forward(trained, texts: Tensor, mask: Tensor) -> Tensor:
    """The logits [B, NEW, V] that a training step computes for the tokens generated."""
    mask = torch.cat((mask, torch.ones_like(texts[:, mask.shape[1] :])), 1)
    return trained(input_ids=texts, attention_mask=mask).logits[:, -NEW - 1 : -1]
