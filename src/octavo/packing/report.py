"""The report of packing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.hf.model_writer import WrittenModel
from octavo.nn.coverage import Leftover


@dataclass(frozen=True)
class PackReport(WrittenModel):
    """The packed folder that `pack` wrote.

    Attributes:
        packed: the scheme of each packed layer.
        skipped: why each other linear layer stays in BF16.
        bf16_bytes: the size of the packed layers' weights in BF16.
        packed_bytes: the size of these weights and their scales in the files.
        gains: the dB of SQNR that each weight gained by the rule mse.
        ratios: layers that readers fuse ("q, k, v") and that keep their own scales -> the largest scale over the
            smallest.
        cached: the number of attention layers whose keys and values have scales.
        lacks_tokenizer: whether the model takes text and the folder holds no tokenizer.
        unpacked_expert_bytes: the size of the experts of a mixture that stay in BF16.
        not_linear: the matrices that stay in BF16 because no linear layer holds them, such as stacks of experts.
    """

    packed: Mapping[str, str]
    skipped: Mapping[str, str]
    bf16_bytes: int
    packed_bytes: int
    gains: Mapping[str, float]
    ratios: Mapping[str, float]
    cached: int
    lacks_tokenizer: bool
    unpacked_expert_bytes: int
    not_linear: Sequence[Leftover]

    @property
    def ratio(self) -> float:
        return self.packed_bytes / self.bf16_bytes
