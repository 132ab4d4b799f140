"""The experts of a mixture that are packed."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from octavo.artifact.packed.scheme import INT8, Scheme
from octavo.hf.fused_groups import check_groups
from octavo.hf.source import Source
from octavo.packing.options import PackOptions


def choose_experts(source: Source, options: PackOptions) -> dict[str, tuple[int, ...]]:
    """The experts to pack, by their names in the files, with their shapes [N, K].

    They are none without `options.experts`. Experts that `options.skip` names stay in BF16, and so do those that
    training moved there.

    Raises:
        ValueError: `options.experts`, and the model has no stacked experts.
    """
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


def check_experts(
    schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]], source: Source, options: PackOptions
) -> None:
    """Raise a ValueError for a scheme that experts cannot have, or matrices of one GEMM with different schemes.

    Args:
        schemes: of the packed experts, by their names in the files.
        shapes: those of `choose_experts`.
    """
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
