"""A SentencePiece-like BPE (the tokenizer.json of Llama 2 and Mistral) in llama.cpp's form: pieces with scores.

A tokenizer.json lists merges in order. SentencePiece has scores of pieces instead, and joins the two neighbours whose
piece has the highest score. Both give the same tokens if every way to cut a piece in two is a merge, and if the merges
of a piece follow each other in the list. Then the score of a piece is minus the position of its first merge. Other
tokenizers are refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError

UNKNOWN, BYTE = 2, 6  # ggml's kinds of tokens
_BLANK = "▁"
_PREPEND = {"type": "Prepend", "prepend": _BLANK}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}


def is_sentencepiece(found: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json spells text without a piece as bytes, as SentencePiece does."""
    model = found.get("model") or {}
    return model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def prepends_blank(found: Mapping[str, Any], path: Path) -> bool:
    """Whether the tokenizer puts a blank before a text; an ArtifactError if it treats blanks unlike SentencePiece."""
    normalizer, cut = found.get("normalizer"), found.get("pre_tokenizer")
    if cut is None and normalizer == {"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}:
        return True
    if cut is None and normalizer in (_REPLACE, {"type": "Sequence", "normalizers": [_REPLACE]}):
        return False
    whole = isinstance(cut, dict) and cut.get("type") == "Metaspace" and cut.get("replacement") == _BLANK
    if normalizer is None and whole and isinstance(cut, dict) and cut.get("split") is False:
        return cut.get("prepend_scheme") in ("first", "always")
    raise ArtifactError(
        f"{path} treats blanks in another way than SentencePiece, which llama.cpp cannot follow: --no-tokenizer "
        "writes the weights only"
    )


def special_kinds(found: Mapping[str, Any]) -> dict[str, int]:
    """The kinds of the tokens for bytes and for unknown text, by their texts."""
    kinds = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    unknown = found["model"].get("unk_token")
    return kinds if unknown is None else kinds | {str(unknown): UNKNOWN}


def scores(
    found: Mapping[str, Any], merges: Sequence[tuple[str, str]], tokens: Sequence[str], path: Path
) -> list[float]:
    """The score of each token: minus the position of the first merge that makes it; the lowest for all others.

    Raises an ArtifactError if SentencePiece would join other neighbours than the `merges` do.
    """
    places: dict[str, list[int]] = {}
    for place, (left, right) in enumerate(merges):
        places.setdefault(left + right, []).append(place)
    vocabulary, known = found["model"]["vocab"], set(merges)
    skipped = {entry["content"] for entry in found.get("added_tokens") or []} | special_kinds(found).keys()
    for piece in vocabulary:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))] if piece not in skipped else []
        missing = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary and cut not in known]
        own = places.get(piece, [])
        if missing or (own and own[-1] - own[0] != len(own) - 1):
            raise ArtifactError(
                f"{path}: the merges of the piece {piece!r} are incomplete or not next to each other, so that its "
                "tokens are not those of SentencePiece: --no-tokenizer writes the weights only"
            )
    return [-float(places[token][0]) if token in places else -float(len(merges)) for token in tokens]
