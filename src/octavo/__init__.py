"""Octavo: FP8 for PyTorch over the whole life of a model.

A name is imported from its module at its first use. So a command such as `octavo plan`, which computes with shapes
alone, does not import the modules that train and pack.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from octavo.version import __version__

if TYPE_CHECKING:  # the same names as in _MODULES; a test compares them
    from transformers import PreTrainedModel

    import octavo.scales  # noqa: F401
    from octavo.inspection.dtype_report import dtype_flow
    from octavo.nn import Conversion, Linear, convert, restore
    from octavo.numerics import Cast, QTensor
    from octavo.recipe import Gemm, Recipe
    from octavo.tensor import quantize
    from octavo.verification.live_check import check
    from octavo.watching.collection import watch

__all__ = [
    "Cast",
    "Conversion",
    "Gemm",
    "Linear",
    "QTensor",
    "Recipe",
    "__version__",
    "check",
    "convert",
    "dtype_flow",
    "load",
    "quantize",
    "restore",
    "watch",
]

_MODULES = {
    "octavo.inspection.dtype_report": ("dtype_flow",),
    "octavo.nn": ("Conversion", "Linear", "convert", "restore"),
    "octavo.numerics": ("Cast", "QTensor"),
    "octavo.recipe": ("Gemm", "Recipe"),
    "octavo.tensor": ("quantize",),
    "octavo.verification.live_check": ("check",),
    "octavo.watching.collection": ("watch",),
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


def load(
    folder: str | os.PathLike[str],
    device: Any = "cpu",
    *,
    kv_cache: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"] = "auto",
    attention: Literal["bf16", "fp8"] = "bf16",
    head: Literal["bf16", "rowwise"] = "bf16",
) -> PreTrainedModel:
    """Open a packed folder as a model of transformers. Its packed layers compute with the bytes of the folder.

    Args:
        folder: a folder that `octavo pack` wrote.
        device: for the model: a torch.device, or its name; "auto" takes the GPU if there is one.
        kv_cache: dtype of the keys and values in `generate`: "bf16", "fp16", "fp32", "fp8" or "int8". "auto" is "fp8"
            if the folder has scales for it, else the dtype of the model.
        attention: of prompts in `generate`: "bf16" or "fp8". "fp8" attends in E4M3 where that is faster: texts of 4,096
            tokens and more without padding, heads of 128 elements, on a Hopper GPU with the extra `cudnn`. Other
            prompts attend in BF16. If the GPU, its libraries or the size of the heads exclude FP8, a warning says so.
        head: of a language model. "rowwise" rounds its weight to E4M3 by row, and its inputs by token, as the scheme
            `channel`: a decoding step then reads half its bytes. What this costs in quality was not measured.

    Returns:
        The model in evaluation mode, of the class that config.json names, with its `generate` and `config`. Its packed
        layers hold the bytes and scales of the folder, and everything else is BF16.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ArtifactError: a file is damaged or does not fit; the message names the tensor or the setting.
        ValueError: the device does not exist, the dtype, the attention or the head is unknown, or one of them is given
            for a model that is no language model.
        ImportError: transformers is not installed.

    Example:

        model = octavo.load("packed/first", "auto")
        ids = model.generate(**inputs, max_new_tokens=20)     int64 [B, T + up to 20]
    """
    # `import octavo` alone does not load the packages that run a packed folder. These imports are an exception to the
    # rule that imports stand at the top of a file (tests/test_architecture.py).
    from octavo.util import import_extra

    import_extra("transformers", "hf", f"octavo.load opens {os.fspath(folder)} as a model of transformers")
    from octavo.inference.opening import load_transformers

    return load_transformers(os.fspath(folder), device, kv_cache, attention, head)


def __dir__() -> list[str]:
    return sorted(__all__)
