"""The Hugging Face `tokenizer.json` of the tokenizers that need no library."""

import json
from pathlib import Path
from typing import Any


def save_tokenizer_json(folder: str | Path, tokenizer_json: str) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, which is created if it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    # The clean-up of older models ("do n't" to "don't") would not give back the text that was encoded.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def describe_tokenizer(pre_tokenizer: dict[str, Any], decoder: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json without a normalizer, special tokens and added tokens."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def byte_characters() -> list[str]:
    """The character that spells each of the 256 bytes in a `tokenizer.json`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_json() -> dict[str, Any]:
    """A BPE without merges, whose tokens are the 256 bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(byte_characters())},
        "merges": [],
    }
    return describe_tokenizer(byte_level, byte_level, model)


def is_bytes(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json gives the same ids as `byte_json`."""
    model, ours = content["model"], byte_json()["model"]
    plain = not content.get("added_tokens") and content.get("normalizer") is None
    return plain and model.get("vocab") == ours["vocab"] and not model.get("merges")


def character_json(characters: str) -> dict[str, Any]:
    """A tokenizer.json whose token i is the character `characters[i]`. It refuses every other character."""
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    vocabulary = {character: i for i, character in enumerate(characters)}
    # The unknown token is longer than a character and not in the vocabulary, so that an unknown character is an error.
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return describe_tokenizer(every, {"type": "Fuse"}, model)


def characters_of(content: dict[str, Any]) -> str | None:
    """The characters of a tokenizer.json that `character_json` made; None for any other."""
    characters = "".join(content["model"].get("vocab") or ())
    return characters if content == character_json(characters) else None
