"""The size of the vocabulary that the settings of a run name, without training or downloading a tokenizer."""

from pathlib import Path

from octavo.models import BUILT_IN_MODELS
from octavo.models.tokenizer import load_tokenizer
from octavo.train.config import Config

# The sizes of the tokenizers that the presets name.
_KNOWN = dict.fromkeys(("Llama-3.2-1B", "Meta-Llama-3-8B", "Meta-Llama-3-70B"), 128256)


def known_vocabulary(config: Config) -> int | None:
    """The number of tokens; None if only the tokenizer, which would have to be downloaded, tells."""
    if config.tokenizer == "bpe":
        return config.vocabulary
    if config.tokenizer in ("bytes", "characters") or config.model not in BUILT_IN_MODELS:
        return 256
    name = config.tokenizer.removeprefix("hf:")
    return (
        load_tokenizer(Path(name)).vocabulary_size
        if Path(name).is_dir()
        else _KNOWN.get(name.removeprefix("meta-llama/"))
    )
