"""Choosing the device of a command or a function."""

import torch


def choose_device(device: str | torch.device) -> torch.device:
    """The device that `device` names. The function checks that PyTorch can use it.

    Args:
        device: "auto" (the GPU where there is one, else the CPU), "cpu", "cuda", "cuda:N", any other name that PyTorch
            knows, or a torch.device.

    Raises:
        ValueError: no device has this name, or it is a GPU that PyTorch does not see here.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if chosen.type != "cuda":
        return chosen
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not seen:
        raise ValueError(f"device {device} was asked for, but this torch ({torch.__version__}) sees no GPU: use cpu")
    if chosen.index is not None and chosen.index >= seen:
        last = f"cuda:{seen - 1}"
        raise ValueError(f"device {device} was asked for, but the GPUs that torch sees end with {last}: use {last}")
    return chosen
