"""Tiny models of transformers as folders, their calibrations and packings, and what a model answers."""

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from bits import bits
from safetensors.torch import load_file
from torch import Tensor

from octavo.calibration import calibrate
from octavo.evaluation.prompts import PromptOptions
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import pack

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64,
    "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
GROUPS = EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
UNLIMITED = {"max_position_embeddings": ...}  # a key that the configuration must not be given
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_num_key_heads": 4,
    "linear_value_head_dim": 16, "linear_num_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": None,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2, "pad_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
SOUNDS = {
    "num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 32, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 256, "word_embed_proj_dim": 128, "activation_function": "gelu"}),
    "bert": ("BertModel", {}),
    "bert masked": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "t5 encoder": ("T5EncoderModel", T5),
    "t5": ("T5ForConditionalGeneration", T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "t5 trunk": ("T5Model", T5),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        T5 | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2},
    ),
    "bart": ("BartForConditionalGeneration", BART),
    "bart trunk": ("BartModel", BART),
    "whisper": ("WhisperForConditionalGeneration", BART | SOUNDS),
    "gpt2": ("GPT2LMHeadModel", {}),
    "mixtral": ("MixtralForCausalLM", EXPERTS | {"intermediate_size": 64, "num_local_experts": 4}),
    "mixtral of 128": ("MixtralForCausalLM", EXPERTS | {"intermediate_size": 128, "num_local_experts": 4}),
    "qwen3moe": ("Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4}),
    "glm4moe": ("Glm4MoeForCausalLM", GROUPS),
    "deepseekv3": ("DeepseekV3ForCausalLM", GROUPS | LATENT),
    "jamba": (
        "JambaForCausalLM",
        EXPERTS | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    ),
    "deepseekv32": ("DeepseekV32ForCausalLM", GROUPS | LATENT | {"index_n_heads": 2, "index_head_dim": 16}),
    "phimoe": ("PhimoeForCausalLM", EXPERTS | {"intermediate_size": 64, "num_local_experts": 4}),
    "laguna": (
        "LagunaForCausalLM",
        EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64, "pad_token_id": 0},
    ),
    "hunyuan moe": ("HunYuanMoEV1ForCausalLM", {"intermediate_size": 64, "num_experts": 4, "moe_topk": 2}),
    "olmo hybrid": ("OlmoHybridForCausalLM", HYBRID),
    "bamba": (
        "BambaForCausalLM",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 16},
    ),
    "xlm roberta masked": ("XLMRobertaForMaskedLM", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "llama4": ("Llama4ForCausalLM", {"intermediate_size_mlp": 64, "intermediate_size": 64, "num_local_experts": 4}),
    "gptneox": ("GPTNeoXForCausalLM", {}),
    "falcon": ("FalconForCausalLM", {"head_dim": ..., "bias": True}),
    "bloom": ("BloomForCausalLM", UNLIMITED | {"n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", UNLIMITED | {"max_seq_len": 64, "d_model": 128, "n_heads": 4, "n_layers": 2}),
    "mamba": ("MambaForCausalLM", UNLIMITED | {"state_size": 8}),
    "xlstm": ("xLSTMForCausalLM", UNLIMITED | {"num_heads": 4, "head_dim": ...}),
    "recurrent gemma": ("RecurrentGemmaForCausalLM", {"block_types": ["recurrent", "attention"], "head_dim": ...}),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    "rwkv": ("RwkvForCausalLM", {"context_length": 64, "max_position_embeddings": ...}),
    "esm": ("EsmForMaskedLM", {"pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "rotary"}),
    "hyv4": ("HYV4ForCausalLM", GROUPS | LATENT | {"index_n_heads": 2, "index_head_dim": 16, "pad_token_id": 0}),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 32, "sliding_window": 64}),
    "zamba2": (
        "Zamba2ForCausalLM",
        {"n_mamba_heads": 8, "mamba_headdim": 32, "mamba_d_state": 8, "chunk_size": 16, "num_mem_blocks": 1}
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "head_dim": ...},
    ),
    "granite moe": ("GraniteMoeForCausalLM", EXPERTS | {"moe_intermediate_size": ..., "num_local_experts": 4}),
}
IMAGE_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
WINDOWS = {"patch_size": 4, "embed_dim": 64, "depths": [2, 2], "num_attention_heads": [2, 4], "window_size": 4}
IMAGE_MODELS = {
    "vit": ("ViTForImageClassification", {}),
    "vit trunk": ("ViTModel", {}),
    "dinov2": ("Dinov2ForImageClassification", {}),
    "clip vision": ("CLIPVisionModelWithProjection", {}),
    "siglip vision": ("SiglipVisionModel", {}),
    "swin": ("SwinForImageClassification", WINDOWS),
    "swin v2": ("Swinv2ForImageClassification", WINDOWS),
    "dinov3": ("DINOv3ViTModel", {}),
    "vit mae": ("ViTMAEForPreTraining", {}),
    "siglip2 vision": ("Siglip2VisionModel", {"image_size": ..., "num_patches": 16}),
    "videomae": ("VideoMAEForVideoClassification", {"num_frames": 4}),
}
TEXT = "\n".join(f"{i} times {j} is {i * j}, said the clerk to the clerk." for i in range(6) for j in "74")
"""Enough bytes for nine prompts of 64."""
Folders = Callable[..., Path]


QUICK = ("llama", "llama untied", "opt", "gpt2", "bert", "t5", "mixtral", "vit")


def with_slow(rows: Iterable, quick: Container = QUICK) -> list:
    """Parameters, values or tuples: those that are not one of `quick`, and begin with none, are marked as slow."""
    each = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=() if row in quick or row[0] in quick else pytest.mark.slow) for row in each]


def built(name: str, seed: int = 0, gain: float = 1.0, **sizes):
    """A model in float32 whose outputs are large. A layer's outputs have `gain` times the deviation of its inputs."""
    architecture, settings = (MODELS | IMAGE_MODELS)[name]
    cls = getattr(transformers, architecture)
    torch.manual_seed(seed)
    described = (SIZES if name in MODELS else IMAGE_SIZES) | settings | sizes
    model = cls(cls.config_class(**{key: value for key, value in described.items() if value is not ...}))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim > 1 and "emb" not in key:
                fan = p[0].numel() if p.ndim == 4 else p.shape[-1]
                if key.endswith("Attention.q.weight"):
                    fan *= model.config.d_kv  # T5 does not divide its scores by the root of this
                p.copy_(torch.randn_like(p) * (gain * fan**-0.5))
            elif p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def make_model(folder: Path, name: str, seed: int = 0, **sizes) -> Path:
    """A BF16 folder, of a model of text with a tokenizer."""
    built(name, seed, **sizes).bfloat16().save_pretrained(folder)
    if name in MODELS:
        ByteTokenizer().save(folder)
    return folder


def write_text(path: Path) -> Path:
    path.write_text(TEXT)
    return path


def folder_maker(root: Path, **sizes) -> Folders:
    """make(name): a model of these sizes; make(name, "calibrated"): its calibration; make(name, scheme=...): packed."""
    text = write_text(root / "text.txt")

    def make(name: str, what: str = "", **how) -> Path:
        described = " ".join([name, what, *(f"{key}={value}" for key, value in how.items())]).strip()
        folder = root / re.sub(r"[^\w =-]", "", described)  # readers look for files in it by patterns
        if folder.exists():
            return folder
        with torch.random.fork_rng():
            if how:
                calibrated = how.get("scheme") == "static" or how.get("kv_cache")
                pack(make(name), folder, calibration=make(name, "calibrated") if calibrated else None, **how)
            elif what:
                calibrate(make(name), [str(text)], folder, prompts=PromptOptions(16, 64))
            else:
                make_model(folder, name, **sizes)
        return folder

    return make


def open_theirs(folder: Path, dtype: torch.dtype | str = "auto"):
    """transformers' model of the folder. No tensor may be missing or left over."""
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, local_files_only=True)
    assert not any(info.values()), info
    return model.eval()


IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def outputs(model, ids: Tensor = IDS) -> Tensor:
    """The logits, or an encoder's last hidden states, in float64."""
    out = model(ids)
    if not isinstance(out, Tensor):
        out = out.logits if "logits" in out else out.last_hidden_state
    return out.double()


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if two files or models hold the same tensors."""
    return a.keys() == b.keys() and all(
        t.dtype == b[name].dtype and t.shape == b[name].shape and torch.equal(bits(t), bits(b[name]))
        for name, t in a.items()
    )


def same_bytes(a: Path, b: Path) -> bool:
    return same_bits(*(load_file(folder / "model.safetensors") for folder in (a, b)))
