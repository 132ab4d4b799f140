"""Open a packed model for inference."""

import os
from typing import Any


def load(folder: str | os.PathLike[str], device: Any = "cpu") -> Any:
    """The transformers model of a packed folder, in evaluation mode, its linear layers running on the packed bytes.

    Args:
        folder: what `octavo pack` wrote.
        device: where the model shall be: a torch.device, or its name; "auto" is the GPU where there is one.

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
    from octavo.runtime import load_transformers

    return load_transformers(os.fspath(folder), device)
