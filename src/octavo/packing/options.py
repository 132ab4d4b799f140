"""The options of packing. They choose the layers, their schemes, and the stored scales, before a weight is read."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.architectures import ARCHITECTURES
from octavo.calibration.calibrator import Calibration, load_calibration
from octavo.calibration.site_statistics import SCALE_RULES
from octavo.checkpoint.files import ArtifactError, load_tensors
from octavo.checkpoint.layouts import check_layout, get_layout
from octavo.checkpoint.scheme import SCHEME_OF, STATIC, Scheme, get_scheme, groups, kv_tensors
from octavo.hf.meta_model import tied_names
from octavo.hf.source import Source
from octavo.nn.module_tools import is_conv1d
from octavo.nn.selection import check_strings, select_linears
from octavo.util import plural

WEIGHT_RULES = ("amax", "mse")


@dataclass(frozen=True)
class PackOptions:
    """The options of `pack`.

    Attributes:
        scheme: of the packed layers: channel, tensor, static, block, mx, group32, group64, group128, weight or
            int8. None takes the scheme of a run's recipe (`octavo.checkpoint.scheme.SCHEME_OF`), and channel for a
            model folder.
        layers: glob of layer names -> another scheme for these layers. The first glob that matches counts.
        layout: compressed-tensors, or one that holds fewer schemes: fp8 (block), modelopt (static, channel or block).
        skip: globs of layers that stay in BF16, beside output heads, routers and the layers that the run skipped. Of
            layers that readers run as one GEMM (`octavo.checkpoint.scheme.groups`) it takes all or none, and they have
            one scheme.
        calibration: the folder that `octavo calibrate` wrote for this model. `kv_cache` and the scheme static need it.
            A run that was trained with the recipe `delayed` has scales of its own for static, which it keeps unless
            both `scheme` and `calibration` are given.
        rule: of the scales from the calibration: amax (also None), percentile (99.99) or mse.
        weights: the rule of the scales of weights: amax or mse (`octavo.packing.scale_search`).
        pow2: round the scales of weights up to powers of two.
        share: one scale for layers that readers fuse, where a scale is of a whole tensor. None shares unless the source
            is a run that was trained with its own scales, because sharing would change its bytes.
        kv_cache: "fp8" stores scales for a cache in E4M3 of each attention layer's keys and values. None stores none.
        experts: pack the experts of a mixture too, each projection of each expert with scales of its own.
        tensor_parallel: numbers of devices that the packed layers must divide over.
        input_scales: the scale of each layer's input, float32 [1], by the layer's name, of
            `octavo.scales.freeze_scales`. The scheme is then static unless another is given, and `calibration` gives
            the scales of keys and values alone.

    Raises:
        TypeError: `skip` is a string.
        ValueError: an unknown rule or cache, or options that do not fit each other.
    """

    scheme: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    layout: str = "compressed-tensors"
    skip: Sequence[str] = ()
    calibration: Path | None = None
    rule: str | None = None
    weights: str = "amax"
    pow2: bool = False
    share: bool | None = None
    kv_cache: str | None = None
    experts: bool = False
    tensor_parallel: Sequence[int] = ()
    input_scales: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        check_strings(self.skip)
        if self.rule not in (None, *SCALE_RULES):
            raise ValueError(f"unknown rule {self.rule!r} for a scale: choose one of {', '.join(SCALE_RULES)}")
        if self.rule is not None and self.calibration is None:
            raise ValueError(
                f"the rule {self.rule} chooses scales from a calibration, and none is given: give --calibration, made "
                "by octavo calibrate, or leave --rule out (--weights is the rule for the scales of weights)"
            )
        if self.input_scales is not None and self.calibration is not None and self.kv_cache is None:
            raise ValueError(
                "the calibration and the prompts (--freeze, input_scales) both give the scales of inputs: leave one "
                "out, or add --kv-cache fp8, for which the calibration gives the scales"
            )
        if self.weights not in WEIGHT_RULES:
            raise ValueError(f"unknown rule {self.weights!r} for weights: choose one of {', '.join(WEIGHT_RULES)}")
        if self.kv_cache not in (None, "fp8"):
            raise ValueError(f"unknown cache {self.kv_cache!r} of keys and values: choose fp8, or none")
        for name, scale in (self.input_scales or {}).items():
            if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
                raise ValueError(
                    f"input_scales: the scale of {name} must be one positive number, got {scale.flatten()[:4].tolist()}"
                )


# ---- Scales that are stored because no forward pass computes them.
#
# They are the scales of inputs for the scheme `static`, and of a cache of keys and values in e4m3. They come from a
# calibration. A run that was trained with the recipe `delayed` needs none for its layers: its checkpoint holds, for
# each operand of each layer, the scale of the next forward pass. With these scales, the model computes as in training.


@dataclass(frozen=True)
class StaticScales:
    """Stored scales, and their origin, the entry "calibration" of octavo.json.

    `inputs` has the scale of the input of each layer, float32 [1]. `keys_and_values` has <attention>.k_scale (of keys
    after the rotation) and <attention>.v_scale, float32 [1], for every attention layer, or nothing without a cache.
    `weights` has the scale of the weight of each layer, float32 [1, 1], if a run's checkpoint holds it.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    keys_and_values: Mapping[str, Tensor] = field(default_factory=dict)
    record: Mapping[str, object] | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def static_scales(
    source: Source, schemes: Mapping[str, Scheme], experts: Collection[str], options: PackOptions
) -> StaticScales:
    """The scales of the inputs of static layers and experts. They are given (`options.input_scales`), stand in the
    checkpoint of a run, or come from a calibration. A calibration alone gives the scales of keys and values."""
    names = [name for name, scheme in schemes.items() if scheme.static]
    layers = [name for name in names if name not in experts]
    folder, chosen = options.calibration, options.rule or "amax"
    calibration = None if folder is None else load_calibration(folder, source.origin, source.description)
    inputs, weights, keys_and_values = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    record: dict[str, object] = {}
    rule, others = "", names
    if names and options.input_scales is not None:
        if missing := [name for name in names if name not in options.input_scales]:
            raise ValueError(f"input_scales has no scale of {missing[0]} ({len(missing)} missing)")
        inputs = {name: options.input_scales[name].float().reshape(1).cpu() for name in names}
        rule, others = "frozen", []
        weights = _histories(source, names)[1] if source.recipe == "delayed" else {}
    # Without --scheme a run keeps the scales that it was trained with.
    elif source.recipe == "delayed" and layers and (options.scheme is None or calibration is None):
        (inputs, weights), rule, others = _histories(source, layers), "history", names[len(layers) :]
    if others or options.kv_cache is not None:
        if calibration is None:
            source.meta_model.require_text()
            why = "--scheme static stores scales of inputs" if others else "--kv-cache stores scales of keys and values"
            freeze = ", or find them with --freeze 64 --data TEXT" if others else ""
            raise ValueError(f"{why}: give --calibration, made by octavo calibrate{freeze}")
        called = [name for name in others if name in calibration.layers]
        inputs = {name: calibration.scale(name, chosen).reshape(1) for name in called} | inputs
        keys_and_values = {} if options.kv_cache is None else _keys_and_values(calibration, chosen, source)
        record = {"rule": chosen, **calibration.record, "kv_cache": options.kv_cache}
    if rule:
        record |= {"rule": rule} | ({"calibration_rule": chosen} if record else {})
    return StaticScales(inputs, keys_and_values, record or None, weights)


def _histories(source: Source, layers: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The scales of inputs, float32 [1], and of weights, float32 [1, 1], of those of `layers` in the checkpoint."""
    path = source.origin / "state.safetensors"
    state = load_tensors(path)
    inputs, weights = {}, {}
    for name in layers:
        trained = source.trained_as.get(name, name)
        x, w = (_scale(state, f"{trained}.histories.{operand}", path) for operand in "xw")
        if x is not None and w is not None:
            inputs[name], weights[name] = x.reshape(1), w.reshape(1, 1)
    if not inputs:
        raise ArtifactError(f"{path} has no scales of {layers[0]}: it is not of a run that was trained with delayed")
    return inputs, weights


def _keys_and_values(calibration: Calibration, rule: str, source: Source) -> dict[str, Tensor]:
    sites = {name: name.removesuffix("_scale") for name in kv_tensors(source.meta_model.linears(), declared=True)}
    if not sites:
        raise ValueError(
            f"{source.origin} has no attention layers with k_proj, which the scales of a KV cache are named after: "
            "pack it without --kv-cache"
        )
    return {name: calibration.scale(site, rule).reshape(1) for name, site in sites.items()}


def _scale(state: Mapping[str, Tensor], history: str, path: Path) -> Tensor | None:
    """The current scale of a history. None for a layer that training left in BF16."""
    scale, steps = state.get(f"{history}.scale"), state.get(f"{history}.steps")
    if scale is None or steps is None:
        return None
    if int(steps) == 0:
        raise ArtifactError(
            f"{path}: {history} has no entry yet, the layer was in no step of training: pack a later step, pack by "
            "--scheme channel, or leave the layer in BF16 (--skip)"
        )
    if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
        raise ArtifactError(f"{path}: {history}.scale must be one positive number, got {scale.flatten()[:4].tolist()}")
    return scale.float()


# ---- The layers that are packed, and their schemes.


KEPT_WIDE = "its model keeps it in high precision, or casts its input to the dtype of its weight"
TRANSPOSED = "a Conv1D stores its weight as [K, N], and a packed weight is [N, K]"
SHARED = "it shares its weight with another layer, and readers do not share scales"


@dataclass(frozen=True)
class ChosenLayers:
    """The schemes of the packed linear layers of a model, by their names in it, and behind them of packed `experts`, by
    their names in the files. `skipped` has the reason for each other layer, and `static` the stored scales."""

    schemes: Mapping[str, Scheme]
    experts: Collection[str]
    skipped: Mapping[str, str]
    static: StaticScales

    @cached_property
    def linears(self) -> list[str]:
        return [name for name in self.schemes if name not in self.experts]


def choose_layers(source: Source, options: PackOptions) -> ChosenLayers:
    """Choose the layers to pack. A ValueError for an unknown scheme or layout, a scheme that the layout does not hold,
    or a layer that it does not fit; fused layers with different schemes; static scales without a calibration."""
    linears, experts = _select(source, options), choose_experts(source, options)
    names = [name for name, reason in linears.items() if not reason]
    if not names and not experts:
        if not source.promoted.keys().isdisjoint(linears):
            raise ValueError(
                f"training moved every layer of {source.origin} that could be packed to BF16: pack an earlier step "
                "(--step), or name layers in --layer to pack them all the same"
            )
        reasons = "; ".join(f"{name}: {reason}" for name, reason in [*linears.items()][:4])
        raise ValueError(f"{source.origin} has no layer that can be packed ({reasons}): leave it in BF16")
    schemes = _schemes([*names, *experts], source, options)
    check_experts(schemes, experts, options)
    layout = get_layout(options.layout)
    check_layout(layout, schemes.values(), options.kv_cache is not None)
    static = static_scales(source, schemes, experts, options)
    unscaled = [name for name, scheme in schemes.items() if scheme.static and name not in static.inputs]
    schemes = {name: scheme for name, scheme in schemes.items() if name not in unscaled}
    left = linears | dict.fromkeys(unscaled, "training left it in BF16, or no text reached it")
    chosen = ChosenLayers(schemes, experts.keys(), {name: why for name, why in left.items() if why}, static)
    check_alike([*linears, *experts], source.meta_model.experts.stacks if options.experts else {}, schemes)
    shapes = {name: tuple(source.specs[f"{name}.weight"].shape) for name in chosen.linears} | experts
    check_reasons({name: scheme.misfit(*shapes[name]) for name, scheme in schemes.items()}, schemes)
    layout.check_experts({name: schemes[name] for name in experts}, shapes)
    check_degrees({name: schemes[name] for name in chosen.linears}, shapes, source.config, options.tensor_parallel)
    return chosen


def _select(source: Source, options: PackOptions) -> dict[str, str]:
    """The linear layers, each with the reason why it stays in BF16, or "" if it is packed."""
    files = source.meta_model.experts
    others = [*(name.rpartition(".")[0] for name in files.stacks), *files.experts] if options.experts else []
    linears = select_linears(source.meta_model.model, (*source.skip, *options.skip), others)
    names = [layer.name for layer in linears]
    left = dict.fromkeys(source.meta_model.kept_wide(names), KEPT_WIDE)
    tied = tied_names(source.meta_model.model)
    left |= {name: SHARED for name in names if len(tied.get(f"{name}.weight", ())) > 1}
    for group in groups(names):  # layers that training moved to BF16 are packed if they are named in --layer
        promoted = [name for name in group if name in source.promoted and name not in options.layers]
        for name in group if promoted else ():
            left[name] = source.promoted.get(name, f"readers fuse it with {promoted[0]}, which training moved to BF16")
    left |= {layer.name: TRANSPOSED for layer in linears if is_conv1d(layer.module)}
    return {layer.name: layer.reason or left.get(layer.name, "") for layer in linears}


def _schemes(names: Sequence[str], source: Source, options: PackOptions) -> dict[str, Scheme]:
    usual = SCHEME_OF.get(source.recipe, "channel") if options.input_scales is None else STATIC.name
    default, layers = options.scheme or usual, options.layers
    for glob in layers:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{glob!r} matches no packed layer: they are {', '.join(names[:8])}, ...")
    return {
        name: get_scheme(next((scheme for glob, scheme in layers.items() if fnmatchcase(name, glob)), default))
        for name in names
    }


def choose_experts(source: Source, options: PackOptions) -> dict[str, tuple[int, ...]]:
    """The experts to pack, by their names in the files, with their shapes [N, K]; none without `options.experts`.
    Experts that `options.skip` names stay in BF16, and so do those that training moved there."""
    files = source.meta_model.experts
    if not options.experts:
        return {}
    if not files.experts:
        raise ValueError(f"{source.origin} has no stacked experts that Octavo packs: leave --experts out")
    skip = (*source.skip, *options.skip)
    stacked = {name: source.specs[name] for name in files.stacks}
    modules = {name: name.rpartition(".")[0] for name in stacked}
    stacked = {n: t for n, t in stacked.items() if modules[n] not in source.promoted and not _matches(modules[n], skip)}
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in files.split(stacked).items()}
    return {name: shapes[name] for name in files.experts if name in shapes and not _matches(name, skip)}


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def check_experts(schemes: Mapping[str, Scheme], experts: Iterable[str], options: PackOptions) -> None:
    """Raise a ValueError for a scheme that `experts` cannot have."""
    for name in experts:
        scheme = schemes[name]
        if scheme.static and (options.calibration is None or options.input_scales is not None):
            raise ValueError(
                f"{name}: the scheme {scheme.name} stores scales of inputs, and those of experts come from a "
                "calibration alone: give --calibration, made by octavo calibrate, in place of --freeze, or pack "
                "experts by channel (--layer '*.experts.*=channel')"
            )
        if scheme.integers:
            raise ValueError(f"{name}: experts are packed in FP8, not int8 (--layer '*.experts.*=channel')")


def check_alike(names: Iterable[str], stacks: Mapping[str, Sequence[str]], schemes: Mapping[str, Scheme]) -> None:
    """Raise a ValueError unless layers among `names` that readers fuse, and the matrices of each of `stacks`, have one
    scheme, or none."""
    together: list[tuple[str, Sequence[str]]]
    together = [(f"the matrices of {stack}, which readers stack,", parts) for stack, parts in stacks.items()]
    together += [(f"layers that readers run as one GEMM with {group[0]}", group) for group in groups(names)]
    for what, members in together:
        first = {schemes[name].name if name in schemes else "BF16": name for name in reversed(members)}
        if len(first) > 1:
            each = ", ".join(f"{name} {scheme}" for scheme, name in first.items())
            raise ValueError(f"{what} need one scheme, they have {each}: name all of them in --skip or --layer")


def check_reasons(reasons: Mapping[str, str], schemes: Mapping[str, Scheme], other: str = "") -> None:
    """Raise a ValueError if there are `reasons`, by layer, why some of the packed layers `schemes` cannot be packed; ""
    is none. It has the first, the options that pack all of them and what is fused with them by channel, and `other`."""
    if not (reasons := {name: reason for name, reason in reasons.items() if reason}):
        return
    first, reason = next(iter(reasons.items()))
    more = f", and {plural(len(reasons) - 1, 'other layer')} cannot be packed either" if len(reasons) > 1 else ""
    changed = [name for group in groups(schemes) if not reasons.keys().isdisjoint(group) for name in group]
    options = [f"--layer '{glob}=channel'" for glob in _globs(changed, list(schemes))]
    by_channel = "--scheme channel" if len(changed) == len(schemes) else " ".join(options)
    raise ValueError(f"{first}: {reason}{more}: pack by channel ({by_channel}){other}, or leave in BF16 (--skip GLOB)")


def _globs(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Globs that match the layers `names` and no other of `every`; one for all layers of a kind where it can be."""
    others, found = [name for name in every if name not in names], []
    for name in names:
        leaf = name.rpartition(".")[2]
        kinds = (glob for glob in (f"*.{leaf}", f"*.experts.*.{leaf}") if fnmatchcase(name, glob))
        found.append(next((glob for glob in kinds if not any(fnmatchcase(other, glob) for other in others)), name))
    return list(dict.fromkeys(found))


# ---- A check that readers with tensor parallelism can split a packed model over several devices.
#
#   q, k, v, gate, up, fc1      by output:  device i has rows    i*N/d .. (i+1)*N/d of w[N,K]
#   o, down, fc2                by input:   device i has columns i*K/d .. (i+1)*K/d
#   heads                       are not split; with more devices than heads of keys, several devices have the same head
#
# Each device must have whole blocks of scales: 128 rows or columns for `block`, 32 columns for `mx`. A weight with one
# scale for the tensor or for each row can be split anywhere.


def _endings(*names: str) -> tuple[str, ...]:
    """The last part of each name, or the last two where that is BERT's `dense`."""
    return tuple(re.sub(r"^.*?([^.]+(\.dense)?)$", r"\1", name) for name in names)


_BLOCKS = [each.block for each in ARCHITECTURES.values()]
_BY_OUTPUT = _endings(*(name for block in _BLOCKS for name in (*block.qkv, *block.up)))
_BY_INPUT = _endings(*(name for block in _BLOCKS for name in (block.o, block.down) if name))
_WHOLE = ("project_in", "project_out")  # every device has all of it
_KEYS = _endings(*(name for block in _BLOCKS for name in block.qkv[1:]))


def check_degrees(
    schemes: Mapping[str, Scheme],
    sizes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    degrees: Sequence[int],
) -> None:
    """Raise a ValueError unless the packed layers, of `sizes` [N, K], can be split over each of `degrees` devices;
    `config` is the model's config.json."""
    for degree in degrees:
        if degree < 1:
            raise ValueError(f"a model is split over 1 device or more, not {degree}")
        heads = config.get("num_attention_heads")
        stated = config.get("num_key_value_heads", heads)
        kept = stated if isinstance(stated, int) else None
        if isinstance(heads, int) and heads % degree:
            raise ValueError(f"{heads} heads of attention do not divide over {degree} devices: {_others(heads)}")
        if kept is not None and kept % degree and degree % kept:
            raise ValueError(
                f"{kept} heads of keys and values neither divide over {degree} devices nor into them: {_others(kept)}"
            )
        found = {name: _misfit(name, scheme, sizes[name], degree, kept) for name, scheme in schemes.items()}
        check_reasons(found, schemes, ", take a smaller degree")


def _others(count: int) -> str:
    return "take a degree of " + ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)


def _misfit(name: str, scheme: Scheme, size: tuple[int, ...], degree: int, kept: int | None) -> str:
    """The reason why a layer cannot be split, or "". A ValueError if readers may split it in another way."""
    if degree == 1 or name.endswith(_WHOLE):
        return ""
    by_output = name.endswith(_BY_OUTPUT)
    if not by_output and not name.endswith(_BY_INPUT):
        raise ValueError(
            f"{name}: how readers split this layer over {degree} devices is not known here: leave it in BF16 (--skip)"
        )
    parts = min(degree, kept) if kept is not None and name.endswith(_KEYS) else degree
    axis = 0 if by_output else 1
    granularity = scheme.weight.granularity
    block = (granularity.rows if by_output else granularity.cols) or 1
    if size[axis] % parts or (size[axis] // parts) % block:
        each = f"{list(size)} over {degree} devices gives each {size[axis] / parts:g} {('rows', 'columns')[axis]}"
        return f"{each}, which are no whole blocks of {block} ({scheme.name})"
    return ""
