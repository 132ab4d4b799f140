"""A recipe says which cast each operand has in the three GEMMs of a linear layer. Tokens T, inputs K, outputs N:

    y [T,N] = x [T,K]   @ w[N,K]^T      reduces over K
    dx[T,K] = dy[T,N]   @ w[N,K]        reduces over N
    dw[N,K] = dy[T,N]^T @ x[T,K]        reduces over T

A GEMM is two casts, in the order in which the formula names its operands, or None: it then runs in BF16. Each tensor
is an operand of two GEMMs. With the same cast in both it is quantized *once*, and the granularity decides how its bytes
are used along the other axis:

    tensor, square blocks   the bytes are transposed, and the scales with them
    row                     the bytes are transposed; the scale, now along the reduction, is folded into the other
                            operand: s_w and the mantissa of s_x into dy before dy is quantized, the exponent of s_x
                            into the bytes of dy
    groups                  the bytes cannot be used: the tensor is quantized again along the other axis

A Hadamard rotation belongs to a GEMM, not to a tensor: both operands are rotated along the reduction, where the two
rotations cancel (`octavo.numerics.scaling`), and quantized for this GEMM alone. `Recipe.rotate` names the GEMMs:

    y     x and w along K
    dx    dy and w along N
    dw    dy and x along T

The other GEMMs read bytes without a rotation. From rotated bytes of x, dw would have to be rotated back along K, which
spreads the error of the largest input over all others (docs/decisions.md).
"""

from octavo.recipe.gemms import GEMMS, FusableRecipe, Gemm, Recipe
from octavo.recipe.presets import (
    BLOCK_W,
    BLOCK_X,
    MX_GROUPS,
    PRESETS,
    ROW_W,
    ROW_X,
    RecipeName,
    bf16,
    blockwise,
    delayed,
    fnuz,
    get_recipe,
    groupwise,
    mxfp8,
    rowwise,
    rowwise_dw_bf16,
    similar_preset,
    tensorwise,
    tensorwise_rotated,
)  # fmt: skip

__all__ = [
    "BLOCK_W", "BLOCK_X", "GEMMS", "MX_GROUPS", "PRESETS", "ROW_W", "ROW_X", "FusableRecipe", "Gemm", "Recipe",
    "RecipeName", "bf16", "blockwise", "delayed", "fnuz", "get_recipe", "groupwise", "mxfp8", "rowwise",
    "rowwise_dw_bf16", "similar_preset", "tensorwise", "tensorwise_rotated",
]  # fmt: skip
