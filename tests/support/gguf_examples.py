"""Models to export as GGUF, and what the files must hold: Q8_0 as its definition has it, in float64."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from packed_examples import lively
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 256, "eos_token_id": 257,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama wide heads": ("Llama", {"head_dim": 32}),
    "llama far": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 untied": ("Qwen2", {}),
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXT = ["The clerk's 1234 forms, größer than 99:\n\n  done! ", "It's 7 o'clock and we'll go."] * 9


def tokenizer(pre: str = "gpt-2") -> Tokenizer:
    """A byte-level BPE of 256 bytes, two special tokens, an added word and some merges, that cuts texts as `pre`."""
    made = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    cut: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre != "gpt-2":
        split = pre_tokenizers.Split(Regex(LLAMA3 if pre == "llama-bpe" else LLAMA3.replace("{1,3}", "")), "isolated")
        cut = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.pre_tokenizer, made.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=296, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    made.train_from_iterator(TEXT, trainer)
    made.add_special_tokens(["<bos>", "<eos>"])
    made.add_tokens(["clerk"])
    if pre == "llama-bpe":
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
        )
    return made


def write_model(path: Path, name: str, pre: str = "gpt-2", **change: Any) -> Path:
    torch.manual_seed(0)
    kind, settings = KINDS[name]
    words = tokenizer(pre)
    ids = {"bos_token_id": words.token_to_id("<bos>"), "eos_token_id": words.token_to_id("<eos>")}
    config = getattr(transformers, f"{kind}Config")(**SIZES | ids | settings | change)
    lively(getattr(transformers, f"{kind}ForCausalLM")(config)).bfloat16().save_pretrained(path)
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": "{{ messages }}",
                    "tokenizer_class": "PreTrainedTokenizerFast"})
    )  # fmt: skip
    return path


def q8_0(weight: Tensor) -> Tensor:
    """Blocks of 32: d = amax / 127, q = w / d rounded away from zero at one half, d itself rounded to float16."""
    blocks = weight.float().reshape(-1, 32)
    d = blocks.abs().amax(1, keepdim=True) / 127
    x = (blocks * torch.where(d == 0, 0, 1 / d)).double()
    q = torch.sign(x) * torch.floor(x.abs() + 0.5)
    return (q * d.half().double()).reshape(weight.shape).float()


def expected(folder: Path, weights: str) -> Any:
    """transformers' model of `folder` in float32, its numbers as the file is to have them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            linear = p.ndim == 2 and not name.startswith(("lm_head", "model.embed"))
            if p.ndim == 2:
                p.copy_(q8_0(p) if linear and weights == "q8_0" else p.half().float())
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(3))).logits
    return found.double()
