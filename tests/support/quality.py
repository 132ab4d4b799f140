"""The quality of one model against another."""

from octavo.evaluation.metrics import LogitSums, compare_many


def compare(reference, candidate, batches, gather=LogitSums):
    """Compare a model with a reference on batches of prompts, ids int64 [B, T], without padding; T >= 2 for logits."""
    return compare_many(reference, {"": candidate}, batches, gather)[""]
