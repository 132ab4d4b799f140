"""The layers of a model that are packed, their schemes, and the scales that are known before a weight is read."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from octavo.artifact.packed.layouts import check_layout
from octavo.artifact.packed.scheme import SCHEME_OF, STATIC, Scheme, get_scheme
from octavo.calibration.folder import load_calibration
from octavo.hf.fused_groups import check_groups, groups
from octavo.hf.source import Source
from octavo.nn.selection import select_linears
from octavo.packing.chosen_experts import check_experts, choose_experts
from octavo.packing.misfits import check_shapes
from octavo.packing.options import PackOptions
from octavo.packing.static_scales import StaticScales, calibrated_scales, given_scales, trained_scales
from octavo.packing.tensor_parallel import check_degrees

KEPT_WIDE = "transformers quantizes no such layer of this class, it is sensitive to rounding"


@dataclass(frozen=True)
class ChosenLayers:
    """The linear layers of a model, by their names in it, and the experts of a mixture, by their names in the files.

    Attributes:
        schemes: of each packed layer.
        experts: the schemes of the packed experts.
        skipped: the reason why each other layer stays in BF16.
        static: the scales that a calibration or a run's history gives; None if none is needed.
    """

    schemes: Mapping[str, Scheme]
    skipped: Mapping[str, str]
    static: StaticScales | None
    experts: Mapping[str, Scheme] = field(default_factory=dict)


def choose_layers(source: Source, options: PackOptions) -> ChosenLayers:
    """Choose the layers to pack.

    Raises:
        FileNotFoundError, ArtifactError: the calibration or the run's checkpoint is not whole.
        ValueError: an unknown scheme or layout, a scheme that the layout does not hold, a layer whose sizes the scheme
            cannot have or that cannot be split, fused layers with different schemes, or static scales without a
            calibration of this model.
    """
    linears, experts = _select(source, options), choose_experts(source, options)
    names = [name for name, reason in linears.items() if not reason]
    if not names and not experts and not source.promoted.keys().isdisjoint(linears):
        raise ValueError(
            f"training moved every layer of {source.origin} that could be packed to BF16: pack an earlier step "
            "(--step), or name layers in --layer to pack them all the same"
        )
    chosen = _schemes([*names, *experts], source, options)
    schemes, of_experts = ({name: chosen[name] for name in some} for some in (names, experts))
    check_experts(of_experts, experts, source, options)
    check_layout(options.layout, chosen.values(), options.kv_cache is not None)
    static = _static_scales(source, schemes, of_experts, options)
    unscaled = [] if static is None else [n for n, each in schemes.items() if each.static and n not in static.inputs]
    schemes = {name: scheme for name, scheme in schemes.items() if name not in unscaled}
    check_groups(linears, schemes)
    shapes = experts | {name: tuple(source.specs[f"{name}.weight"].shape) for name in schemes}
    check_shapes(schemes | of_experts, shapes)
    check_degrees(schemes, shapes, source.config, options.tensor_parallel)
    left = linears | dict.fromkeys(unscaled, "training left it in BF16")
    return ChosenLayers(schemes, {name: reason for name, reason in left.items() if reason}, static, of_experts)


def _select(source: Source, options: PackOptions) -> dict[str, str]:
    """The linear layers, each with the reason why it stays in BF16, or "" if it is packed."""
    files = source.meta_model.experts if options.experts else None
    others = [] if files is None else [*(name.rpartition(".")[0] for name in files.stacks), *files.experts]
    linears = select_linears(source.meta_model.model, (*source.skip, *options.skip), others)
    names = [layer.name for layer in linears]
    left = dict.fromkeys(source.meta_model.kept_wide(names), KEPT_WIDE) | _promoted(source, names, options.layers)
    return {layer.name: layer.reason or left.get(layer.name, "") for layer in linears}


def _promoted(source: Source, names: Sequence[str], asked: Collection[str]) -> dict[str, str]:
    """The layers that stay in BF16 as in training, with those that readers fuse with them, unless `asked` has them."""
    left = {}
    for group in groups(names):
        promoted = [name for name in group if name in source.promoted and name not in asked]
        for name in group if promoted else ():
            left[name] = source.promoted.get(name, f"readers fuse it with {promoted[0]}, which training moved to BF16")
    return left


def _schemes(names: Sequence[str], source: Source, options: PackOptions) -> dict[str, Scheme]:
    """The scheme of each layer and expert: that of the first glob that matches it, or else the usual one."""
    usual = SCHEME_OF.get(source.recipe, "channel") if options.input_scales is None else STATIC.name
    default, layers = options.scheme or usual, options.layers
    for glob in layers:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{glob!r} matches no packed layer: they are {', '.join(names[:8])}, ...")
    return {
        name: get_scheme(next((scheme for glob, scheme in layers.items() if fnmatchcase(name, glob)), default))
        for name in names
    }


def _static_scales(
    source: Source, schemes: Mapping[str, Scheme], of_experts: Mapping[str, Scheme], options: PackOptions
) -> StaticScales | None:
    layers, experts = ([name for name, scheme in some.items() if scheme.static] for some in (schemes, of_experts))
    if not layers and not experts and options.kv_cache is None:
        if options.calibration is not None:
            # nothing of it is stored, but a wrong folder is an error
            load_calibration(options.calibration, source.origin, source.description)
        return None
    if options.input_scales is not None:
        return given_scales(options, source, [*layers, *experts])
    # Without --scheme a run keeps the scales that it was trained with.
    if source.recipe == "delayed" and layers and (options.scheme is None or options.calibration is None):
        return trained_scales(options, source, layers, experts)
    return calibrated_scales(options, source, [*layers, *experts])
