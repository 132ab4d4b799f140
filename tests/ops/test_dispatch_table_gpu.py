"""PyTorch on this GPU does what dispatch.json says: it computes the lines with a library, and refuses all else."""

from itertools import product

import numpy as np
import pytest
import torch
from gemm_examples import on_gpu, wide
from gpus import poison

from octavo.numerics import Cast
from octavo.numerics.qtensor import parse_granularity
from octavo.ops import quantize
from octavo.ops.dispatch import LINES, architecture_key
from octavo.ops.launching import Operands, find_architecture
from octavo.ops.library_gemms import scaled_mm_cublaslt

pytestmark = pytest.mark.gpu

M, K, N = 256, 512, 384
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("scales", sorted({scales for _, scales in LINES}))
def test_a_line(scales, fast):
    line = LINES[architecture_key(find_architecture(torch.device("cuda"))), scales]
    granularities = [parse_granularity(each.removesuffix(" e8m0")) for each in scales.split(", ")]
    kinds = ["e8m0" if each.endswith("e8m0") else "fp32" for each in scales.split(", ")]
    suffix = "fnuz" if any("fnuz" in formats for formats in line.formats) else ""
    for formats in product(("e4m3", "e5m2"), repeat=2):
        torch.manual_seed(0)
        casts = [Cast(f + suffix, g, kind) for f, g, kind in zip(formats, granularities, kinds, strict=True)]
        a, b = (quantize(torch.randn(rows, K), cast) for rows, cast in zip((M, N), casts, strict=True))
        for name, dtype in DTYPES.items():
            arguments = Operands.of(on_gpu(a), on_gpu(b)), None, dtype, fast
            poison()
            own = name in line.out or not a.granularity.outer  # block-scaled GEMMs return BF16, which is then cast
            if f"{a.format.name} x {b.format.name}" not in line.formats or not own:
                with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as error:
                    scaled_mm_cublaslt(*arguments)
                if formats == ("e4m3", "e4m3"):
                    assert line.refusal in str(error.value)
                continue
            y, exact = scaled_mm_cublaslt(*arguments), wide(a) @ wide(b).T
            assert y.dtype == dtype
            assert np.linalg.norm(y.cpu().double().numpy() - exact) < 0.01 * np.linalg.norm(exact)
