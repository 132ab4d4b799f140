"""Open a packed model for inference."""

import os
from typing import Any

from octavo.extras import import_extra


def load(folder: str | os.PathLike[str], device: Any = "cpu", *, kv_cache: str = "auto") -> Any:
    """The transformers model of a packed folder, in evaluation mode, its linear layers running on the packed bytes.

    Args:
        folder: what `octavo pack` wrote.
        device: where the model shall be: a torch.device, or its name; "auto" is the GPU where there is one.
        kv_cache: dtype of the keys and values in `generate`: "bf16", "fp8" or "int8". "auto" is "fp8" if the folder has
            scales for it, else that of the model.

    Returns:
        The model: its own modeling code, `generate` and `config`; no BF16 copy of a packed weight.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ArtifactError: a file is not what it should be; the message names the tensor or the setting.
        ValueError: the device is not there.
        ImportError: transformers is not installed.
    """
    # `import octavo` alone does not load the packages that run a packed folder. This import is the one exception to
    # the rule that imports stand at the top of a file (tests/test_architecture.py).
    import_extra("transformers", "hf", f"octavo.load opens {os.fspath(folder)} as a model of transformers")
    from octavo.runtime.transformers_model import load_transformers

    return load_transformers(os.fspath(folder), device, kv_cache)
