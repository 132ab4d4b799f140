"""Octavo: FP8 for PyTorch over the whole life of a model.

A name is imported from its module when it is first asked for, so that a command such as `octavo plan`, which computes
with shapes alone, does not import the modules that train and pack.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:  # the same names as in _MODULES; a test compares them
    import octavo.scales  # noqa: F401
    from octavo.inspection.dtype_report import dtype_flow
    from octavo.loading import load
    from octavo.nn import Conversion, Linear, convert, restore
    from octavo.numerics import Cast, History, QTensor
    from octavo.recipe import Gemm, Recipe
    from octavo.tensor import quantize
    from octavo.watching import watch

__all__ = [
    "Cast",
    "Conversion",
    "Gemm",
    "History",
    "Linear",
    "QTensor",
    "Recipe",
    "__version__",
    "convert",
    "dtype_flow",
    "load",
    "quantize",
    "restore",
    "watch",
]

_MODULES = {
    "octavo.inspection.dtype_report": ("dtype_flow",),
    "octavo.loading": ("load",),
    "octavo.nn": ("Conversion", "Linear", "convert", "restore"),
    "octavo.numerics": ("Cast", "History", "QTensor"),
    "octavo.recipe": ("Gemm", "Recipe"),
    "octavo.tensor": ("quantize",),
    "octavo.watching": ("watch",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every name for one of the module

    def __getattr__(name: str) -> Any:
        """A public name, or a package such as `octavo.nn`, imported at the first use."""
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        elif not name.startswith("_") and find_spec(f"octavo.{name}"):
            value = import_module(f"octavo.{name}")
        else:
            raise AttributeError(f"module 'octavo' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
