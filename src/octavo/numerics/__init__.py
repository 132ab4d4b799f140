"""Number formats and the arithmetic of quantization, in plain PyTorch without torch.nn."""

from octavo.numerics.cast import Cast
from octavo.numerics.codec import decode, encode
from octavo.numerics.formats import FORMATS, Format, get_format
from octavo.numerics.granularity import ROW, TENSOR, Granularity, block, group
from octavo.numerics.qtensor import QTensor
from octavo.numerics.rotation import hadamard
from octavo.numerics.scaling import History, scale_from_amax

__all__ = [
    "FORMATS",
    "ROW",
    "TENSOR",
    "Cast",
    "Format",
    "Granularity",
    "History",
    "QTensor",
    "block",
    "decode",
    "encode",
    "get_format",
    "group",
    "hadamard",
    "scale_from_amax",
]
