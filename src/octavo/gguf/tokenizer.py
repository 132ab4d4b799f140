"""A tokenizer.json as the metadata of a GGUF file.

llama.cpp knows byte-level BPE tokenizers by name (`tokenizer.ggml.pre`). A name stands for the regular expression that
splits a text into words, and for whether a word that is a token is looked up before merging. With a wrong name,
llama.cpp would split in other places, without a message. So a tokenizer that is none of those below is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError, read_json
from octavo.gguf.sentencepiece import is_sentencepiece, prepends_blank, scores, special_kinds

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's kinds of tokens
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
# (the expression of the Split before ByteLevel, or ""; ignore_merges) -> llama.cpp's name
_NAMES = {("", False): "gpt-2", (_LLAMA3, True): "llama-bpe", (_LLAMA3.replace("{1,3}", ""), False): "qwen2"}
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token", "unk": "unk_token"}


@dataclass(frozen=True)
class GgufTokenizer:
    """The description of a tokenizer in a GGUF file.

    Attributes:
        pre: llama.cpp's name of a byte-level BPE; "" for SentencePiece.
        tokens: the text of each id.
        kinds: ggml's kind of each id.
        merges: pairs with a blank between them, in order; empty for SentencePiece.
        scores: of each id, for SentencePiece; else empty.
        prepends_blank: whether SentencePiece puts a blank before a text.
        special: the ids of bos, eos, pad and unk that exist.
        add_bos: whether a text begins with bos.
        chat_template: in Jinja, or "".
    """

    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    prepends_blank: bool
    special: Mapping[str, int]
    add_bos: bool
    chat_template: str


def read_gguf_tokenizer(folder: Path, config: Mapping[str, Any], size: int) -> GgufTokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
        folder: with tokenizer.json, and tokenizer_config.json if there is one.
        config: the model's config.json, for the ids of special tokens that no file names.
        size: the rows of the embedding; an id without a token becomes an unused token.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ArtifactError: it is not JSON, not a BPE that llama.cpp can follow, or larger than the embedding.
    """
    path = folder / "tokenizer.json"
    found = read_json(path)
    pieces = is_sentencepiece(found)
    pre = "" if pieces else _name(found, path)
    blank = pieces and prepends_blank(found, path)
    ids = {token: int(i) for token, i in found["model"]["vocab"].items()}
    added = {str(entry["content"]): entry for entry in found.get("added_tokens") or []}
    ids |= {content: int(entry["id"]) for content, entry in added.items()}
    if ids and max(ids.values()) >= size:
        raise ArtifactError(
            f"{path} has the token {max(ids.values())}, the embedding has {size} rows: give the tokenizer of the model"
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in ids.items():
        tokens[i] = token
        kinds[i] = NORMAL if token not in added else CONTROL if added[token].get("special") else USER_DEFINED
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    special = _special(settings, config, ids)
    for token, kind in special_kinds(found).items() if pieces else ():
        if token in ids:
            kinds[ids[token]] = kind
    pairs = _merges(found, path)
    return GgufTokenizer(
        pre, tokens, kinds, [] if pieces else [" ".join(pair) for pair in pairs],
        scores(found, pairs, tokens, path) if pieces else [], blank,
        special, _adds_bos(found, settings, special, ids), _template(folder, settings),
    )  # fmt: skip


def _name(found: Mapping[str, Any], path: Path) -> str:
    model, normalizer = found.get("model") or {}, found.get("normalizer")
    steps = _steps(found.get("pre_tokenizer"))
    kinds = [step.get("type") for step in steps]
    if model.get("type") != "BPE" or kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise ArtifactError(
            f"{path} is neither a byte-level BPE ({model.get('type')}, cut by {kinds}) nor one like SentencePiece's: "
            "--no-tokenizer writes the weights only"
        )
    bytes_, split = steps[-1], steps[0] if len(steps) > 1 else None
    regex = "" if split is None else str((split.get("pattern") or {}).get("Regex"))
    name = _NAMES.get((regex, bool(model.get("ignore_merges"))))
    whole = split is None or (split.get("behavior") == "Isolated" and not split.get("invert"))
    plain = not bytes_.get("add_prefix_space") and bool(bytes_.get("use_regex", True)) == (split is None)
    composed = normalizer is None or normalizer.get("type") == "NFC"  # llama.cpp leaves NFC to its caller
    if name is None or not whole or not plain or not composed:
        raise ArtifactError(
            f"{path} splits texts in a way that llama.cpp has no name for (known: {', '.join(_NAMES.values())}): "
            "--no-tokenizer writes the weights only"
        )
    return name


def _steps(pre: Any) -> list[Mapping[str, Any]]:
    if not isinstance(pre, dict):
        return []
    return list(pre["pretokenizers"]) if pre.get("type") == "Sequence" else [pre]


def _merges(found: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in found["model"].get("merges") or []]
    if wrong := [pair for pair in merges if len(pair) != 2 or any(" " in token for token in pair)]:
        raise ArtifactError(f"{path}: a merge must be two tokens without blanks, got {wrong[0]!r}")
    if not merges:
        raise ArtifactError(f"{path} has no merges, which llama.cpp requires: --no-tokenizer writes the weights only")
    return [(pair[0], pair[1]) for pair in merges]


def _special(settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    special = {}
    for name, key in _SPECIAL.items():
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        number = config.get(f"{key}_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(text, str) and text in ids:
            special[name] = ids[text]
        elif isinstance(number, int):
            special[name] = number
    return special


def _adds_bos(
    found: Mapping[str, Any], settings: Mapping[str, Any], special: Mapping[str, int], ids: Mapping[str, int]
) -> bool:
    """Whether texts begin with bos, by `add_bos_token` or else by the tokenizer's template."""
    if "add_bos_token" in settings:
        return bool(settings["add_bos_token"])
    post = found.get("post_processor") or {}
    steps = post.get("processors", [post])
    singles = [step["single"] for step in steps if step.get("type") == "TemplateProcessing" and step.get("single")]
    first = [single[0].get("SpecialToken", {}).get("id") for single in singles]
    return any(isinstance(token, str) and token in ids and ids[token] == special.get("bos") for token in first)


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    return found if isinstance(found, str) else ""
