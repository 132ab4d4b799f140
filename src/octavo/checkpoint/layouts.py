"""The packed folder: a model with linear weights in eight bits, in a form that Hugging Face's libraries open.

docs/format.md specifies its files and tensors. The layouts differ in names and in the `quantization_config`. Each is a
`Layout` in `LAYOUTS`, and nothing outside of this module asks for its name.

Every linear layer is packed unless the configuration names it as ignored. A reader takes a layer that is neither packed
nor ignored for a packed one and computes nonsense without an error. So folders are checked tensor by tensor
(`octavo.checkpoint.packed_folder`).
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.checkpoint import scheme as schemes
from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.folder import MODULES, check_config, refuse_run
from octavo.checkpoint.scheme import BLOCK, CHANNEL, SCALE_NAME, SCHEMES, STATIC, Groups, Layout, Scheme
from octavo.numerics import TENSOR
from octavo.util import reading
from octavo.version import __version__

EXPERT_DTYPE = torch.float8_e4m3fn
UNQUANTIZED_DTYPE = torch.bfloat16
_CHOOSES_CODE = (
    "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation", "auto_map",
)  # fmt: skip


# ---- The settings of a `quantization_config`, compared with those that are required.


# Fields of other writers that no reader needs.
_REMARKS = (
    "version", "observer", "observer_kwargs", "ignore", "format", "config_groups", "targets",
    "modules_to_not_convert", "ignored_layers", "exclude_modules", "producer", "fmt", "zp_dtype",
    "global_compression_ratio", "dequantize",
)  # fmt: skip


def differences(found: Mapping[str, Any], required: Mapping[str, Any], path: str) -> list[str]:
    """The fields in which `found` differs from `required`, except empty ones (None, "", []) that are not required."""
    wrong = []
    for key in [*required, *(key for key in found if key not in required)]:
        value, wanted = found.get(key), required.get(key)
        if isinstance(wanted, dict) and isinstance(value, dict):
            wrong += differences(value, wanted, f"{path}.{key}")
        elif key not in _REMARKS and (key in required or value) and value != wanted:
            wrong.append(f"{path}.{key} is {value!r}, required {wanted!r}")
    return wrong


def check_settings(found: Mapping[str, Any], required: Mapping[str, Any], where: Path) -> None:
    """Raise an ArtifactError that lists where the `quantization_config` `found` differs from `required`."""
    if wrong := differences(found, required, "quantization_config"):
        raise ArtifactError(f"{where}: octavo does not run this packing, pack the model in BF16: {'; '.join(wrong)}")


def listed_modules(layout: Layout, found: Mapping[str, Any], where: Path) -> list[str]:
    """The modules that a `quantization_config` lists as unpacked, norms and patterns among them. An ArtifactError if it
    is no list of names."""
    key = next((key for key in layout.ignore if found.get(key)), layout.ignore[0])
    listed = found.get(key) or []
    if not are_names(listed):
        raise ArtifactError(f"{where}: quantization_config.{key} must be a list of module names, got {listed!r}")
    return list(listed)


def are_names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def is_named(entry: str, name: str, *, exact: bool) -> bool:
    """True if `entry`, of a list of modules, names the module `name`.

    An entry "re:..." is a regular expression. With `exact` any other entry is a whole name. Without it, the entry may
    also be the name of a parent module, the last parts of the name, or a glob.
    """
    if entry.startswith("re:"):
        with reading(entry, "a regular expression, as an entry of quantization_config must be", ArtifactError):
            return re.match(entry.removeprefix("re:"), name) is not None
    if exact or entry == name:
        return entry == name
    return name.startswith(f"{entry}.") or name.endswith(f".{entry}") or fnmatchcase(name, entry)


# ---- The layout compressed-tensors: any scheme, and several in one model (github.com/vllm-project/compressed-tensors).
#
# Each scheme is one of the `config_groups`. `kv_cache_scheme` declares the scales of keys and values, if there are any.
# Older writers state no `quantization_status`, write blocks as "128x128", and describe a sparsity that a dense model
# does not have.


EXPERTS = r"re:.*\.experts\..*"  # every expert of a mixture, by its name in the files
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_FLOAT_SCALES = ("torch.float32", "torch.bfloat16", "torch.float16")
_REQUIRED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def is_expert(name: str) -> bool:
    """True if a layer is an expert of a mixture, by its name in the files."""
    return re.match(EXPERTS.removeprefix("re:"), name) is not None


class CompressedTensors(Layout):
    name, needs, exact, experts = "compressed-tensors", "compressed-tensors", True, EXPERTS
    cache, smaller_blocks = KV_CACHE_SCHEME, False
    # sentence-transformers calls a part of the model, and transformers widens weights in a hook of the whole. With this
    # it widens them as it loads them, by the arguments of one group for all.
    in_parts: ClassVar[Mapping[str, Any]] = {"dequantize": True}

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        used = {scheme.name: scheme for scheme in schemes.values()}
        layers = {used[name]: [layer for layer, scheme in schemes.items() if scheme.name == name] for name in used}
        targets = {scheme: ["Linear"] if len(layers) == 1 else names for scheme, names in layers.items()}
        formats = {scheme.format for scheme in layers}
        if any(scheme.integers for scheme in layers):
            _point_at_experts(targets, schemes, ignore)
        return {
            **_REQUIRED,
            "kv_cache_scheme": dict(KV_CACHE_SCHEME) if kv_cache else None,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": {f"group_{i}": scheme.group(names) for i, (scheme, names) in enumerate(targets.items())},
            "ignore": list(ignore),
        }

    def read(self, found: Mapping[str, Any], where: Path) -> Groups:
        # A status that is null and the sparsity of a dense model mean nothing.
        said = {key: value for key, value in found.items() if key != "quantization_status" or value is not None}
        sparsity = said.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format") in (None, "dense"):
            del said["sparsity_config"]
        check_settings({**_REQUIRED, **said}, _REQUIRED, where)
        formats = {scheme.format for scheme in SCHEMES.values()} | {"mixed-precision", "naive-quantized"}
        if found.get("format") not in formats:
            raise ArtifactError(f"{where}: format is {found.get('format')!r}, octavo runs {', '.join(sorted(formats))}")
        return _groups(found, where)

    def renew(self, config: dict[str, Any], folder: Path) -> None:
        if isinstance(older := config.pop("compression_config", None), dict):  # the name of 2024
            config.setdefault("quantization_config", {"quant_method": self.name, **older})

    def check_experts(self, schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> None:
        # transformers multiplies the weight of an expert by its scale element by element, which a scale for each of
        # several blocks does not fit. Groups do not fit either, and no layout that it opens holds those.
        for name, scheme in schemes.items():
            in_blocks = scheme is BLOCK and scheme.weight.granularity.scale_shape(shapes[name]) != (1, 1)
            if in_blocks and is_expert(name):
                raise ValueError(
                    f"{name}: transformers opens experts by {scheme.name} in the layout fp8 alone: --layout fp8, with "
                    "every layer by block, or experts by channel (--layer '*.experts.*=channel')"
                )


def _point_at_experts(targets: dict[Scheme, list[str]], schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> None:
    """Add a pattern of experts to `targets`. transformers loads all experts, packed or not, by the first group with
    such a pattern, or else by the first group. By a group of integers it loads none."""
    packed = next(filter(is_expert, schemes), None)
    if packed is not None:
        targets[schemes[packed]].append(f"re:{re.escape(packed)}$")
    elif EXPERTS in ignore or any(map(is_expert, ignore)):
        targets.setdefault(CHANNEL, []).append(EXPERTS)


def _groups(found: Mapping[str, Any], where: Path) -> Groups:
    path, groups = "quantization_config.config_groups", found.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        raise ArtifactError(f"{where}: {path} must hold groups, got {groups!r}")
    for name, group in groups.items():
        if not are_names(targets := group.get("targets") or []):
            raise ArtifactError(f"{where}: {path}.{name}.targets must be a list of names, got {targets!r}")
    return [(group.get("targets") or [], _scheme(group, f"{path}.{name}", where)) for name, group in groups.items()]


def _scheme(group: Mapping[str, Any], path: str, where: Path) -> Scheme:
    group = {key: _arguments(value) for key, value in group.items()}
    wrong = {scheme: differences(group, scheme.group([]), path) for scheme in (*SCHEMES.values(), *schemes.WEIGHT_ONLY)}
    closest = min(wrong, key=lambda scheme: len(wrong[scheme]))
    if wrong[closest]:
        raise ArtifactError(
            f"{where}: this is none of the schemes that octavo runs ({', '.join(SCHEMES)}); nearest is {closest.name}, "
            f"but {'; '.join(wrong[closest])}"
        )
    return closest


def _arguments(value: Any) -> Any:
    """The arguments of a cast in the newest spelling, with defaults. A float scale has the dtype of its tensor."""
    if not isinstance(value, dict):
        return value
    said = {"dynamic": False, "symmetric": True} | {
        key: held for key, held in value.items() if key != "scale_dtype" or held not in _FLOAT_SCALES
    }
    if isinstance(blocks := said.get("block_structure"), str):
        said["block_structure"] = [int(size) for size in blocks.split("x") if size.isdigit()]
    return said


# ---- The layout fp8: 128 x 128 blocks, in the names of DeepSeek-V3 and transformers' FineGrainedFP8Config.
#
# Others write scales that are powers of two, those of inputs too (DeepSeek), or one scale a tensor (transformers).
#
# `weight_scale_inv` multiplies, as every scale does. transformers leaves output heads unpacked even if the list of
# unpacked layers lacks them, and so does `read_packing`. AutoFP8 (github.com/neuralmagic/AutoFP8) has the same
# quant_method, no weight_block_size, and other names of scales. It is refused.


_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_POW2, _WHOLE = _BLOCKS | {"scale_fmt": "ue8m0"}, _BLOCKS | {"weight_block_size": None}
_MADE = {"scale_fmt": "float", "expert_dtype": "fp8"}  # where a folder does not state them
_VARIANTS: dict[Scheme, dict[str, Any]] = {
    BLOCK: _MADE | _BLOCKS,
    schemes.BLOCK_POW2: _MADE | _POW2,
    schemes.MX: _MADE | _POW2 | {"weight_block_size": [1, 32]},
    schemes.TENSORWISE: _MADE | _WHOLE,
    STATIC: _MADE | _WHOLE | {"activation_scheme": "static"},
}


class Fp8(Layout):
    name, needs = "fp8", "accelerate"
    schemes = (BLOCK.name,)
    ignore = ("modules_to_not_convert", "ignored_layers")

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        return {**_BLOCKS, "fmt": "e4m3", "modules_to_not_convert": list(ignore)}

    def read(self, found: Mapping[str, Any], where: Path) -> Groups:
        if "weight_block_size" not in found:
            raise ArtifactError(
                f"{where}: quant_method fp8 without a weight_block_size is AutoFP8, and octavo reads the layouts "
                f"{', '.join(LAYOUTS)}: pack the BF16 model again, or write it with llm-compressor"
            )
        stated = {**_MADE, **found, "weight_block_size": found["weight_block_size"] or None}
        closest = min(_VARIANTS, key=lambda scheme: len(differences(stated, _VARIANTS[scheme], "")))
        check_settings(stated, _VARIANTS[closest], where)
        return [(["Linear"], closest)]

    def rename(self, name: str) -> str:
        return f"{name}_inv" if name.endswith(f".{SCALE_NAME}") else name

    def names_in_memory(self, name: str, kv_cache: bool) -> list[str]:
        module, _, leaf = name.rpartition(".")
        ours = schemes.OTHER_NAMES.get(leaf)
        return [f"{module}.{ours}"] if ours else super().names_in_memory(name, kv_cache)


# ---- The layout modelopt, which NVIDIA ModelOpt exports, and vLLM and TensorRT-LLM read.
#
# `quant_algo` names one scheme for the whole model. "WO" is for weights only, but vLLM casts inputs too, by 1 x 128.
#
# A folder states the scheme twice: in the `quantization_config` of config.json and, in an older spelling, in
# hf_quant_config.json. It may also have only one of the two, or the older spelling in config.json. Both spellings are
# in github.com/NVIDIA/Model-Optimizer, modelopt/torch/export/convert_hf_config.py, and vLLM reads them. Unpacked layers
# may be patterns.


SIDE_FILE = "hf_quant_config.json"
_ALGORITHMS = {"FP8": STATIC, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL, "FP8_PB_WO": BLOCK}
_STORED = {"dynamic": False, "num_bits": 8, "type": "float"}  # of weights, and of keys and values


class ModelOpt(Layout):
    name, readers, cache = "modelopt", "vLLM and TensorRT-LLM", _STORED
    schemes = tuple(scheme.name for scheme in _ALGORITHMS.values())

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        scheme = next(iter(schemes.values()), STATIC)
        (algorithm,) = (name for name, held in _ALGORITHMS.items() if held is scheme)
        inputs = {**_STORED, "dynamic": not scheme.static}
        group = {"input_activations": inputs, "weights": dict(_STORED), "targets": ["Linear"]}
        return {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "kv_cache_scheme": dict(_STORED) if kv_cache else None,
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "producer": {"name": "octavo", "version": __version__},
        }

    def side_files(self, described: Mapping[str, Any]) -> dict[str, Any]:
        settings = {
            "quant_algo": described["quant_algo"],
            "kv_cache_quant_algo": "FP8" if described["kv_cache_scheme"] else None,
            "exclude_modules": described["ignore"],
        }
        return {SIDE_FILE: {"producer": described["producer"], "quantization": settings}}

    def read(self, found: Mapping[str, Any], where: Path) -> Groups:
        algorithm = str(found.get("quant_algo")).upper()
        if algorithm not in _ALGORITHMS:
            runs = ", ".join(_ALGORITHMS)
            raise ArtifactError(f"{where}: quant_algo is {found.get('quant_algo')!r}, octavo runs {runs}")
        check_settings({**found, "quant_algo": None}, {"quant_method": "modelopt"}, where)
        return [(["Linear"], _ALGORITHMS[algorithm])]

    def renew(self, config: dict[str, Any], folder: Path) -> None:
        where, found = folder / "config.json", config.get("quantization_config")
        if found is None and (folder / SIDE_FILE).is_file():
            where = folder / SIDE_FILE
            found = read_json(where)
        # An older one may lack the quant_method, but has ModelOpt's keys.
        ours = isinstance(found, dict) and found.get("quant_method", self.name) == self.name
        if found and ours and {"quant_algo", "quantization"} & found.keys():
            config["quantization_config"] = _in_newer_spelling(found, where)

    def rename(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"{module}.{leaf[0]}_proj.{leaf}" if schemes.is_kv_scale(name) else name

    def reshape(self, scale: Tensor, name: str, scheme: Scheme | None) -> Tensor:
        leaf = name.rpartition(".")[2]
        of_tensor = scheme is not None and scheme.weight.granularity == TENSOR
        if schemes.is_kv_scale(name) or (of_tensor and leaf in (SCALE_NAME, schemes.INPUT_SCALE_NAME)):
            return scale.reshape(())
        if scheme is None or leaf != SCALE_NAME:
            return scale
        return scale[:, None, :, None] if scheme is BLOCK else scale.flatten()


def _in_newer_spelling(found: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A `quantization_config` in the spelling of `ModelOpt.describe`. `found` is hf_quant_config.json, or a
    `quantization_config` in its spelling, with or without the object `quantization`."""
    said = found.get("quantization", found)
    if not isinstance(said, dict):
        raise ArtifactError(f"{where}: `quantization` must be an object, got {said!r}")
    if said is found and not {"kv_cache_quant_algo", "exclude_modules"} & found.keys():
        return {"quant_method": "modelopt", **found}
    cache = said.get("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise ArtifactError(f"{where}: kv_cache_quant_algo is {cache!r}, octavo runs 'FP8' or none")
    return {
        "quant_method": "modelopt",
        "quant_algo": said.get("quant_algo"),
        "kv_cache_scheme": dict(_STORED) if cache else said.get("kv_cache_scheme"),
        "ignore": said.get("exclude_modules", said.get("ignore")),
    }


# ---- The layout torchao: folders that transformers writes with a `TorchAoConfig` of E4M3 weights. They are read only.
#
#     <module>._weight_qdata  e4m3 [N, K]                 read as <module>.weight
#     <module>._weight_scale  float32 [N, 1] or [1, 1]    read as <module>.weight_scale; it multiplies
#
# `quant_type.default` in the `quantization_config` is the configuration that torchao serializes. With PerTensor torchao
# scales an input by one amax, and Octavo by that of each token, which is finer. transformers packs every linear layer
# but the output head and those in `modules_to_not_convert`. Source: torchao 0.18,
# prototype/safetensors/safetensors_support.py; transformers 5, quantizers/quantizer_torchao.py.


_DYNAMIC, _WEIGHTS = "Float8DynamicActivationFloat8WeightConfig", "Float8WeightOnlyConfig"
_CONFIGURATIONS: dict[tuple[str, ...], Scheme] = {
    (_DYNAMIC, "PerRow"): CHANNEL,
    (_DYNAMIC, "PerTensor"): schemes.TENSORWISE,
    (_WEIGHTS, "PerRow"): schemes.WEIGHT,
    (_WEIGHTS, "PerTensor"): schemes.WEIGHT_ONLY[0],
}


class TorchAo(Layout):
    name, needs, written = "torchao", "torchao", False
    schemes = tuple(scheme.name for scheme in _CONFIGURATIONS.values())
    ignore = ("modules_to_not_convert",)

    def read(self, found: Mapping[str, Any], where: Path) -> Groups:
        described: Any = found.get("quant_type")
        default = described.get("default") if isinstance(described, dict) and len(described) == 1 else None
        kind, settings = (default.get("_type"), default.get("_data")) if isinstance(default, dict) else (None, None)
        settings = settings if isinstance(settings, dict) else {}
        stated = [settings.get(name) for name in ("weight_dtype", "activation_dtype")]
        dtypes = {each.get("_data") if isinstance(each, dict) else each for each in stated} - {None}
        bounds = [settings.get(f"activation_value_{end}") for end in ("lb", "ub")]
        granularity = settings.get("granularity") or {"_type": "PerRow" if kind == _WEIGHTS else "PerTensor"}
        sides = granularity if isinstance(granularity, list) else [granularity]
        kinds = {str(side.get("_type")) if isinstance(side, dict) else str(side) for side in sides}
        scheme = _CONFIGURATIONS.get((str(kind), *kinds)) if len(kinds) == 1 else None
        embeddings = found.get("include_input_output_embeddings")
        if scheme is None or dtypes - {"float8_e4m3fn"} or bounds != [None, None] or embeddings:
            raise ArtifactError(
                f"{where}: quantization_config.quant_type is {kind}, {', '.join(map(str, kinds))}, "
                f"{', '.join(map(str, dtypes))}, bounds {bounds}, embeddings {bool(embeddings)}; octavo reads one "
                f"{_DYNAMIC} or {_WEIGHTS}, PerRow or PerTensor, in float8_e4m3fn, without bounds and embeddings: "
                "pack the BF16 model with octavo pack"
            )
        return [(["Linear"], scheme)]


# ---- The layouts by their names, and a packing: a layout with the scheme of each layer.


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (CompressedTensors(), Fp8(), ModelOpt(), TorchAo())}
HOLDS_ANY = CompressedTensors.name


def get_layout(name: str) -> Layout:
    """The layout of that name, to write; a ValueError names the choices."""
    if name not in (written := [each.name for each in LAYOUTS.values() if each.written]):
        what = f"octavo reads the layout {name} alone" if name in LAYOUTS else f"unknown layout {name!r}"
        raise ValueError(f"{what}: choose one of {', '.join(written)}")
    return LAYOUTS[name]


def layout_of(found: Mapping[str, Any]) -> Layout:
    """The layout that a `quantization_config` states. An unknown one counts as the largest, which lists its demands."""
    return LAYOUTS.get(str(found.get("quant_method")), LAYOUTS[HOLDS_ANY])


def not_for_transformers(layout: Layout, config: Mapping[str, Any]) -> str:
    """Who opens a folder in `layout` that transformers does not, of the model of `config`; "" if transformers does."""
    if layout.readers:
        return f"for {layout.readers}: transformers computes nonsense from it, or fails"
    architecture = str((config.get("architectures") or [""])[0])
    if layout.name == HOLDS_ANY and architecture.startswith("Llama4"):
        return (
            "for octavo: transformers expects a matrix of each expert of a Llama 4 here, and opens it in --layout fp8"
        )
    return ""


def check_layout(layout: Layout, schemes: Iterable[Scheme], kv_cache: bool) -> None:
    """Raise a ValueError, which names the alternative, unless `layout` can hold `schemes`, and with `kv_cache` the
    scales of a cache of keys and values."""
    names = sorted({scheme.name for scheme in schemes})
    held = layout.schemes or names
    said, instead = f"the layout {layout.name}", f"or --layout {HOLDS_ANY}, which holds any"
    if others := [name for name in names if name not in held]:
        what = f"the scheme {held[0]} alone" if len(held) == 1 else f"the schemes {', '.join(held)}"
        raise ValueError(f"{said} holds {what}, not {', '.join(others)}: --scheme {held[0]}, {instead}")
    if layout.schemes and len(names) > 1:
        raise ValueError(f"{said} holds one scheme in a model, not {' and '.join(names)}: one, {instead}")
    if kv_cache and layout.cache is None:
        raise ValueError(f"{said} has no place for the scales of a KV cache: {instead.removeprefix('or ')}")


@dataclass(frozen=True)
class Packing:
    """The packing of a folder: its layout, the scheme of each packed layer by its name in the files, and whether the
    scales of a KV cache are stored."""

    layout: Layout
    schemes: Mapping[str, Scheme]
    kv_cache: bool = False

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the files that hold `tensors`. Scales may have another name and another shape there."""
        rename, reshape = self.layout.rename, self.layout.reshape
        return {rename(n): reshape(t, n, self.schemes.get(n.rpartition(".")[0])) for n, t in tensors.items()}

    def names_in_memory(self, name: str) -> list[str]:
        return self.layout.names_in_memory(name, self.kv_cache)

    def from_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_files`, for every name, dtype and shape that is read (`octavo.checkpoint.scheme`). An
        ArtifactError if two tensors are the same scale."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            for ours in self.names_in_memory(name):
                if ours in found:
                    raise ArtifactError(f"{name}: the file has this scale under a second name, too; keep one of them")
                found[ours] = self._read(ours, tensor)
        return found

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        if schemes.is_kv_scale(name):
            return schemes.read_number(tensor)
        scheme = self.schemes.get(name.rpartition(".")[0]) if name.endswith(schemes.SCALE_ENDINGS) else None
        return tensor if scheme is None else schemes.read_scale(tensor, name.rpartition(".")[2], scheme)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a packed folder, with a `quantization_config` in the newest spelling. An ArtifactError if a
    file is not JSON, or the folder is a run."""
    where = folder / "config.json"
    if not where.is_file():
        refuse_run(folder)
        check_config(folder, "a folder that octavo pack wrote")
    config = read_json(where)
    for layout in LAYOUTS.values():
        layout.renew(config, folder)
    found = config.get("quantization_config")
    if found is None:
        refuse_run(folder)
    elif not isinstance(found, dict):
        raise ArtifactError(f"{where}: quantization_config must be an object, got {found!r}: pack the model again")
    return config


def quantization_config(packing: Packing, linears: Iterable[str], description: Path | None = None) -> dict[str, Any]:
    """The `quantization_config` of config.json. `linears` are all linear layers, packed or not, by their names in the
    files; modules.json in the folder `description` says that the model is of sentence-transformers."""
    ignore = [name for name in linears if name not in packing.schemes]
    found = packing.layout.describe(packing.schemes, ignore, packing.kv_cache)
    in_parts = description is not None and (description / MODULES).is_file()
    return {**found, **packing.layout.in_parts} if in_parts and len(set(packing.schemes.values())) == 1 else found


def without_code(described: Any) -> Any:
    """A copy of a parsed config.json without the entries, of the model or a part of it, that choose code.

    They can name a repository of the hub, from which transformers fetches kernels, or Python files of the folder.
    """
    if isinstance(described, dict):
        return {key: without_code(value) for key, value in described.items() if key not in _CHOOSES_CODE}
    return [without_code(value) for value in described] if isinstance(described, list) else described


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, without entries that choose code, and the other files that its layout has."""
    described = config.get("quantization_config")
    beside = {} if described is None else layout_of(described).side_files(described)
    for name, content in {"config.json": without_code(dict(config)), **beside}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_packing(config: Mapping[str, Any], linears: Sequence[str], where: Path, plain: Collection[str]) -> Packing:
    """The packing of the layers `linears` (by their names in files) that a config.json of `read_config` states. An
    ArtifactError if the model is not packed, or in another way: it lists the values found and required.

    The weights of the layers `plain` are not in eight bits. An output head among them is not packed, even if the
    configuration does not name it: readers leave heads unpacked, and some writers rely on that.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise ArtifactError(f"{where} has no quantization_config, so the model is not packed: run octavo pack MODEL")
    layout, cache = layout_of(found), found.get("kv_cache_scheme")
    groups = layout.read({key: value for key, value in found.items() if key != "kv_cache_scheme"}, where)
    if cache is not None:
        check_settings({"kv_cache_scheme": cache}, {"kv_cache_scheme": layout.cache}, where)
    linears = [name for name in linears if name not in plain or name.rpartition(".")[2] not in schemes.HEADS]
    listed = listed_modules(layout, found, where)
    packed = [name for name in linears if not any(is_named(entry, name, exact=layout.exact) for entry in listed)]
    chosen = {name: scheme for name in packed if (scheme := _scheme_of(name, groups)) is not None}
    if left := [name for name in packed if name not in chosen]:
        raise ArtifactError(f"{where}: no group of config_groups has {left[0]}, and ignore does not: pack it again")
    return Packing(layout, chosen, cache is not None)


def _scheme_of(name: str, groups: Groups) -> Scheme | None:
    for targets, scheme in groups:
        if "Linear" in targets or any(is_named(target, name, exact=True) for target in targets):
            return scheme
    return None
