"""The layouts of packed folders. Each module here but `layout`, which has the registry, registers its own."""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
