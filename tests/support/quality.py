"""The quality of one model against another."""

from octavo.evaluation.metrics import EmbeddingQuality, EmbeddingSums, LogitQuality, LogitSums, compare_many


def compare_logits(reference, candidate, batches) -> LogitQuality:
    """Compare a language model with a reference on batches of prompts, ids int64 [B, T], T >= 2, without padding."""
    return compare_many(reference, {"": candidate}, batches, LogitSums)[""]


def compare_embeddings(reference, candidate, batches) -> EmbeddingQuality:
    """Compare an encoder with a reference on batches of prompts, ids int64 [B, T], without padding."""
    return compare_many(reference, {"": candidate}, batches, EmbeddingSums)[""]
