"""The scales of a KV cache: for each attention layer one for the keys, after the rotation, and one for the values.

They multiply, as the scales of weights do: k ≈ k_q * k_scale. In memory they are named <attention>.k_scale and
<attention>.v_scale, float32 [1], as in compressed-tensors. Files may have another dtype
(`octavo.artifact.packed.scales`) and other names (`kv_names`).
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError

K_SCALE, V_SCALE = "k_scale", "v_scale"
KvScales = dict[str, tuple[Tensor, Tensor]]


def attentions(linears: Iterable[str]) -> list[str]:
    """The names of the attention layers, which are the parents of the layers k_proj."""
    return [name.removesuffix(".k_proj") for name in linears if name.endswith(".k_proj")]


def kv_names(name: str) -> list[str]:
    """The names in memory of a tensor of a file, if it is a scale of a cache; else its own name.

    The names in files are <attention>.k_scale, <attention>.k_proj.k_scale (ModelOpt), <attention>.attn.k_scale (vLLM),
    <attention>.k_proj.output_scale (older writers), the same for values, and <attention>.kv_scale, which is both
    scales.
    """
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if leaf in (K_SCALE, V_SCALE) and (last == f"{leaf[0]}_proj" or (last == "attn" and parent.endswith("attn"))):
        return [f"{parent}.{leaf}"]
    if leaf == "kv_scale":
        return [f"{module}.{K_SCALE}", f"{module}.{V_SCALE}"]
    if leaf == "output_scale" and last in ("k_proj", "v_proj"):
        return [f"{parent}.{last[0]}_scale"]
    return [name]


def is_kv_scale(name: str) -> bool:
    """Whether the tensor `name`, in memory, is the scale of a cache."""
    return name.endswith((f".{K_SCALE}", f".{V_SCALE}"))


def take_kv_scales(tensors: dict[str, Tensor], linears: Iterable[str], declared: bool, where: Path) -> KvScales:
    """Remove the scales of each attention layer from `tensors`, and check them.

    Args:
        tensors: of a folder, by their names in memory.
        linears: every linear layer, by its name on disk.
        declared: whether the folder's configuration says that it has such scales.
        where: the folder, for the message.

    Returns:
        The scales of keys and values, float32 [1], by the name of the attention layer; empty if none is declared.

    Raises:
        ArtifactError: a scale is missing, has another shape or dtype, is not finite and positive, belongs to no
            attention layer, or exists though none is declared.
    """
    found = {name: tensors.pop(name) for name in list(tensors) if is_kv_scale(name)}
    if found and not declared:
        raise ArtifactError(f"{where}: {next(iter(found))} is there, but no KV cache is declared: pack it again")
    if not declared:
        return {}
    names = attentions(linears)
    if unknown := sorted({name.rpartition(".")[0] for name in found} - set(names)):
        raise ArtifactError(f"{where}: {unknown[0]} has the scale of a KV cache, and is no attention layer with k_proj")
    return {name: (_checked(name, K_SCALE, found, where), _checked(name, V_SCALE, found, where)) for name in names}


def _checked(attention: str, leaf: str, found: dict[str, Tensor], where: Path) -> Tensor:
    name = f"{attention}.{leaf}"
    scale = found.get(name)
    if scale is None:
        raise ArtifactError(f"{where}: {name} is missing, though a KV cache is declared: pack it again")
    if scale.dtype != torch.float32 or scale.shape != (1,):
        raise ArtifactError(f"{where}: {name} must be one float32 number, it is {scale.dtype} {list(scale.shape)}")
    if not (scale.isfinite().all() and (scale > 0).all()):
        raise ArtifactError(f"{where}: {name} must be finite and positive, it is {scale.item():g}: pack it again")
    return scale
