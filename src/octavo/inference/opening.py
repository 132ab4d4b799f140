"""From a packed folder to a model that computes with its weights. Every file is checked before it is used."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.checkpoint import scheme as schemes
from octavo.checkpoint.files import ArtifactError, ShardReader, model_tensors, read_json, read_record
from octavo.checkpoint.layouts import EXPERT_DTYPE, UNQUANTIZED_DTYPE, Packing, read_config, read_packing
from octavo.checkpoint.scheme import INPUT_SCALE_NAME, SCALE_NAME, WEIGHT_DTYPES, KvScales, Scheme
from octavo.hf import meta_model as models
from octavo.hf.meta_model import MetaModel, is_language_model, read_meta_model, transformers_meta_model
from octavo.hf.source import open_source
from octavo.inference.engine import AUTO
from octavo.inference.kv_cache import Pairs, check_settings, pairs_in_order
from octavo.inference.packed_experts import PackedExperts, PackedGroupedLinear, expert_input_cast
from octavo.inference.packed_linear import PackedLinear, fuse, swap_linears, use_formats_of
from octavo.inference.session import Session, make_forward, pad_prompts
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.nn.conversion import find_experts
from octavo.nn.experts import Experts
from octavo.ops import index_of_largest, quantize
from octavo.ops.dispatch import MAX_FASTER_M, MAX_M_OF_GROUPS
from octavo.ops.launching import compile_only
from octavo.ops.registration import FLOATS
from octavo.rates.measured import slower_experts_note, slower_note
from octavo.util import choose_device, plural


def load_transformers(folder: str, device: str | torch.device, kv_cache: str, attention: str, head: str) -> Any:
    """`octavo.load`. Only the files of the folder are read, and none of them is a pickle."""
    from transformers import GenerationConfig

    from octavo.inference.transformers_generate import accelerate_generate

    check_settings(None if kv_cache == AUTO else kv_cache, attention=attention)
    if head not in ("bf16", "rowwise"):
        raise ValueError(f"head must be one of bf16, rowwise, got {head!r}")
    place, path = choose_device(device), Path(folder)
    meta_model = transformers_meta_model(read_config(path), path)
    model: Any = meta_model.model
    accelerated = model.can_generate() and not models.has_decoder(model)
    if not accelerated and (kv_cache, attention, head) != (AUTO, "bf16", "bf16"):
        raise ValueError(
            f"{path} holds a {type(model).__name__}, and kv_cache, attention and head are for the text that a language "
            "model generates: leave them out"
        )
    model, kv_scales = fill(meta_model, path, place, kv_cache)
    if (path / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    model.octavo_record = read_record(path)  # how the folder was packed
    if head == "rowwise":
        quantize_head(model)
    if accelerated:  # transformers' own loop generates from a model with an encoder and a decoder
        accelerate_generate(model, meta_model.context, kv_cache=kv_cache, kv_scales=kv_scales, attention=attention)
    return model


def quantize_head(model: Any) -> None:
    """Let the head of a language model compute in the scheme `channel`, with half the bytes. Packed folders leave heads
    in BF16, so its weight is rounded here; an embedding that it is tied to keeps its numbers.

    A ValueError if the model has no head, one that is no linear layer, or one whose dtype its code reads.
    """
    head = model.lm_head if isinstance(model, Decoder) else model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"{type(model).__name__} must have a linear layer as its head, got {type(head).__name__}")
    name = next(name for name, module in model.named_modules() if module is head)
    if name in models.dtypes_read(model.__class__):
        raise ValueError(f"{type(model).__name__} casts an input to the dtype of its head: leave head='rowwise' out")
    swap_linears(model, {name: schemes.CHANNEL})
    packed, q = model.get_submodule(name), quantize(head.weight.detach(), schemes.CHANNEL.weight)
    packed.weight, packed.weight_scale = q.data, q.scale
    packed.bias = None if head.bias is None else head.bias.detach()
    use_formats_of(packed, head.weight.device)


def is_gpu(device: torch.device) -> bool:
    """True if kernels run on `device`, and the speed of layers there is worth a warning."""
    return device.type == "cuda"


class OpenedModel(NamedTuple):
    """A language model in evaluation mode, and its tokenizer. `context` is the number of tokens it can see,
    `description` the folder of its config.json, and `precision` that of autocast, as training has it. A packed folder
    may have `kv_scales`, a pair for each layer."""

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    device: torch.device
    description: Path
    title: str
    precision: str = "fp32"
    kv_scales: Pairs | None = None


def load_packed(folder: str | Path, device: str | torch.device = "cpu") -> OpenedModel:
    """Open a packed folder as a model of `octavo.models` or transformers, in evaluation mode, as `octavo.load` does."""
    place, path = choose_device(device), Path(folder)
    meta_model = read_meta_model(read_config(path), path)
    model, kv_scales = fill(meta_model, path, place)
    return OpenedModel(model, load_tokenizer(path), meta_model.context, place, path, str(folder), kv_scales=kv_scales)


def fill(
    meta_model: MetaModel, folder: Path, device: torch.device, kv_cache: str = AUTO
) -> tuple[nn.Module, Pairs | None]:
    """Fill `meta_model`, whose config is that of the packed `folder`, on `device`, and fuse its norms and MLPs. Returns
    the scales of its keys and values too, a pair for each layer, or None if the folder has none.

    While the files are read, the kernels of the model are compiled, for a cache of the dtype `kv_cache`.
    """
    disks, reader, where = meta_model.linears(), ShardReader(folder), folder / "config.json"
    reader.specs, left = meta_model.leave_out(reader.specs)
    if left:
        warnings.warn(f"{folder}: {left}", stacklevel=2)
    dtypes = {name.removesuffix(".weight"): spec.dtype for name, spec in reader.specs.items()}
    plain = {name for name in disks if dtypes.get(name) not in WEIGHT_DTYPES}  # a tied head has no weight of its own
    matrices = [name for name in meta_model.experts.experts if dtypes.get(name) == EXPERT_DTYPE]  # of stacks, in FP8
    packing = read_packing(meta_model.config, [*disks, *matrices], where, plain)
    experts = ExpertLoading(meta_model, packing, matrices, device)
    model, kv_scales = _filled(meta_model, packing, reader, experts, kv_cache)
    _check_scales(model, folder)
    use_formats_of(model, device)
    if is_gpu(device):  # a CPU emulates every scheme
        chosen = Counter(schemes.scheme_on(packing.schemes[name], device) for name in disks if name in packing.schemes)
        weight_only, widened = gemm_notes(chosen, device)
        for note in filter(None, (weight_only, slower_note(chosen, device) or widened, experts.slower_note())):
            warnings.warn(f"{folder}: {note}", stacklevel=2)
    model.to(device)
    fuse(model)
    return model, pairs_in_order(kv_scales) if kv_scales else None


def gemm_notes(chosen: Counter[Scheme], device: torch.device) -> tuple[str, str]:
    """The packed layers that run weight-only on `device` although their scheme casts inputs, counted by scheme, with
    the reason. Then the layers whose operands are widened at a large M, slower than BF16. "" for none."""
    weight_only, widened = [], []
    for scheme, count in chosen.items():
        cast, backend = schemes.find_gemm(scheme, device)
        layers = f"{plural(count, 'layer')} of the scheme {scheme.name}"
        if scheme.inputs is not None and cast is None:
            weight_only.append(f"{layers} ({backend.reason})")
        if backend.name == "dequantized" or (cast is None and device.type == "cuda"):
            widened.append(f"{layers} above {MAX_FASTER_M if cast is None else MAX_M_OF_GROUPS} tokens")
    on = f"on {device} these layers"
    first = f"{on} compute with inputs that are not quantized: {'; '.join(weight_only)}"
    second = (
        f"{on} are slower than BF16, because their operands are widened to BF16: {'; '.join(widened)}. docs/packing.md "
        "names the schemes with a GEMM of their own"
    )
    return first if weight_only else "", second if widened else ""


def _filled(
    meta_model: MetaModel, packing: Packing, reader: ShardReader, experts: ExpertLoading, kv_cache: str
) -> tuple[nn.Module, KvScales]:
    """The model with the tensors of the files. At the end, it alone holds them: fusion copies some, and frees them."""
    folder, disks, files = reader.folder, meta_model.linears(), meta_model.experts
    kept = [name for name in meta_model.kept_wide(disks) if name in packing.schemes]
    models.compute_buffers(meta_model.model, "cpu")  # transformers reads the dtypes of linear layers of Swin v2 for it
    swap_linears(meta_model.model, _packed_layers(meta_model, packing, folder / "config.json"))
    # The stacks of experts need room beside their parts, which a GPU may lack.
    place = torch.device("cpu") if files.stacks else experts.device
    with compile_meanwhile(meta_model, packing, folder, experts.device, kv_cache):
        tensors = _read_tensors(packing, reader, place)
    for name in (*kept, *experts.wide):  # `check_tensors` names a weight or a scale that is missing
        weight, scale = (tensors.get(f"{name}.{leaf}") for leaf in ("weight", SCALE_NAME))
        if weight is not None and scale is not None and name in packing.schemes:
            schemes.check_scale(f"{name}.{SCALE_NAME}", scale, folder)
            for leaf in (SCALE_NAME, INPUT_SCALE_NAME):
                tensors.pop(f"{name}.{leaf}", None)
            tensors[f"{name}.weight"] = packing.schemes[name].packed_weight(weight, scale).dequantize(UNQUANTIZED_DTYPE)
    if kept:
        warnings.warn(
            f"{folder}: {kept[0]} ({plural(len(kept), 'such layer')}) is packed, and its weight is widened to BF16: "
            "its model runs such layers in no eight bits. octavo pack leaves them in BF16",
            stacklevel=3,
        )
    others = {name: t for name, t in model_tensors(meta_model.model).items() if not experts.is_packed(name)}
    cache, unpacked = schemes.kv_tensors(disks, packing.kv_cache), files.split(others)
    for name, tensor in tensors.items():
        if name in unpacked and {tensor.dtype, unpacked[name].dtype} <= {*FLOATS}:  # others write float16 and float32
            tensors[name] = tensor.to(unpacked[name].dtype)
    schemes.check_tensors(tensors, unpacked | experts.required | cache, folder)
    kv_scales = schemes.kv_pairs(tensors, cache)
    tensors = {name: t for name, t in tensors.items() if name not in cache}
    stacks = experts.stack(tensors)
    get, names = files.by_model_names(tensors.__getitem__, tensors)
    return models.fill_model(meta_model, {name: get(name) for name in names} | stacks), kv_scales


def _read_tensors(packing: Packing, reader: ShardReader, device: torch.device) -> dict[str, Tensor]:
    """Every tensor that is read, on `device`, by its name in the files, with scales as `PackedLinear` holds them."""
    tensors = packing.from_files(reader.get_all(device))
    unused = schemes.unused_scales(tensors, tensors.__getitem__, reader.folder)
    for name in unused:
        del tensors[name]
    if unused:
        warnings.warn(
            f"{reader.folder}: {unused[0]} ({len(unused)} such tensors) is a scale that Octavo does not use",
            stacklevel=2,
        )
    return tensors


def _check_scales(model: nn.Module, folder: Path) -> None:
    """Warn if weights multiplied by their scales are far larger than those of a trained model."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    weights = {name: layer.scheme.packed_weight(layer.weight, layer.weight_scale) for name, layer in layers.items()}
    scales = ((name, weight.scale) for name, weight in weights.items())
    if names := schemes.suspected(scales, lambda name: weights[name].dequantize()):
        warnings.warn(f"{folder}: {schemes.reciprocal_warning(names, len(layers))}", stacklevel=2)


def end_tokens(folder: str | Path) -> frozenset[int]:
    """The tokens that end a text, as the folder's generation_config.json or config.json declares them. An ArtifactError
    if these are no token ids."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        found: Any = read_json(path).get("eos_token_id") if path.is_file() else None
        tokens = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(token) is not int for token in tokens):
            raise ArtifactError(f"{path}: eos_token_id must be a token id or a list of them, got {found!r}")
        if tokens:
            return frozenset(tokens)
    return frozenset()


def _packed_layers(meta_model: MetaModel, packing: Packing, where: Path) -> dict[str, Scheme]:
    linears = {name: m for name, m in meta_model.model.named_modules() if isinstance(m, nn.Linear)}
    chosen = {name: packing.schemes.get(meta_model.file_name(name)) for name in linears}
    wide = meta_model.kept_wide(linears)
    packed = {name: scheme for name, scheme in chosen.items() if scheme is not None and name not in wide}
    for name, scheme in packed.items():
        if reason := scheme.unreadable(linears[name].out_features, linears[name].in_features):
            raise ArtifactError(f"{where}: {name}.weight: {reason}")
    return packed


def open_model(folder: Path, device: str | torch.device = "cpu") -> OpenedModel:
    """The language model of a folder that `octavo pack` wrote, or of a Hugging Face folder, which runs in BF16; in
    evaluation mode. An ArtifactError if the folder holds pickles, or its model predicts no next token."""
    place, config = choose_device(device), read_config(folder)
    if config.get("quantization_config"):
        packed = read_meta_model(config, folder).model
        _require(is_language_model(packed), packed, folder)
        return load_packed(folder, place)
    source = open_source(folder)
    _require(is_language_model(source.meta_model.model), source.meta_model.model, folder)
    model, tokenizer = source.fill_bf16(place), load_tokenizer(folder)
    _require(models.is_causal(model, tokenizer.vocabulary_size), model, folder)
    return OpenedModel(model, tokenizer, source.meta_model.context, place, folder, str(folder))


def open_transformers(folder: Path, device: torch.device) -> nn.Module:
    """The language model of transformers of a packed folder, on `device`, with adapters or without."""
    meta_model = transformers_meta_model(read_config(folder), folder)
    _require(is_language_model(meta_model.model), meta_model.model, folder)
    return fill(meta_model, folder, device)[0]


def _require(predicts: bool, model: nn.Module, folder: Path) -> None:
    if not predicts:
        raise ArtifactError(
            f"{folder} holds a {type(model).__name__}, which predicts no next token: a causal language "
            "model is required (Llama, Qwen, Mistral, GPT-2, ...)"
        )


# ---- The packed experts of a folder: its files hold each matrix by itself, and the model takes stacks of them.


class ExpertLoading:
    """The packed experts of a folder, on their way into a model that will run on `device`.

    A layer of experts runs in FP8 if all its matrices are packed, those of a stack by one scheme: its module becomes an
    empty `PackedExperts`, and `required` has the tensors that the files must have for it, on the meta device. The other
    matrices of `names`, which are all in eight bits, are `wide`: they are widened to BF16, with a warning.
    """

    def __init__(self, meta_model: MetaModel, packing: Packing, names: Sequence[str], device: torch.device) -> None:
        self._model, self._files, self.device = meta_model.model, meta_model.experts, device
        self._parts = self._files.stacks
        self._stacks: dict[str, PackedGroupedLinear] = {}  # of those in FP8, by their names in the model
        self.required: dict[str, Tensor] = {}
        chosen = {name: packing.schemes[name] for name in names if name in packing.schemes}
        modules = find_experts(self._model) if chosen else ()
        reasons = [reason for name in modules for reason in self._swap(name, chosen)]
        casts = {stack: expert_input_cast(on.scheme, on.weight, device) for stack, on in self._stacks.items()}
        kept = (stack for stack, cast in casts.items() if cast != self._stacks[stack].scheme.inputs)
        weight_only = list(dict.fromkeys(stack.rpartition(".")[0] for stack in kept))  # the modules of these stacks
        if weight_only:
            warnings.warn(
                f"{weight_only[0]} ({plural(len(weight_only), 'such layer')}) computes with inputs that are not "
                f"quantized: {device} has no FP8 GEMM for its experts",
                stacklevel=3,
            )
        self.wide = [name for name in names if f"{name}.weight" not in self.required]
        if self.wide:
            reason = reasons[0] if reasons else "Octavo does not know the class of its module"
            warnings.warn(
                f"{self.wide[0]} ({len(self.wide)} such layers) is an expert in FP8: its weight is widened to BF16, "
                f"since {reason}",
                stacklevel=3,
            )

    def _swap(self, name: str, chosen: Mapping[str, Scheme]) -> list[str]:
        """Replace a module of experts that runs in FP8; else return why it does not."""
        module = self._model.get_submodule(name)
        stacks: dict[str, Any] = {f"{name}.{leaf}": getattr(module, leaf, None) for leaf in Experts.matrices}
        if reasons := [reason for stack, weight in stacks.items() if (reason := self._reason(stack, weight, chosen))]:
            return reasons
        for stack, weight in stacks.items():
            scheme = chosen[self._parts[stack][0]]
            tensors = scheme.tensors(self._rows(stack, weight), weight.shape[2])
            self.required |= {f"{part}.{leaf}": t for part in self._parts[stack] for leaf, t in tensors.items()}
            self._stacks[stack] = PackedGroupedLinear(weight, scheme)
        self._model.set_submodule(name, PackedExperts(*(self._stacks[stack] for stack in stacks)))
        return []

    def _reason(self, stack: str, weight: Any, chosen: Mapping[str, Scheme]) -> str:
        parts = self._parts.get(stack, [])
        found = {chosen[name].name: chosen[name] for name in parts if name in chosen}
        if not found or any(name not in chosen for name in parts):
            return "other matrices of its stack are in BF16"
        if len(found) > 1:
            return f"the matrices of its stack have several schemes ({', '.join(found)})"
        ((name, scheme),) = found.items()
        if self._rows(stack, weight) % (scheme.weight.granularity.rows or 1):
            return f"its rows do not divide into the blocks of the scheme {name}"
        return ""

    def _rows(self, stack: str, weight: Tensor) -> int:
        """The rows of one matrix in the files: a stack may hold two for each expert."""
        return weight.shape[0] * weight.shape[1] // len(self._parts[stack])

    def is_packed(self, name: str) -> bool:
        """True if `name` is a tensor of the model that belongs to a `PackedExperts`."""
        return name.rpartition(".")[0] in self._stacks

    def slower_note(self) -> str:
        """That experts were measured to be slower than BF16 on the device; "" if not, or if nothing is known."""
        for layer in self._stacks.values():  # the first of a module is that of gate and up
            _, n, k = layer.weight.shape
            if note := slower_experts_note(layer.scheme, (n, k), self.device):
                return note
        return ""

    def stack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of each `PackedExperts`, from the matrices in `tensors`, which are removed there."""
        found = {name: t for stack in self._stacks for name, t in self._buffers(stack, tensors).items()}
        for name in self.required:
            del tensors[name]
        return found

    def _buffers(self, stack: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        def stacked(leaf: str, read: Callable[[Tensor], Tensor]) -> Tensor:
            return self._files.stack(stack, lambda part: read(tensors[f"{part.removesuffix('.weight')}.{leaf}"]))

        rows = len(self.required[f"{self._parts[stack][0]}.weight"])
        # as bytes: torch.cat lacks float8 dtypes on some devices
        data = stacked("weight", lambda t: t.view(torch.uint8)).view(EXPERT_DTYPE)
        scale = stacked(SCALE_NAME, lambda t: t.view(1, 1).expand(rows, 1) if t.ndim == 1 else t)  # by row
        found = {f"{stack}.weight": data, f"{stack}.weight_scale": scale}
        if self._stacks[stack].scheme.static:  # gate and up read one input
            found[f"{stack}.input_scale"] = stacked(INPUT_SCALE_NAME, lambda t: t.view(1, 1)).amax((1, 2))
        return found


# ---- Compiling the kernels of a packed model while its files are read.
#
# A model of two layers, of the same sizes and without weights, takes prompts, and single tokens. Its kernels are
# compiled, then run, which also loads the libraries of PyTorch that the model needs. The first layer allocates the
# cache; the second stores a prompt by another kernel.


LOG = logging.getLogger(__name__)
PROMPTS = 128, 127  # tokens: Triton compiles a kernel anew for sizes that 16 does not divide
ROOMS = 2048, 1536, 1024, 768, 512, 384, 256  # of caches, on which the attention of a step depends
VOCABULARY = 256  # embeddings and output heads are not packed, so they need no kernels of ours


def small_model(meta_model: MetaModel, folder: Path) -> MetaModel | None:
    """The model with two layers at most and a small vocabulary, on the meta device; None if it does not predict the
    next token, or has experts."""
    config = dict(meta_model.config)
    if "num_hidden_layers" not in config or meta_model.experts.stacks or not is_language_model(meta_model.model):
        return None
    layers = min(2, config["num_hidden_layers"])
    config |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "pad_token_id": None}
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[:layers]
    if isinstance(meta_model.model, Decoder):
        return models.our_meta_model(config)
    return transformers_meta_model(config, folder)


@contextmanager
def compile_meanwhile(
    meta_model: MetaModel, packing: Packing, folder: Path, device: torch.device, kv_cache: str
) -> Iterator[None]:
    """Compile the kernels of a model for a GPU in another thread; at the end, wait for it.

    An error is not reported: the kernels are then compiled at their first launch.
    """
    try:
        small = small_model(meta_model, folder) if is_gpu(device) else None
        if small is not None:
            swap_linears(small.model, _packed_layers(small, packing, folder / "config.json"))
    except Exception:  # a model that cannot be that small
        small = None
    dtype = ("fp8" if packing.kv_cache else None) if kv_cache == AUTO else kv_cache
    with ThreadPoolExecutor(1) as thread:
        if small is not None:
            thread.submit(_compile, small, device, dtype, meta_model.config.get("vocab_size", VOCABULARY))
        yield


def _compile(small: MetaModel, device: torch.device, kv_cache: str | None, vocabulary: int) -> None:
    """Run the model without weights; `kv_cache` None takes its own dtype."""
    try:
        with torch.cuda.device(device):
            fuse(small.model.to_empty(device=device))
            for mode in (compile_only, nullcontext):
                with mode():
                    run(small, device, kv_cache)
                    index_of_largest(torch.zeros(1, vocabulary, dtype=torch.bfloat16, device=device))
            torch.cuda.synchronize(device)
    except Exception:  # the kernels are compiled at their first launch
        LOG.debug("kernels were not compiled while files were read", exc_info=True)
    finally:
        small.model.to("meta")  # its fused modules refer to each other: Python's collector would free them much later


@torch.inference_mode()
def run(model: MetaModel, device: torch.device, kv_cache: str | None) -> None:
    """Let the model take prompts of `PROMPTS`, and one token in caches of `ROOMS`, all cut to its context."""
    scale = torch.ones(1, device=device)
    scales = [(scale, scale)] * model.config["num_hidden_layers"] if kv_cache == "fp8" else None
    for tokens in PROMPTS:
        forward = make_forward(model.model, min(ROOMS[0], model.context), kv_cache, scales)
        Session(forward, 1, device, captures=False).prefill(pad_prompts([[0] * min(tokens, model.context)], device))
    for room in ROOMS:
        forward = make_forward(model.model, min(room, model.context), kv_cache, scales)
        forward(torch.zeros(1, 1, dtype=torch.int64, device=device))
