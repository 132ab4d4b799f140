"""Classes that `convert` gives to modules: each is a subclass of one of ours and of the class that a module has.

The mixed class has the name of the module's own class, so reports, `isinstance` and checkpoints see no difference. It
is made once for each pair. Its instances can be pickled and copied: they are rebuilt from the two classes.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def mixed(ours: Any, theirs: Any) -> Any:
    """The subclass of `ours` and `theirs` that has the name of `theirs`; the same class at every call."""
    return _mixed(ours, theirs)


def unmixed(cls: Any) -> tuple[Any, ...]:
    """The classes that `cls` was mixed of, ours first; `cls` alone where it was not mixed."""
    found: tuple[Any, ...] = cls.__dict__.get("_octavo_parts", (cls,))
    return found


@cache
def _mixed(ours: Any, theirs: Any) -> Any:
    parts = (ours, *unmixed(theirs))
    members = {"__module__": theirs.__module__, "__reduce_ex__": _reduce, "_octavo_parts": parts}
    return type(theirs.__name__, (ours, theirs), members)


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    # By default pickle stores the class by its name, under which it would find their class.
    reduced: Any = object.__reduce_ex__(module, protocol)
    return _new, unmixed(type(module)), *reduced[2:]


def _new(*parts: Any) -> Any:
    *ours, cls = parts
    for part in reversed(ours):
        cls = mixed(part, cls)
    return cls.__new__(cls)
