"""Classes that `convert` gives to modules of other libraries: subclasses of an Octavo class and the module's class.

A mixed class has the name of the module's own class, so reports, `isinstance` and checkpoints see no difference. There
is one for each pair of classes. Its instances can be pickled and copied: they are rebuilt from the two classes.
"""

from functools import cache
from typing import Any


def mix_classes(ours: Any, theirs: Any) -> Any:
    """The subclass of `ours` and `theirs` with the name of `theirs`; the same class at every call."""
    return _mix_classes(ours, theirs)  # mypy takes the class of a module for unhashable


@cache
def _mix_classes(ours: Any, theirs: Any) -> Any:
    parts = (ours, *parts_of(theirs))
    members = {"__module__": theirs.__module__, "__reduce_ex__": _reduce, "_octavo_parts": parts}
    return type(theirs.__name__, (ours, theirs), members)


def parts_of(cls: Any) -> tuple[Any, ...]:
    """The classes that `mix_classes` made `cls` of, ours first; `cls` alone if it was not mixed."""
    parts: tuple[Any, ...] = cls.__dict__.get("_octavo_parts", (cls,))
    return parts


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    # By default pickle stores a class by its name, and would find the module's own class under it.
    reduced: Any = object.__reduce_ex__(module, protocol)
    return _new, parts_of(type(module)), *reduced[2:]


def _new(*parts: Any) -> Any:
    *ours, cls = parts
    for part in reversed(ours):
        cls = mix_classes(part, cls)
    return cls.__new__(cls)
