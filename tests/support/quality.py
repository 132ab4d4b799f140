"""The quality of one model against another."""

from collections.abc import Iterable

from torch import Tensor

from octavo.evaluation.metrics import EmbeddingQuality, EmbeddingSums, LogitQuality, LogitSums, Outputs, compare_many


def compare_logits(reference: Outputs, candidate: Outputs, batches: Iterable[Tensor]) -> LogitQuality:
    """Compare a language model with a reference on batches of prompts, ids int64 [B, T], T >= 2, without padding."""
    return compare_many(reference, {"": candidate}, batches, LogitSums)[""]


def compare_embeddings(reference: Outputs, candidate: Outputs, batches: Iterable[Tensor]) -> EmbeddingQuality:
    """Compare an encoder with a reference on batches of prompts, ids int64 [B, T], without padding."""
    return compare_many(reference, {"": candidate}, batches, EmbeddingSums)[""]
