"""Log messages of other packages that a command hides: no user can act on them, and Octavo runs nothing that they name.

torchao reports its own compiled kernels when it is imported, which transformers does for every model.
"""

import logging

_HIDDEN = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("is an Enum subclass and is now natively supported",),  # about classes of torchao
    "torch._higher_order_ops.wrap": ("Detected that context_fn is passed",),  # `octavo.train.blocks` passes it
}


def hide_logs() -> None:
    """Hide these messages in this process. All others are shown."""
    for name in _HIDDEN:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not any(phrase in str(record.msg) for phrase in _HIDDEN[record.name])
