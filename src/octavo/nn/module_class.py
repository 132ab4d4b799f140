"""Questions about the class of a module, answered by its name: to import FSDP or a library of models takes long."""

from torch import nn


def class_name(module: nn.Module) -> str:
    """The name of the class that a module had before `fully_shard` made it a subclass."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if is_fsdp_module(module) else name


def is_of_library(module: nn.Module, library: str, name: str) -> bool:
    """Whether `module` is an instance of the class `name` of a library."""
    return type(module).__module__.startswith(f"{library}.") and class_name(module) == name


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether FSDP manages this module."""
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)
