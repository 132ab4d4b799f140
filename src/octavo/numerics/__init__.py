"""Number formats and the arithmetic of quantization, in plain PyTorch without torch.nn."""

from octavo.numerics.formats import FORMATS, Format, decode, encode, get_format
from octavo.numerics.qtensor import ROW, TENSOR, Cast, Granularity, QTensor, block, group
from octavo.numerics.scaling import History, hadamard, scale_from_amax

__all__ = [
    "FORMATS", "ROW", "TENSOR", "Cast", "Format", "Granularity", "History", "QTensor", "block", "decode", "encode",
    "get_format", "group", "hadamard", "scale_from_amax",
]  # fmt: skip
