"""The Hadamard rotation of the rows of a tensor."""

from octavo.ops.rotation.op import rotate

__all__ = ["rotate"]
