"""Compiling the kernels of a packed model while its files are read.

A model of two layers, of the same sizes and without weights, takes prompts and a token after them. Its kernels are
compiled, then run, which also loads the libraries of PyTorch that the model needs. The first layer allocates the cache;
the second stores a prompt by another kernel.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from octavo.generation.forward import make_forward
from octavo.generation.prompts import pad_prompts
from octavo.generation.session import Session
from octavo.hf.meta_model import MetaModel, our_meta_model, transformers_meta_model
from octavo.hf.outputs import is_language_model
from octavo.models.decoder import Decoder
from octavo.ops.compiling import compile_only
from octavo.ops.triton_support import has_kernels
from octavo.runtime.fused import fuse

LOG = logging.getLogger(__name__)
# Tokens of a prompt, and room of its cache. Triton compiles a kernel anew for sizes that 16 does not divide, and the
# attention of a step depends on the room.
PROMPTS = ((128, 2048), (127, 512), (127, 256))
VOCABULARY = 256  # embeddings and output heads are not packed, so they need no kernels of ours


def small_model(meta_model: MetaModel, folder: Path) -> MetaModel | None:
    """The model with two layers at most and a small vocabulary, on the meta device; None if it cannot be made, or
    does not predict the next token."""
    config = dict(meta_model.config)
    if "num_hidden_layers" not in config or meta_model.experts is not None or not is_language_model(meta_model.model):
        return None
    layers = min(2, config["num_hidden_layers"])
    config |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "pad_token_id": None}
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[:layers]
    if isinstance(meta_model.model, Decoder):
        return our_meta_model(config)
    return transformers_meta_model(config, folder)


@contextmanager
def compile_meanwhile(model: MetaModel, device: torch.device, kv_cache: str | None) -> Iterator[None]:
    """Compile the kernels of `model` in another thread; at the end, wait for it. Nothing happens without kernels.

    An error is not reported: the kernels are then compiled at their first launch.

    Args:
        model: of `small_model`, with packed layers, on the meta device.
        device: of the model whose files are read.
        kv_cache: dtype of keys and values; None takes that of the model.
    """
    if not has_kernels(device):
        yield
        return
    thread = threading.Thread(target=_compile, args=(model, device, kv_cache), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _compile(model: MetaModel, device: torch.device, kv_cache: str | None) -> None:
    try:
        with torch.cuda.device(device):
            fuse(model.model.to_empty(device=device))
            for mode in (compile_only, nullcontext):
                with mode():
                    run(model, device, kv_cache)
            torch.cuda.synchronize(device)
    except Exception:  # the kernels are compiled at their first launch
        LOG.debug("kernels were not compiled while files were read", exc_info=True)


@torch.inference_mode()
def run(model: MetaModel, device: torch.device, kv_cache: str | None) -> None:
    """Let the model take each prompt of `PROMPTS`, cut to its context, and one token after it."""
    scale = torch.ones(1, device=device)
    scales = [(scale, scale)] * model.config["num_hidden_layers"] if kv_cache == "fp8" else None
    for tokens, room in PROMPTS:
        tokens, room = min(tokens, model.context - 1), min(room, model.context)
        session = Session(make_forward(model.model, room, kv_cache, scales), 1, device, captures=False)
        logits = session.prefill(pad_prompts([[0] * tokens], device))
        session.step(logits.argmax(-1))
