"""From a packed folder to a model that computes with its weights. Every file is checked before it is used."""

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.artifact.files import ArtifactError, model_tensors, read_json
from octavo.artifact.numbers import failing
from octavo.artifact.packed.kv_scales import KvScales
from octavo.artifact.packed.layouts import Packing, check_tensors, read_config, read_packing
from octavo.artifact.packed.plausible import reciprocal_warning, suspected
from octavo.artifact.packed.scales import unused_scales
from octavo.artifact.packed.scheme import WEIGHT_DTYPES, Scheme
from octavo.artifact.safetensors_files import ShardReader
from octavo.device import choose_device
from octavo.generation.engine import AUTO
from octavo.hf.meta_model import MetaModel, fill_model, read_meta_model
from octavo.kv_cache.model import Pairs, pairs_in_order
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.ops.checks import FLOATS
from octavo.runtime.compiling import compile_meanwhile, small_model
from octavo.runtime.expert_loading import ExpertLoading
from octavo.runtime.fnuz import scheme_on, use_formats_of
from octavo.runtime.fused import fuse
from octavo.runtime.gemm_path import weight_only_note, widened_note
from octavo.runtime.packed_linear import PackedLinear, swap_linears
from octavo.runtime.scheme_speeds import slower_note
from octavo.runtime.widening import widen_layers
from octavo.words import plural


class Loaded(NamedTuple):
    """A packed model, ready to run: `context` is the number of tokens it can see, and `kv_scales` are the scales of its
    keys and values, a pair for each layer, if the folder has them."""

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    kv_scales: Pairs | None = None


def load_packed(folder: str | Path, device: str | torch.device = "cpu") -> Loaded:
    """Open a packed folder. Only its files are read, and none of them is a pickle.

    Args:
        folder: a folder that `octavo pack` wrote.
        device: for the model; "auto" takes the GPU if there is one.

    Returns:
        The model in evaluation mode (a `Llama` or `GPT2` of ours, or a model of transformers), its tokenizer, and its
        context. The packed layers are `PackedLinear`, everything else is BF16.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ArtifactError: a file is damaged or does not fit; the message names the tensor or the setting.
        ValueError: the device does not exist.
        ImportError: the architecture needs transformers, which is not installed.
    """
    place = choose_device(device)
    path = Path(folder)
    return fill_packed(read_meta_model(read_config(path), path), path, place)


def fill_packed(meta_model: MetaModel, folder: Path, device: torch.device) -> Loaded:
    """The model of the packed `folder`, whose config `meta_model` is of, with its tokenizer."""
    model, kv_scales = fill(meta_model, folder, device)
    return Loaded(model, load_tokenizer(folder), meta_model.context, kv_scales)


def fill(
    meta_model: MetaModel, folder: Path, device: torch.device, kv_cache: str = AUTO
) -> tuple[nn.Module, Pairs | None]:
    """Fill `meta_model`, whose config is that of the packed `folder`, on `device`, and fuse its norms and MLPs.

    While the files are read, the kernels of the model are compiled, for a cache of the dtype `kv_cache`.

    Returns:
        The model, and the scales of its keys and values, a pair for each layer; None if the folder has none.
    """
    where = folder / "config.json"
    disks = meta_model.linears()
    unpacked = meta_model.split_experts(model_tensors(meta_model.model))
    reader = ShardReader(folder)
    experts = ExpertLoading(meta_model, reader, device)
    packing = read_packing(meta_model.config, [*disks, *experts.names], where, _plain(disks, reader))
    swap_linears(meta_model.model, _packed_layers(meta_model, packing, where))
    kept = [name for name in meta_model.kept_wide(disks) if name in packing.schemes]
    experts.swap(packing)
    # The stacks of experts need room beside their parts, which a GPU may lack.
    place = torch.device("cpu") if meta_model.experts is not None else device
    with _compiling(meta_model, packing, folder, device, kv_cache):
        tensors, kv_scales = _read_tensors(packing, reader, disks, place)
    experts.widen(tensors)
    widen_layers(tensors, kept, packing.schemes)
    if kept:
        warnings.warn(
            f"{folder}: {kept[0]} ({plural(len(kept), 'such layer')}) is packed, and its weight is widened to BF16: "
            "transformers runs such layers of this class in no eight bits. octavo pack leaves them in BF16",
            stacklevel=2,
        )
    others = {name: t for name, t in model_tensors(meta_model.model).items() if not experts.is_packed(name)}
    required = meta_model.split_experts(others) | experts.required
    check_tensors(_in_dtypes(tensors, unpacked), required, folder)
    stacks = experts.stack(tensors)
    model: nn.Module = fill_model(meta_model, meta_model.stack_experts(tensors) | stacks)
    _check_scales(model, folder)
    use_formats_of(model, device)
    of_experts = set(experts.names)
    linears = {name: scheme for name, scheme in packing.schemes.items() if name not in of_experts}
    schemes = Counter(scheme_on(scheme, device) for scheme in linears.values())
    slower = slower_note(schemes, device) or widened_note(schemes, device)
    for note in filter(None, (weight_only_note(schemes, device), slower, experts.slower_note())):
        warnings.warn(f"{folder}: {note}", stacklevel=2)
    model.to(device)
    fuse(model)
    return model, pairs_in_order(kv_scales) or None


def _compiling(
    meta_model: MetaModel, packing: Packing, folder: Path, device: torch.device, kv_cache: str
) -> AbstractContextManager[None]:
    """A context in which the kernels of the model are compiled, on a GPU."""
    if device.type != "cuda":
        return nullcontext()
    try:
        small = small_model(meta_model, folder)
        if small is None:
            return nullcontext()
        swap_linears(small.model, _packed_layers(small, packing, folder / "config.json"))
    except Exception:  # a model that cannot be that small: its kernels are compiled at their first launch
        return nullcontext()
    dtype = ("fp8" if packing.kv_cache else None) if kv_cache == AUTO else kv_cache
    return compile_meanwhile(small, device, dtype)


def _plain(disks: list[str], reader: ShardReader) -> set[str]:
    """The linear layers without a weight in eight bits; a tied head has no weight of its own."""
    specs = {disk: reader.specs.get(f"{disk}.weight") for disk in disks}
    return {disk for disk, spec in specs.items() if spec is None or spec.dtype not in WEIGHT_DTYPES}


def _read_tensors(
    packing: Packing, reader: ShardReader, disks: list[str], device: torch.device
) -> tuple[dict[str, Tensor], KvScales]:
    """Every tensor that the model takes, on `device`, by its name in the files, with scales as `PackedLinear` holds
    them; and the scales of keys and values."""
    tensors = packing.from_files(reader.get_all(device))
    kv_scales = packing.take_kv_scales(tensors, disks, reader.folder)
    unused = unused_scales(tensors, tensors.__getitem__, reader.folder)
    for name in unused:
        del tensors[name]
    if unused:
        warnings.warn(
            f"{reader.folder}: {unused[0]} ({len(unused)} such tensors) is a scale that Octavo does not use",
            stacklevel=2,
        )
    return tensors, kv_scales


def _in_dtypes(tensors: dict[str, Tensor], unpacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors that are not packed the dtypes of the `unpacked` model: other programs write float16 and float32."""
    for name, tensor in tensors.items():
        if name in unpacked and tensor.dtype in FLOATS:
            tensors[name] = tensor.to(unpacked[name].dtype)
    return tensors


def _check_scales(model: nn.Module, folder: Path) -> None:
    """Warn if weights multiplied by their scales are far larger than those of a trained model."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    weights = {name: layer.scheme.packed_weight(layer.weight, layer.weight_scale) for name, layer in layers.items()}
    if not failing({name: weight.scale.float().median() <= 1 for name, weight in weights.items()}):
        return  # none is suspect; this waits once for the device
    if names := suspected((name, weight.scale, weight.dequantize) for name, weight in weights.items()):
        warnings.warn(f"{folder}: {reciprocal_warning(names, len(layers))}", stacklevel=2)


def end_tokens(folder: str | Path) -> frozenset[int]:
    """The tokens that end a text, as the folder's generation_config.json or config.json declares them."""
    found: Any = None
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if found is None and path.is_file():
            found = read_json(path).get("eos_token_id")
    return frozenset(() if found is None else [found] if isinstance(found, int) else found)


def _packed_layers(meta_model: MetaModel, packing: Packing, where: Path) -> dict[str, Scheme]:
    """The packed linear layers of the model that run in eight bits, with their schemes."""
    linears = {name: m for name, m in meta_model.model.named_modules() if isinstance(m, nn.Linear)}
    schemes = {name: packing.schemes.get(meta_model.file_name(name)) for name in linears}
    wide = meta_model.kept_wide(linears)
    packed = {name: scheme for name, scheme in schemes.items() if scheme is not None and name not in wide}
    for name, scheme in packed.items():
        if reason := scheme.unreadable(linears[name].out_features, linears[name].in_features):
            raise ArtifactError(f"{where}: {name}.weight: {reason}")
    return packed
