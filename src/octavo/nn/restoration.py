"""Undo `octavo.convert`: give every module its own class back, and remove the attributes that were added."""

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from octavo.nn.diffusers_fusion import DiffusionBlock
from octavo.nn.expert_conversion import restore_experts
from octavo.nn.fast_path import CallingEncoder, CallingEncoderLayer
from octavo.nn.layer_limits import check_module
from octavo.nn.linear import RecipeLayer, restore_layer
from octavo.nn.mixed_class import parts_of
from octavo.nn.mlp import SwiGLU
from octavo.nn.module_class import is_fsdp_module
from octavo.nn.timm_fusion import VisionBlock
from octavo.nn.transformers_fusion import DecoderLayer

# Our part of a mixed class -> the attributes that `convert` added with it.
_ADDED: dict[type, tuple[str, ...]] = {
    DecoderLayer: ("qkv",),
    SwiGLU: ("weight_cache",),
    VisionBlock: ("fused_qkv", "fused_mlp"),
    DiffusionBlock: ("fused_qkv", "fused_q", "fused_mlp"),
    CallingEncoderLayer: (),
    CallingEncoder: (),
}


def restore(model: nn.Module) -> list[str]:
    """Undo `octavo.convert`, in place: the model computes the same bits as before the conversion.

    Parameters, `state_dict`, hooks and ties stay as they are, since `convert` changed none of them. The scale histories
    of `delayed` are deleted: save `octavo.scale_state(model)` first if you need them. A model that was not converted
    stays as it is. Leave the block of `octavo.cast_once` first.

    Returns:
        The names of the restored modules: linear layers, and the modules that ran them fused.

    Raises:
        TypeError: `model` is no module.
        ValueError: a converted layer was parametrized, or `fully_shard` was called on it. Nothing is changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = octavo.convert(model, "rowwise")
        >>> octavo.restore(model)
        ['0']
    """
    check_module(model, "restore")
    for name, module in model.named_modules():
        if isinstance(module, RecipeLayer) and is_fsdp_module(module):
            raise ValueError(
                f"{name} was converted and then made a unit of its own by fully_shard, which changed its class again: "
                "restore works on a model before fully_shard, or on one sharded by larger units"
            )
        if isinstance(module, RecipeLayer) and is_parametrized(module):
            raise ValueError(
                f"{name} was converted and then parametrized, which changed its class again: call "
                "torch.nn.utils.parametrize.remove_parametrizations first, and parametrize the restored layer"
            )
    return [name for name, module in list(model.named_modules()) if _restore(module)]


def _restore(module: nn.Module) -> bool:
    return any(undo(module) for undo in (restore_layer, restore_experts, _unmix))


def _unmix(module: nn.Module) -> bool:
    ours, *theirs = parts_of(type(module))
    if not theirs or ours not in _ADDED or _is_parallel(module):
        return False
    for name in _ADDED[ours]:
        delattr(module, name)
    (module.__class__,) = theirs
    return True


def _is_parallel(module: nn.Module) -> bool:
    """Whether the layers of `module` are parallel, which its own class cannot run."""
    return isinstance(module, DecoderLayer | SwiGLU) and any("parallel" in m.__dict__ for m in module.modules())
