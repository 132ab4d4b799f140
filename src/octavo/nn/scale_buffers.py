"""Modules whose buffers hold the state of scales, in dtypes that a cast of the model does not change."""

from typing import Any

from torch import nn


class ScaleBuffers(nn.Module):
    """A module with buffers that begin as zeros and keep their dtypes.

    `model.bfloat16()` casts the buffers of other modules, and `to_empty` gives those on the meta device memory that is
    not zero.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self.named_buffers(recurse=False))
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self.get_buffer(name)
            if old.is_meta and not new.is_meta:
                new.zero_()
            if new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return result
