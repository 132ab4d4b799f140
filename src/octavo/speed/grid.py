"""The sizes that a comparison of speed measures, and those of the models that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from octavo.artifact.run import RunFolder
from octavo.extras import import_extra, open_local
from octavo.hf.outputs import names_language_model


class Cell(NamedTuple):
    """One size: `batch` prompts of `prompt` tokens each."""

    batch: int
    prompt: int


@dataclass(frozen=True)
class Grid:
    """The sizes of a comparison.

    Attributes:
        batches: numbers of prompts that are generated from at once.
        prompts: lengths of prompts in tokens.
        tokens: new tokens of each prompt. With 1, only the time to the first token is measured.
        rounds: how often each size is timed; figures are medians over the rounds.
        seed: of the random tokens of the prompts.
    """

    batches: Sequence[int]
    prompts: Sequence[int]
    tokens: int = 64
    rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {"batch": self.batches, "prompt": self.prompts, "tokens": [self.tokens], "rounds": [self.rounds]}
        for name, given in numbers.items():
            if not given or min(given) < 1:
                raise ValueError(f"{name} must be at least 1, got {', '.join(map(str, given)) or 'none'}")

    @property
    def cells(self) -> list[Cell]:
        """Every size, the shortest prompt first, and for each prompt the smallest batch first.

        The order matters: transformers makes a static cache at least as long as the longest one before it.
        """
        return [Cell(batch, prompt) for prompt in sorted(set(self.prompts)) for batch in sorted(set(self.batches))]


@dataclass(frozen=True)
class Prompts:
    """Random prompts for models of one vocabulary, on one device."""

    grid: Grid
    vocabulary: int
    device: torch.device

    def draw(self, cell: Cell) -> Tensor:
        """Random tokens, int64 [batch, prompt]; the same ones in each call."""
        drawn = torch.Generator().manual_seed(self.grid.seed)
        return torch.randint(self.vocabulary, (cell.batch, cell.prompt), generator=drawn).to(self.device)


class ModelSizes(NamedTuple):
    """Facts of a model's config.json and files.

    Attributes:
        vocabulary: the number of tokens.
        context: the most tokens that it can see; None where config.json does not say.
        weight_bytes: the size of its files of tensors.
        cache_bytes: the size of a token's keys and values in BF16, over all layers.
    """

    vocabulary: int
    context: int | None
    weight_bytes: int
    cache_bytes: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the facts of a Hugging Face folder, packed or not, or of a run of octavo train.

        Raises:
            ValueError: the model is an encoder.
            ImportError: transformers is not installed.
        """
        transformers = import_extra("transformers", "hf", "octavo bench runs models of transformers")
        run = RunFolder(folder)
        described = open_local(transformers.AutoConfig, run.model if run.has_model else folder)
        if described.architectures and not names_language_model(described.architectures[0]):
            raise ValueError(
                f"{folder} holds a {described.architectures[0]}, which generates no text: a causal language "
                "model is required (Llama, Qwen, Mistral, GPT-2, ...)"
            )
        config = described.get_text_config(decoder=True)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        files = (run.newest() if run.has_model else folder).glob("*.safetensors")
        return cls(
            config.vocab_size,
            getattr(config, "max_position_embeddings", None),
            sum(file.stat().st_size for file in files),
            2 * 2 * config.num_hidden_layers * kv_heads * head_dim,
        )

    def check(self, grid: Grid, folder: Path, vocabulary: int) -> None:
        """Raise a ValueError unless the model of `folder` can see the longest prompt with its new tokens, and has a
        vocabulary of this size."""
        prompt = max(grid.prompts)
        if self.context is not None and prompt + grid.tokens > self.context:
            raise ValueError(
                f"a prompt of {prompt} tokens and {grid.tokens} new ones are {prompt + grid.tokens} tokens, and the "
                f"model of {folder} sees {self.context}: take a shorter --prompt or fewer --tokens"
            )
        if self.vocabulary != vocabulary:
            raise ValueError(
                f"{folder} has {self.vocabulary} tokens, and FOLDER has {vocabulary}: --against takes the "
                "model that FOLDER was packed from"
            )
