"""From a plain model to one whose linear layers run as a recipe says, with an account of what was and was not done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from octavo.nn.backends import gemm_backends
from octavo.nn.linear import Linear
from octavo.ops import Backend
from octavo.recipe import Recipe, get_recipe

# Output heads and routers: their logits feed a softmax, few FLOPs, and errors there go straight into the loss.
DEFAULT_SKIP = (
    "lm_head",
    "*.lm_head",
    "head",
    "*.head",
    "score",
    "*.score",
    "classifier",
    "*.classifier",
    "embed_out",
    "*.embed_out",
    "router",
    "*.router",
    "*.router.*",
    "gate",
    "*.gate",
)


@dataclass(frozen=True)
class Row:
    """One linear layer in a conversion: `reason` says why it was skipped, and is empty where it was converted."""

    name: str
    shape: tuple[int, int]
    reason: str


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: `str()` of it is a table."""

    recipe: Recipe
    rows: tuple[Row, ...]
    backends: dict[str, Backend]

    @property
    def converted(self) -> list[str]:
        """The names of the layers that run as the recipe says."""
        return [row.name for row in self.rows if not row.reason]

    @property
    def skipped(self) -> dict[str, str]:
        """The names of the layers left as they were, with the reason."""
        return {row.name: row.reason for row in self.rows if row.reason}

    def summary(self) -> str:
        """How many layers were converted, and what each of the three GEMMs runs on."""
        lines = [f"{self.recipe.name}: {len(self.converted)} linear layers converted, {len(self.skipped)} skipped"]
        return "\n".join(lines + [f"  {gemm:<2} {b.name}: {b.reason}" for gemm, b in self.backends.items()])

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [self.summary()]
        for row in self.rows:
            n, k = row.shape
            lines.append(
                f"  {row.name:<{width}}  {n:>6} x {k:<6}  {'skipped: ' + row.reason if row.reason else 'converted'}"
            )
        return "\n".join(lines)


def convert(
    model: nn.Module, recipe: str | Recipe = "rowwise", *, skip: Sequence[str] = (), emulate: bool = False
) -> Conversion:
    """Make the linear layers of `model` run as `recipe` says, in place; parameters and `state_dict` stay as they are.

    A module changes its class, not its identity: hooks, tied parameters and references to it keep working.

    Args:
        model: any module; embeddings and norms are no linear layers and stay, output heads and routers are skipped.
        recipe: a preset's name or a `Recipe`.
        skip: globs of module names to leave as they are, beside `DEFAULT_SKIP` and heads tied to an embedding.
        emulate: on a GPU without the GEMM that the recipe needs, compute it slowly in float32 instead of raising.

    Raises:
        ValueError: an unknown recipe, a glob of `skip` that matches nothing, no linear layer left to convert, or a GPU
            without the GEMMs that the recipe needs.
    """
    recipe = get_recipe(recipe)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to convert: FP8 is for models with linear layers")
    for glob in skip:
        if not any(fnmatchcase(name, glob) for name in linears):
            raise ValueError(f"skip={glob!r} matches no linear layer: they are {', '.join(list(linears)[:8])}, ...")
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rows = tuple(
        Row(name, (m.out_features, m.in_features), _reason(name, m, skip, tied)) for name, m in linears.items()
    )
    backends = gemm_backends(recipe, next(iter(linears.values())).weight.device)
    report = Conversion(recipe, rows, backends)
    if not report.converted:
        raise ValueError(f"every linear layer of {type(model).__name__} is skipped, nothing would change:\n{report}")
    missing = [f"{gemm}: {backend.reason}" for gemm, backend in backends.items() if backend.name == "none"]
    if missing and not emulate:
        raise ValueError(
            f"this device cannot run the recipe {recipe.name} ({'; '.join(missing)}): `octavo doctor` lists what it "
            "can, and emulate=True computes it slowly in float32"
        )
    for name in report.converted:
        linear = linears[name]
        linear.__class__ = Linear
        assert isinstance(linear, Linear)
        linear.prepare(recipe, emulate=emulate)
    return report


def _reason(name: str, module: nn.Linear, skip: Sequence[str], tied: set[int]) -> str:
    """Why this layer is not converted, or nothing."""
    if id(module.weight) in tied:
        return "its weight is an embedding's"
    for glob in DEFAULT_SKIP:
        if fnmatchcase(name, glob):
            return f"an output head or router ({glob})"
    for glob in skip:
        if fnmatchcase(name, glob):
            return f"skip={glob!r}"
    if type(module) not in (nn.Linear, Linear):
        return f"a {type(module).__name__}, whose forward is its own"
    return ""
