"""Questions about the class of a module, answered by its name: to import FSDP or a library of models takes long."""

from typing import Any

from torch import nn


def own_class(module: nn.Module) -> Any:
    """The class of `module`, before `fully_shard` made it a subclass of `FSDPModule` and of its own class."""
    classes = type(module).__mro__
    names = [cls.__name__ for cls in classes]
    return classes[names.index("FSDPModule") + 1] if "FSDPModule" in names else classes[0]


def class_name(module: nn.Module) -> str:
    """The name of the module's own class."""
    name: str = own_class(module).__name__
    return name


def library_of(module: nn.Module) -> str:
    """The name of the library that has the module's own class."""
    name: str = own_class(module).__module__
    return name.partition(".")[0]


def is_of_library(module: nn.Module, library: str, name: str) -> bool:
    """Whether the module's own class is the class `name` of a library."""
    return library_of(module) == library and class_name(module) == name


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether FSDP manages this module."""
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)
