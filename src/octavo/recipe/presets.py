"""The presets, the names of recipes, and recipes in files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from octavo.numerics.qtensor import ROW, TENSOR, Cast, block, group
from octavo.numerics.scaling import History
from octavo.recipe.gemms import GEMMS, Gemm, Recipe, nearest
from octavo.util import parse_object

# The casts of the presets that packed formats use too. The floor of a weight row's scale is relative to the largest:
# without it a row far below the others would vanish from dy * s_w, and an all-zero row could never learn
# (docs/decisions.md).
ROW_X = Cast(granularity=ROW)
ROW_W = Cast(granularity=ROW, relative_floor=2.0**-8)
BLOCK_X = Cast(granularity=group(128))
BLOCK_W = Cast(granularity=block(128, 128))
MX_GROUPS = Cast(granularity=group(32), scale="e8m0")


def _one_cast_each(name: str, x: Cast, w: Cast, dy: Cast) -> Recipe:
    """Three quantized GEMMs in which each tensor has one cast. Only y accumulates fast."""
    return Recipe(name, Gemm(x, w, fast_accumulation=True), Gemm(dy, w), Gemm(dy, x))


def bf16() -> Recipe:
    """The three GEMMs in BF16: the baseline."""
    return Recipe("bf16")


def tensorwise(gradients: str = "e5m2") -> Recipe:
    """One scale a tensor, from its own amax."""
    x = Cast(granularity=TENSOR)
    return _one_cast_each("tensorwise", x, x, replace(x, format=gradients))


def tensorwise_rotated(gradients: str = "e5m2") -> Recipe:
    """`tensorwise` with x and w rotated along K by a Hadamard matrix for y; dx and dw are those of `tensorwise`.

    Source: QuaRot (arXiv:2404.00456).
    """
    return replace(tensorwise(gradients), name="tensorwise_rotated", rotate=("y",))


def rowwise(gradients: str = "e4m3") -> Recipe:
    """The default: one scale a row; each tensor is quantized once, and its bytes are transposed for the other GEMM.

    y and dx accumulate fast: one operand is a weight, whose signs are mixed. dw never does: its sum over the tokens may
    be of one sign, and fast accumulation then lost up to a third of it (docs/decisions.md).
    """
    dy = Cast(gradients, ROW, "pow2")
    y, dx = Gemm(ROW_X, ROW_W, fast_accumulation=True), Gemm(dy, ROW_W, fast_accumulation=True)
    return Recipe("rowwise", y, dx, Gemm(dy, ROW_X))


def rowwise_dw_bf16(gradients: str = "e4m3") -> Recipe:
    """`rowwise` with dw in BF16, for runs in which dw is the sensitive GEMM; x is saved in BF16.

    Only dw needs power-of-two scales of dy. Here they are float32, which also makes dx more accurate.
    """
    dx = Gemm(Cast(gradients, ROW), ROW_W, fast_accumulation=True)
    return Recipe("rowwise_dw_bf16", Gemm(ROW_X, ROW_W, fast_accumulation=True), dx)


def delayed(gradients: str = "e5m2", history: History | None = None) -> Recipe:
    """One scale a tensor from the history of its amax, with room for twice that: quantizing reads each tensor once."""
    x = Cast(granularity=TENSOR, history=history or History(margin=1.0))
    return _one_cast_each("delayed", x, x, replace(x, format=gradients))


def blockwise(gradients: str = "e4m3") -> Recipe:
    """x and dy in 1 x 128 blocks along each reduction, w in 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    return _one_cast_each("blockwise", BLOCK_X, BLOCK_W, replace(BLOCK_X, format=gradients))


def mxfp8(gradients: str = "e4m3") -> Recipe:
    """OCP microscaling: 32 elements along each reduction share an E8M0 scale."""
    return _one_cast_each("mxfp8", MX_GROUPS, MX_GROUPS, replace(MX_GROUPS, format=gradients))


def groupwise(gradients: str = "e4m3", size: int = 64) -> Recipe:
    """`size` elements (32 to 128) along each reduction share a float32 scale."""
    x = Cast(granularity=group(size))
    return _one_cast_each("groupwise", x, x, replace(x, format=gradients))


def fnuz(recipe: Recipe) -> Recipe:
    """`recipe` in the eight-bit formats of AMD's MI300, which have no infinities and no negative zero."""

    def turned(cast: Cast) -> Cast:
        return replace(cast, format=f"{cast.format}fnuz")

    gemms: dict[str, Any] = {name: getattr(recipe, name) for name in GEMMS}
    changes = {name: gemm and replace(gemm, a=turned(gemm.a), b=turned(gemm.b)) for name, gemm in gemms.items()}
    return replace(recipe, name=f"{recipe.name}_fnuz", **changes)


RecipeName = Literal[
    "bf16", "tensorwise", "tensorwise_rotated", "rowwise", "rowwise_dw_bf16", "delayed", "blockwise", "mxfp8",
    "groupwise",
]  # fmt: skip
FORMAT_NAMES = ("fp8", "float8", "e4m3")  # given for a recipe by mistake: the error names the default
RECIPE_FILES = (".json", ".toml")  # the endings of their names
PRESETS: dict[str, Callable[..., Recipe]] = {
    f.__name__: f
    for f in (
        bf16, tensorwise, tensorwise_rotated, rowwise, rowwise_dw_bf16, delayed, blockwise, mxfp8, groupwise,
    )
}  # fmt: skip


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """The preset of that name, or the recipe in a file; a `Recipe` is returned as it is.

    A .json file has the fields of a recipe. A .toml file is one of settings, and has them in its table `[recipe]`.

    Raises:
        ValueError: no preset has this name, and the message lists them; or the file has no recipe or cannot be read,
            and the message names the file and the field.
        TypeError: neither a name nor a path nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):
        call = f": call it, {recipe.__name__}()" if recipe in PRESETS.values() else ""
        raise TypeError(f"recipe must be a preset's name, a file or a Recipe, got {recipe!r}{call}")
    if str(recipe).endswith(RECIPE_FILES):
        return _read(Path(recipe))
    if recipe not in PRESETS:
        of_format = f" ({recipe} is a format; 'rowwise' is the default recipe)"
        meant = of_format if recipe in FORMAT_NAMES else nearest(str(recipe), PRESETS)
        raise ValueError(
            f"unknown recipe {str(recipe)!r}{meant}: choose one of {', '.join(PRESETS)}, or "
            "give the .json or .toml file of a recipe"
        )
    return PRESETS[str(recipe)]()


def similar_preset(recipe: Recipe) -> str:
    """The name of the first preset that casts x and w in y as `recipe` does; "custom" if none does.

    Rounding, the floor of scales and the settings of a history may differ.
    """
    return next((name for name, preset in PRESETS.items() if _forward(preset()) == _forward(recipe)), "custom")


def _forward(recipe: Recipe) -> object:
    if recipe.y is None:
        return None
    casts = (recipe.y.a, recipe.y.b)
    return "y" in recipe.rotate, [(c.format, c.granularity, c.scale, c.history is None) for c in casts]


def _read(path: Path) -> Recipe:
    """The recipe in the file `path`; without a field `name` it is called by the file's."""
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"recipe file {path} cannot be read: {error.strerror}") from error
    found = parse_object(text, f"recipe file {path}", toml=is_toml)
    values = found.get("recipe", {}) if is_toml else found
    if is_toml and (not values or not isinstance(values, dict)):
        raise ValueError(
            f"recipe file {path}: a TOML file must have the fields of a recipe in its table [recipe], got "
            f"{f'recipe = {values!r}' if values else 'none'}"
        )
    try:
        recipe = Recipe.from_dict(values, path.stem)
    except ValueError as error:
        raise ValueError(f"recipe file {path}: {error}") from error
    if recipe.name in PRESETS and recipe != PRESETS[recipe.name]():
        raise ValueError(
            f"recipe file {path}: {recipe.name} is the name of a preset, which has other fields: give the recipe a "
            'name of its own, such as "name": "mine"'
        )
    return recipe
