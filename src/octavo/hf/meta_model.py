"""The model that a config.json describes, on the meta device: its modules, without memory for its weights.

Packing learns from it which tensors are weights of linear layers, and loading which tensors the files must have.
"""

import dis
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import WIDE, ArtifactError, ShardReader, check_expert_counts, model_tensors
from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE, without_code
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.checkpoint.scheme import OTHER_NAMES, SCALE_NAME, WEIGHT_DTYPES
from octavo.hf.stored_tensors import DequantizedReader, ExpertFiles, ExpertReader, config_as_opt, open_tensors
from octavo.models import build, from_hf_config
from octavo.models.decoder import Decoder
from octavo.nn.conversion import find_experts
from octavo.nn.experts import Experts
from octavo.util import cache_argument, import_extra, plural, reading

DESCRIPTION = "a description that a model can be built from: mend the setting, or save the model again"
UNLIMITED = sys.maxsize  # the context of a model that states none, such as T5, whose positions are relative
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions", "seq_length")  # the last of Bloom
_FEW = 1000  # layers, or experts of a layer: no more are counted against the tensors, of which one may hold many


# ---- What a model takes: token ids, images, or the spectrograms of sounds.
#
# A decoder behind an encoder takes tokens too.
# The class of a model of transformers names its main input (`main_input_name`), and its configuration says how large it
# is. Everything that runs a model on prompts or on random inputs asks here.


TOKENS, IMAGES, SOUNDS = "input_ids", "pixel_values", "input_features"
DECODER_TOKENS = "decoder_input_ids"
DECODED = 8  # tokens of a decoder behind an encoder of sounds
KINDS = {TOKENS: "text", IMAGES: "images", SOUNDS: "sounds"}


def token_embedding(model: Any) -> nn.Embedding | None:
    """The single embedding of tokens of a model; None if it has none, as a model of images."""
    if isinstance(model, Decoder):
        return model.embedding
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def main_input(model: Any) -> str | None:
    """The main input of a model, which needs no weights: `TOKENS`, `IMAGES`, `SOUNDS`, or None for another."""
    if isinstance(model, Decoder):
        return TOKENS
    named = model.main_input_name
    if named == SOUNDS:
        return SOUNDS if _spectrogram(model) else None
    if token_embedding(model) is not None:
        return None if named == "input_values" else TOKENS
    return IMAGES if named == IMAGES and not model.config.is_encoder_decoder else None


def takes_both(model: Any) -> bool:
    """True if a model runs on images with text alone, as SigLIP as a whole and BLIP do."""
    beside = inspect.signature(model.forward).parameters.get(IMAGES) if token_embedding(model) else None
    required = beside is not None and beside.default is inspect.Parameter.empty
    return required or (hasattr(model, "get_image_features") and hasattr(model, "get_text_features"))


def has_decoder(model: Any) -> bool:
    """True if a model has an encoder and a decoder, which takes tokens, as T5, BART and Whisper."""
    if isinstance(model, Decoder) or not model.config.is_encoder_decoder:
        return False
    return DECODER_TOKENS in inspect.signature(model.forward).parameters


def _spectrogram(model: Any) -> tuple[int, int] | None:
    """The bands and the frames of the spectrograms that Whisper takes; None for a model that states neither."""
    bands, positions = (getattr(model.config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    # The second convolution of Whisper's encoder has a stride of 2.
    return (bands, 2 * positions) if isinstance(bands, int) and isinstance(positions, int) else None


def image_shape(model: Any) -> tuple[int, ...]:
    """The channels, the height and the width of the images that a model of transformers takes; of videos the frames
    before these, and of Siglip2, which takes patches, their number and size. An ArtifactError if its configuration does
    not state them."""
    config = getattr(model.config, "vision_config", model.config)
    keys = ("num_channels", "image_size", "num_frames", "num_patches")
    channels, size, frames, patches = (getattr(config, key, None) for key in keys)
    if size is None and isinstance(channels, int) and isinstance(patches, int):
        return patches, channels * config.patch_size**2
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(channels, int) or not isinstance(sides, Sequence) or len(sides) != 2:
        raise ArtifactError(
            f"the config.json of a {type(model).__name__} must state num_channels and image_size, got {channels!r} and "
            f"{size!r}: add those of the images that the model is to see"
        )
    return (*([frames] if isinstance(frames, int) else []), channels, int(sides[0]), int(sides[1]))


def arguments_of(model: Any, inputs: Tensor) -> dict[str, Tensor]:
    """The arguments of a model of transformers for its main input. `inputs` are token ids int64 [B, T], or images [B,
    ...] (`image_shape`) or spectrograms [B, bands, frames]. The last two get the dtype of the model.

    A decoder behind an encoder is given the same ids; behind an encoder of sounds, `DECODED` tokens that depend on
    nothing but the vocabulary.
    """
    if not inputs.is_floating_point():
        return {TOKENS: inputs} | ({DECODER_TOKENS: inputs} if has_decoder(model) else {})
    given = {model.main_input_name: inputs.to(model.dtype)} | _beside_images(model, inputs)
    embedding = token_embedding(model) if has_decoder(model) else None
    if embedding is None:
        return given
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (len(inputs), DECODED), generator=generator)
    return given | {DECODER_TOKENS: ids.to(inputs.device)}


def _beside_images(model: Any, images: Tensor) -> dict[str, Tensor]:
    """What some models take beside images: the order in which ViT-MAE and Hiera mask patches, random and the same in
    each call, and the rows and columns of Siglip2's patches."""
    named, given = inspect.signature(model.forward).parameters, dict[str, Tensor]()
    if "noise" in named:
        masking: Any = next(module for module in model.modules() if hasattr(module, "random_masking"))
        grid = getattr(masking, "mask_spatial_shape", None) or [masking.position_embeddings.shape[1] - 1]
        given["noise"] = torch.rand(len(images), math.prod(grid), generator=torch.Generator().manual_seed(0))
    if "spatial_shapes" in named:
        rows = math.isqrt(images.shape[1])
        given["spatial_shapes"] = torch.tensor([[rows, images.shape[1] // rows]] * len(images))
        given["pixel_attention_mask"] = torch.ones(images.shape[:2], dtype=torch.int64)
    return {name: tensor.to(images.device) for name, tensor in given.items()}


def random_inputs(model: Any, context: int) -> Tensor:
    """Two random inputs. Token ids int64 [2, T] have up to 32 tokens, and no more than `context`. Images and
    spectrograms (`arguments_of`) are normally distributed."""
    if takes_both(model):
        raise ArtifactError(f"a {type(model).__name__} takes images with text, and is run on neither alone")
    generator = torch.Generator().manual_seed(0)
    spectrogram = _spectrogram(model) if main_input(model) == SOUNDS else None
    embedding = token_embedding(model)
    if spectrogram is not None or embedding is None:
        return torch.randn(2, *(spectrogram or image_shape(model)), generator=generator)
    ids = torch.randint(embedding.num_embeddings, (2, min(32, context)), generator=generator)
    if has_decoder(model) and isinstance(end := model.config.eos_token_id, int):
        ids[:, -1] = end  # where classifiers such as BART's read their class
    return ids


# ---- The outputs that quality is measured on: the logits of a model that predicts tokens, else the last hidden states.


def model_outputs(
    model: Any, inputs: Tensor, logits: bool, rounds: Sequence[Callable[[Tensor, Tensor], Sequence[Tensor]]] = ()
) -> Tensor:
    """Run a model on its main input (`arguments_of`), with the keys and values of each layer rounded by its function of
    `rounds`. The result is float32: the logits [B, T, V], or without `logits` (see `predicts_tokens`) the last hidden
    states, such as [B, T, width]. A model with an encoder and a decoder gives the hidden states of its decoder."""
    part = measured_part(model, logits)
    options = {cache_argument(): _rounding_cache(rounds)} if rounds else {}
    result = part(inputs, **options) if isinstance(model, Decoder) else part(**arguments_of(model, inputs), **options)
    if isinstance(result, Tensor):
        return result.float()
    hidden = None if logits else getattr(result, "last_hidden_state", None)
    return (result.logits if hidden is None else hidden).float()  # some classifiers have no part below their head


def _rounding_cache(rounds: Sequence[Callable[[Tensor, Tensor], Sequence[Tensor]]]) -> Any:
    """An empty cache of transformers. Each layer stores keys and values as its function of `rounds` gives them."""
    from transformers.cache_utils import Cache, DynamicLayer

    def rounded(store: Any, round_both: Any, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return store(*round_both(k, v))

    layers = [DynamicLayer() for _ in rounds]
    for layer, round_both in zip(layers, rounds, strict=True):
        layer.update = partial(rounded, layer.update, round_both)
    return Cache(layers=layers)


def measured_part(model: Any, logits: bool) -> Any:
    """The module whose outputs are measured: the model, or without `logits` the part below its head that takes its
    input, which the `base_model` of DINOv3 does not."""
    part = model if logits else getattr(model, "base_model", model)
    if part is model and not logits and not has_decoder(model):  # a classifier of sounds gives a few numbers
        part = getattr(model, "encoder", model)
    return part if part is model or model.main_input_name in inspect.signature(part.forward).parameters else model


def is_language_model(model: Any) -> bool:
    """True if a model predicts the next token of its input: any of `octavo.models`, and of transformers by the name of
    its class. The model needs no weights. Training, which has them, asks `is_causal` below."""
    if isinstance(model, Decoder):
        return True
    return names_language_model((*(model.config.architectures or ()), type(model).__name__)[0])


def names_language_model(architecture: str) -> bool:
    """True if a class of transformers, such as "LlamaForCausalLM", predicts the next token."""
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))


def predicts_tokens(model: Any) -> bool:
    """True if a model gives logits of tokens: a language model, also of images and text, or an encoder and a decoder
    with an output head."""
    if is_language_model(model):
        return True
    return (has_decoder(model) or model.can_generate()) and model.get_output_embeddings() is not None


# ---- The model that a config.json describes.


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model of `octavo.models` or of transformers on the meta device, in BF16, or float32 where it is kept."""

    model: nn.Module
    config: Mapping[str, Any]  # the parsed config.json; of a GPT-2 of transformers, that of the OPT it is read as
    positions: int  # the number of tokens that the model can see; `UNLIMITED` if it states none
    experts: ExpertFiles  # the names of its tensors in files

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes that the tensors of the unpacked model have, by name."""
        return {name: tensor.dtype for name, tensor in model_tensors(self.model).items()}

    @property
    def takes_text(self) -> bool:
        """True if the main input of the model is token ids."""
        return main_input(self.model) == TOKENS

    @property
    def context(self) -> int:
        """The number of tokens that the model can see. An ArtifactError if it takes no text."""
        self.require_text()
        return self.positions

    def require_text(self) -> nn.Embedding:
        """The token embedding. An ArtifactError, which says what to do, if the model takes anything else."""
        embedding, both = token_embedding(self.model), takes_both(self.model)
        kind = "images with text" if both else KINDS[main_input(self.model) or TOKENS]
        if embedding is None or not self.takes_text or both:
            raise ArtifactError(
                f"a {type(self.model).__name__} takes {kind}, and octavo calibrate, --freeze, --budget and --data run "
                "a model on text: leave them out. For the scheme static, octavo.scales.freeze_scales("
                f"octavo.load(FOLDER), batches) finds scales on batches of {kind}, and octavo.packing.pack(..., "
                "input_scales=scales) stores them"
            )
        return embedding

    def kept_wide(self, names: Iterable[str]) -> list[str]:
        """The linear layers among `names`, in the model or in files, that run in no eight bits. The model keeps them in
        float32 where it runs in float16, or its code reads the dtype of their weight, as of `wo` of T5."""
        model: Any = self.model
        keys = getattr(model, "_keep_in_fp32_modules", None) or ()
        read = [f"{name}.{leaf}".lstrip(".") for name, m in model.named_modules() for leaf in dtypes_read(m.__class__)]
        read += [self.file_name(name) for name in read]
        return [n for n in names if n in read or any(re.search(rf"(^|\.){key}(\.|$)", n) for key in keys)]

    def leave_out(self, found: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """`found`, by the names of tensors in files, without those that the model lacks and its class of transformers
        tells loading to ignore, such as of DeepSeek-V3's layer for a second token; and what to say of them, or ""."""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ignored = [name for name in found if any(re.search(pattern, name) for pattern in patterns)]
        needed = self.experts.split(model_tensors(self.model)) if ignored else {}
        modules = {name.rpartition(".")[0] for name in needed}
        left = dict.fromkeys(name for name in ignored if name.rpartition(".")[0] not in modules)
        said = f"{next(iter(left), '')} ({plural(len(left), 'such tensor')}) has no place in the model, and is left out"
        return {name: each for name, each in found.items() if name not in left}, said if left else ""

    def file_name(self, layer: str) -> str:
        """The name that a linear layer of the model has in files."""
        return self.experts.file_name(f"{layer}.weight").removesuffix(".weight")

    def linears(self) -> list[str]:
        """The linear layers, by their names in files."""
        return [self.file_name(name) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]


def read_meta_model(config: Mapping[str, Any], folder: Path) -> MetaModel:
    """The model of `octavo.models` that `our_meta_model` finds, else that of `transformers_meta_model`."""
    check_counts(config, folder)
    try:
        with reading(folder / "config.json", DESCRIPTION):
            ours = our_meta_model(config)
    except ValueError:  # the architecture is ours, a feature of it is not
        ours = None
    return ours or transformers_meta_model(config, folder)


def our_meta_model(config: Mapping[str, Any]) -> MetaModel | None:
    """The model of `octavo.models` that a parsed config.json describes; None if its architecture is not there. A
    ValueError if it is there, and a feature of it is not."""
    found = from_hf_config(config)
    if found is None:
        return None
    with torch.device("meta"):
        model = build(found).to(UNQUANTIZED_DTYPE).eval()
    return MetaModel(model, config, found.context, ExpertFiles(model))


def transformers_meta_model(config: Mapping[str, Any], folder: Path) -> MetaModel:
    """The model of transformers that the parsed config.json of `folder` describes, a GPT-2 as OPT. Its class is the one
    in `architectures`, or a causal language model if that names none. An ArtifactError if transformers does not build
    it, or if the model cannot run (`check_counts`, `main_input`)."""
    where = folder / "config.json"
    transformers = import_extra("transformers", "hf", f"{where} describes a model that runs through transformers")
    with reading(where, DESCRIPTION, ArtifactError):
        config = config_as_opt(config, where)
        if (kind := config.get("model_type")) not in transformers.CONFIG_MAPPING:
            raise ArtifactError(
                f"{where} has model_type {kind!r}, which transformers {transformers.__version__} does not implement, "
                "and octavo runs no code of a model folder (auto_map): upgrade transformers, or use another model"
            )
        check_counts(config, folder)
        check_expert_counts(config, str(where))
        settings = without_code(dict(config)) | {"name_or_path": str(folder)}  # a copy: transformers edits it
        # transformers 5 writes the number Infinity as {"__float__": "Infinity"}.
        decode = getattr(transformers.PretrainedConfig, "_decode_special_floats", dict)
        described = transformers.AutoConfig.for_model(**decode(settings))
        model = _model(transformers, described)
        if model is None and not described.architectures:
            raise ArtifactError(f"{where} must state architectures, the class of a model that is not causal: add it")
        if model is None:
            raise ArtifactError(
                f"{where} describes a {described.architectures[0]}, whose inputs Octavo does not know: it packs and "
                "loads language models, models with an encoder and a decoder, and encoders of text or images (Llama, "
                "T5, Whisper, BERT, ViT, ...). octavo.convert trains other models, which are saved in BF16"
            )
        usual = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(described), type(model))
        if is_language_model(model) and type(described) is not model.config_class and not isinstance(model, usual):
            said = f"model_type {kind!r} stands for {usual.__name__}, and architectures has {type(model).__name__}"
            raise ArtifactError(f"{where}: {said}: programs follow one or the other, mend the wrong one")
        return MetaModel(model.eval(), config, stated_positions(model), ExpertFiles(model))


def stated_positions(model: Any) -> int:
    """The tokens that a model can see; `UNLIMITED` if its config.json states none, as Bloom's and Mamba's."""
    text = model.config.get_text_config()
    stated = next((n for name in POSITIONS if isinstance(n := getattr(text, name, None), int)), -1)
    if stated == -1:  # as XLNet states it
        return UNLIMITED
    # In RoBERTa no token takes the positions up to that of the padding.
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    paddings = (t.padding_idx for t in tables if isinstance(t, nn.Embedding) and t.padding_idx is not None)
    return stated - (next(paddings, -1) + 1)


@cache
def dtypes_read(cls: Any) -> list[str]:
    """The submodules whose `weight.dtype` is read by the code of the forward pass of `cls`, a class of modules. Such
    code casts an input to it, which must not be that of eight bits."""
    code = [(each.opname, each.argval) for each in dis.get_instructions(inspect.unwrap(cls.forward))]
    read = [("LOAD_ATTR", "weight"), ("LOAD_ATTR", "dtype")]
    return [name for i, (load, name) in enumerate(code) if load == "LOAD_ATTR" and code[i + 1 : i + 3] == read]


def _model(transformers: Any, config: Any) -> Any:
    """The model of transformers on the meta device; None if its main input is unknown."""
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if named is None and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if hasattr(config, "rescale_every"):  # RWKV would divide weights in place, which only float16 needs
        config.rescale_every = 0
    make = transformers.AutoModelForCausalLM.from_config if named is None else named._from_config
    with torch.device("meta"):
        model: Any = make(config, dtype=UNQUANTIZED_DTYPE)
    if main_input(model) is None:
        return None
    # Such as the biases of DeepSeek's routers.
    wide = "|".join(model._keep_in_fp32_modules_strict or ()).replace("*", ".*")
    for name, tensor in model_tensors(model).items() if wide else ():
        if re.search(wide, name):
            tensor.data = tensor.data.float()
    return model


def check_counts(config: Mapping[str, Any], folder: Path) -> None:
    """Raise an ArtifactError if config.json states more layers or experts than the files of `folder` have tensors. For
    a number that is far too large, the modules would take all memory before a tensor is missed."""
    key, count = max(_counts(config), key=lambda stated: stated[1], default=("", 0))
    if count <= _FEW:
        return
    try:
        tensors = len(ShardReader(folder).specs)
    except FileNotFoundError:  # of a run: the files are elsewhere
        tensors = _FEW
    if count > tensors:
        raise ArtifactError(
            f"{folder / 'config.json'}: {key} must be at most the number of tensors, {tensors:,}; got {count:,}"
        )


def _counts(described: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in described.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif re.search(r"(layers?|experts|depths?|blocks)$", key):
            stated = value if isinstance(value, list) else [value]
            yield from ((key, number) for number in stated if isinstance(number, int))


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For the name of each parameter, all names of it."""
    names: dict[Tensor, list[str]] = {}  # tensors as keys compare by identity
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name: group for group in names.values() for name in group}


def compute_buffers(model: Any, device: torch.device | str) -> None:
    """Let transformers compute, on `device`, the buffers that no file holds (rotary frequencies), as its own loading
    does; an ArtifactError if it does not. It initializes parameters too, so call this before any of them is filled."""
    for module, name in _left_poisoned(model, model, device):
        raise ArtifactError(f"transformers computes no {name} of {type(module).__name__}: this model cannot run")


def _left_poisoned(module: nn.Module, model: Any, device: torch.device | str) -> list[tuple[nn.Module, str]]:
    """The buffers in `module` that transformers does not compute. The model in `model` that is nearest to a module
    computes its buffers; where it does not, those of FalconH1Mixer, it computes them with those of a module above."""
    model = module if hasattr(module, "_init_weights") else model
    left = [each for child in module.children() for each in _left_poisoned(child, model, device)]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
            poison = torch.nan if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, poison, device=device)
            left.append((module, name))
    if left:
        if not all(parameter.is_meta for parameter in module.parameters()):
            raise RuntimeError(f"{type(module).__name__} would be initialized again: compute its buffers first")
        model._init_weights(module)
    return [(owner, name) for owner, name in left if owner.get_buffer(name).isnan().any()]


def fill_model(meta_model: MetaModel, tensors: Mapping[str, Tensor]) -> Any:
    """The model with `tensors`, by their names in it. They are not copied, and none requires a gradient. Buffers that
    no file holds are on the CPU. An ArtifactError if `tensors` lacks one that transformers does not compute."""
    model: Any = meta_model.model
    compute_buffers(model, "cpu")
    tied = tied_names(model)  # all names: transformers may take the one that the files lack
    every = {each: tensor for name, tensor in tensors.items() for each in tied.get(name, [name])}
    model.load_state_dict(every, strict=False, assign=True)  # strict: a buffer that is computed is not stored
    model.tie_weights()
    if left := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]:
        raise ArtifactError(f"{left[0]} of {type(model).__name__} is in no file: this model cannot run here")
    return model.requires_grad_(False)


# ---- The tensors of a model folder under the names that they have in the model.
#
# transformers renames the tensors of some models as it loads them, by its mapping (`transformers.conversion_mapping`):
#
#     in the files   vit.encoder.layer.0.attention.attention.query.weight
#     in the model   vit.layers.0.attention.q_proj.weight
#
# Tensors that the mapping also stacks are read by `octavo.hf.stored_tensors`, and those that it splits are not read.


def open_model_files(folder: Path, config: Mapping[str, Any], meta_model: MetaModel) -> ShardReader:
    """The tensors in `folder` by their names in `meta_model`, which its `config` describes as it is stored; a tensor
    that the model does not have keeps its name. Packed weights are widened. The errors are those of `ShardReader`, and
    of `PackedTensors` or `check_unpacked`, and of tensors that the model ties and the files hold apart."""
    packed = bool(config.get("quantization_config"))
    reader = DequantizedReader(PackedTensors(folder)) if packed else open_tensors(folder, config)
    check_unpacked(reader)
    for names in tied_names(meta_model.model).values():
        first, *others = [name for name in names if name in reader.specs] or names[:1]
        for name in others:
            one, other = reader.get(first), reader.get(name)
            wide = torch.promote_types(one.dtype, other.dtype)
            if not torch.equal(one.to(wide), other.to(wide)):
                raise ArtifactError(untied(folder, first, name))
    if meta_model.experts.stacks:
        return ExpertReader(reader, meta_model.experts)
    named = isinstance(meta_model.model, Decoder) or model_tensors(meta_model.model).keys() <= reader.specs.keys()
    return reader if named else RenamedReader(reader, meta_model.model)


def untied(folder: Path, first: str, other: str) -> str:
    """The message for two tensors of files that are one in the model: transformers takes both of them."""
    differ = f"{folder} holds {first} and {other}, which differ, and its config.json ties them"
    return f"{differ}: set tie_word_embeddings to false there, or remove one of the tensors"


def check_unpacked(reader: ShardReader) -> None:
    """Raise an ArtifactError if tensors look packed, though config.json states no quantization: codes that are read
    without their scales are a model of noise."""
    scales = (SCALE_NAME, *(name for name, ours in OTHER_NAMES.items() if ours == SCALE_NAME))
    for name, spec in reader.specs.items():
        is_scale = name.endswith(scales)
        if is_scale or spec.dtype in WEIGHT_DTYPES or (name.endswith(".weight") and spec.dtype not in WIDE):
            found = "is the scale of a packed weight" if is_scale else f"is {spec.dtype}"
            raise ArtifactError(
                f"{reader.folder}: {name} {found}, and config.json states no quantization: give a model in BF16, FP16 "
                "or FP32, or restore the quantization_config of the packed one"
            )


class RenamedReader(ShardReader):
    """The tensors of another reader by their names in a model of transformers; by their own if two had one name."""

    def __init__(self, reader: ShardReader, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key

        self.folder, self._reader = reader.folder, reader
        rules = [rule for rule in get_model_conversion_mapping(model) if not hasattr(rule, "operations")]
        self._from = {rename_source_key(name, rules, [])[0]: name for name in reader.specs}
        if len(self._from) < len(reader.specs):
            self._from = {name: name for name in reader.specs}
        # The files name a tensor by any of its names, and a model by the first: XLM-RoBERTa's is that of the head.
        for first, *others in tied_names(model).values():
            stored = [name for name in others if name in self._from]
            if first not in self._from and stored:
                self._from[first] = self._from.pop(stored[0])
        self.specs = {new: reader.specs[name] for new, name in self._from.items()}

    def get(self, name: str) -> Tensor:
        return self._reader.get(self._from[name])


# ---- The matrices of each expert of a model of transformers, by their names in its files.


class ExpertMatrices(NamedTuple):
    """The names of an expert's matrices in the files: y = down(act(gate(x)) * up(x))."""

    gate: str
    up: str
    down: str


def expert_matrices(meta_model: MetaModel) -> dict[str, list[ExpertMatrices]]:
    """The experts of each module of the model whose mathematics is known, by number."""
    stacks, found = meta_model.experts.stacks, {}
    for name in find_experts(meta_model.model) if stacks else ():
        inner, outer = (stacks.get(f"{name}.{leaf}", []) for leaf in Experts.matrices)
        if outer and len(inner) == 2 * len(outer):
            gates, ups = inner[: len(outer)], inner[len(outer) :]  # the gates of all experts come first
            found[name] = [ExpertMatrices(*each) for each in zip(gates, ups, outer, strict=True)]
    return found


# ---- transformers without its progress bars and messages, for work that reports its own progress.


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars and all messages but errors. Both are as before when the block ends."""
    logging = import_extra("transformers.utils.logging", "hf", "the models here are those of transformers")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# ---- Finding out if a language model is causal, from its logits and not from its name.
#
# In an encoder the logits of a token depend on the later ones too, so that training on the next one sees the answer.


_TOLERANCE = 1e-5  # of the largest logit: float32 rounding is about 1e-7, the effect of attention about 1e-3


@torch.no_grad()
def is_causal(model: nn.Module, vocabulary: int) -> bool:
    """True if the logits of a token stay the same when the last token of the sequence changes. Runs `model` twice, in
    evaluation mode, on one sequence of 8 tokens below `vocabulary`. Call this before `octavo.convert`: the model must
    compute in float32, and quantization with one scale for a tensor makes every logit depend on every token."""
    device = next(model.parameters()).device
    tokens = torch.arange(8, device=device)[None] % vocabulary  # [1, T]
    other = tokens.clone()
    other[0, -1] = (tokens[0, -1] + vocabulary // 2) % vocabulary
    training = model.training
    model.eval()
    try:
        outputs = (model(ids) for ids in (tokens, other))
        before, after = (getattr(output, "logits", output)[0].float() for output in outputs)
    finally:
        model.train(training)
    allowed = _TOLERANCE * float(before.abs().max())
    return bool((before[:-1] - after[:-1]).abs().max() <= allowed)
