"""The layers of a model that are packed, their schemes, and the scales that are known before a weight is read."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from octavo.artifact.packed.layouts import check_layout
from octavo.artifact.packed.scheme import INT8, SCHEME_OF, STATIC, Scheme, get_scheme
from octavo.calibration.folder import load_calibration
from octavo.hf.fused_groups import check_groups, groups
from octavo.hf.source import Source
from octavo.nn.selection import select_linears
from octavo.packing.misfits import check_shapes
from octavo.packing.options import PackOptions
from octavo.packing.static_scales import StaticScales, calibrated_scales, given_scales, trained_scales
from octavo.packing.tensor_parallel import check_degrees


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
    experts = _experts(source, options)
    files = source.meta_model.experts if options.experts else None
    known = [] if files is None else [*(name.rpartition(".")[0] for name in files.stacks), *files.experts]
    linears = select_linears(source.meta_model.model, (*source.skip, *options.skip), known)
    usual = SCHEME_OF.get(source.recipe, "channel") if options.input_scales is None else STATIC.name
    default = options.scheme or usual
    promoted = _promoted(source, [layer.name for layer in linears], options.layers)
    names = [layer.name for layer in linears if not layer.reason and layer.name not in promoted]
    if promoted and not names and not experts:
        raise ValueError(
            f"training moved every layer of {source.origin} that could be packed to BF16: pack an earlier step "
            "(--step), or name layers in --layer to pack them all the same"
        )
    chosen = _schemes([*names, *experts], default, options.layers)
    schemes, of_experts = ({name: chosen[name] for name in some} for some in (names, experts))
    _check_experts(of_experts, experts, source, options)
    check_layout(options.layout, chosen.values(), options.kv_cache is not None)
    static = _static_scales(source, schemes, of_experts, options)
    skipped = promoted | {layer.name: layer.reason for layer in linears if layer.reason}
    if static is not None:
        unscaled = [name for name, scheme in schemes.items() if scheme.static and name not in static.inputs]
        skipped |= dict.fromkeys(unscaled, "training left it in BF16")
        schemes = {name: scheme for name, scheme in schemes.items() if name not in unscaled}
    check_groups((layer.name for layer in linears), schemes)
    shapes = experts | {name: tuple(source.specs[f"{name}.weight"].shape) for name in schemes}
    check_shapes(schemes | of_experts, shapes)
    check_degrees(schemes, shapes, source.config, options.tensor_parallel)
    return ChosenLayers(schemes, skipped, static, of_experts)


def _promoted(source: Source, names: Sequence[str], asked: Collection[str]) -> dict[str, str]:
    """The layers that stay in BF16 as in training, with those that readers fuse with them, unless `asked` has them."""
    left = {}
    for group in groups(names):
        promoted = [name for name in group if name in source.promoted and name not in asked]
        for name in group if promoted else ():
            left[name] = source.promoted.get(name, f"readers fuse it with {promoted[0]}, which training moved to BF16")
    return left


def _experts(source: Source, options: PackOptions) -> dict[str, tuple[int, ...]]:
    """The experts to pack, by their names in the files, with their shapes."""
    files = source.meta_model.experts
    if not options.experts:
        return {}
    if files is None:
        raise ValueError(f"{source.origin} has no stacked experts that Octavo packs: leave --experts out")
    skip = (*source.skip, *options.skip)
    stacked = {name: source.specs[name].meta() for name in files.stacks}
    modules = {name: name.rpartition(".")[0] for name in stacked}
    stacked = {n: t for n, t in stacked.items() if modules[n] not in source.promoted and not _matches(modules[n], skip)}
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in files.split(stacked).items()}
    return {name: shape for name, shape in shapes.items() if not _matches(name, skip)}


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _check_experts(
    schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]], source: Source, options: PackOptions
) -> None:
    for name, scheme in schemes.items():
        if scheme.static and (options.calibration is None or options.input_scales is not None):
            raise ValueError(
                f"{name}: the scheme {scheme.name} stores scales of inputs, and those of experts come from a "
                "calibration alone: give --calibration, made by octavo calibrate, or pack experts by channel "
                "(--layer '*.experts.*=channel')"
            )
        if scheme is INT8:
            raise ValueError(f"{name}: experts are packed in FP8, not int8 (--layer '*.experts.*=channel')")
    stacks = source.meta_model.experts.parts_of_stacks if source.meta_model.experts and schemes else {}
    for stack, parts in stacks.items():
        names = [part.removesuffix(".weight") for part in reversed(parts)]
        chosen = {schemes[name].name if name in schemes else "BF16": name for name in names}  # the first of each scheme
        if len(chosen) > 1:
            raise ValueError(
                f"the matrices of {stack}, which readers stack, need one scheme, they have "
                f"{', '.join(f'{name} {scheme}' for scheme, name in chosen.items())}: name all of them in --skip or "
                "--layer"
            )
    check_groups(shapes, schemes)


def _schemes(names: Sequence[str], default: str, layers: Mapping[str, str]) -> dict[str, Scheme]:
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
