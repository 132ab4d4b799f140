import numpy as np
import pytest
import torch

from octavo.numerics import FORMATS, ROW, TENSOR, QTensor, block, group

E4M3 = FORMATS["e4m3"]


def data(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).mul(50).to(torch.float8_e4m3fn)


def test_dtype_must_be_the_formats():
    with pytest.raises(TypeError, match=r"e5m2 data must be torch\.float8_e5m2, got torch\.float8_e4m3fn"):
        QTensor(data(3, 5), torch.ones(3, 1), FORMATS["e5m2"], ROW)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_scale_dtype_must_be_float32_or_e8m0(dtype):
    with pytest.raises(TypeError, match=f"a scale must be float32 or float8_e8m0fnu, got {dtype}"):
        QTensor(data(3, 5), torch.ones(3, 1, dtype=dtype), E4M3, ROW)


@pytest.mark.parametrize(
    ("granularity", "shape", "required"),
    [
        (ROW, (3,), r"\[3, 1\]"),
        (ROW, (1, 3), r"\[3, 1\]"),
        (TENSOR, (), r"\[1, 1\]"),
        (group(2), (3, 2), r"\[3, 3\]"),
        (block(2, 2), (3, 5), r"\[2, 3\]"),
    ],
)
def test_scale_shape_must_be_the_granularitys(granularity, shape, required):
    with pytest.raises(ValueError, match=rf"scales of data \[3, 5\] must have shape {required}, got"):
        QTensor(data(3, 5), torch.ones(shape), E4M3, granularity)


def test_data_and_scale_must_share_a_device():
    with pytest.raises(ValueError, match="data is on cpu and its scale on meta"):
        QTensor(data(3, 5), torch.ones(3, 1, device="meta"), E4M3, ROW)


def test_fields_cannot_be_set():
    q = QTensor(data(3, 5), torch.ones(3, 1), E4M3, ROW)
    with pytest.raises(AttributeError):
        q.scale = torch.zeros(3, 1)


@pytest.mark.parametrize("granularity", [TENSOR, ROW, group(4), block(2, 3)], ids=lambda g: g.name)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_dequantize_multiplies_data_by_its_scale(granularity, scale_dtype):
    raw = data(7, 10)
    shape = granularity.scale_shape((7, 10))
    scale = torch.exp2(torch.arange(np.prod(shape)) - 3.0).view(shape)
    q = QTensor(raw, scale.to(scale_dtype), E4M3, granularity)
    rows, cols = granularity.block((7, 10))
    expected = np.array([[raw[i, j].item() * scale[i // rows, j // cols].item() for j in range(10)] for i in range(7)])
    assert q.shape == (7, 10)
    assert np.array_equal(q.dequantize().numpy(), expected.astype(np.float32))
    half = q.dequantize(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, torch.from_numpy(expected).to(torch.bfloat16))


def test_dequantize_rounds_to_the_dtype_once():
    scale = torch.tensor([[1.0 + 2.0**-9]])  # 1.125 * scale lies beside a bf16 tie that rounding scale first would miss
    raw = torch.tensor([[1.125]]).to(torch.float8_e4m3fn)
    exact = 1.125 * (1 + 2.0**-9)
    assert QTensor(raw, scale, E4M3, TENSOR).dequantize(torch.bfloat16).item() == torch.tensor(exact).bfloat16().item()


def test_nan_scale_poisons_its_block_and_no_other():
    q = QTensor(data(3, 5), torch.tensor([[1.0], [torch.nan], [1.0]]), E4M3, ROW)
    assert q.dequantize().isnan().any(1).tolist() == [False, True, False]
    assert q.dequantize()[1].isnan().all()


@pytest.mark.parametrize("granularity", [TENSOR, block(4, 4)], ids=lambda g: g.name)
def test_t_transposes_what_it_stands_for_without_moving_bytes(granularity):
    raw = data(6, 10)
    shape = granularity.scale_shape((6, 10))
    q = QTensor(raw, torch.arange(1.0, 1 + np.prod(shape)).view(shape), E4M3, granularity)
    assert torch.equal(q.t().dequantize(), q.dequantize().t())
    assert q.t().data.data_ptr() == raw.data_ptr()


@pytest.mark.parametrize("granularity", [ROW, group(4), block(2, 4)], ids=lambda g: g.name)
def test_t_refuses_granularities_that_do_not_transpose(granularity):
    q = QTensor(data(6, 10), torch.ones(granularity.scale_shape((6, 10))), E4M3, granularity)
    with pytest.raises(ValueError, match=rf"\[6, 10\] with {granularity.name} scales: quantize the transposed matrix"):
        q.t()


def test_t_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match="only a matrix"):
        QTensor(data(2, 3, 5), torch.ones(1, 1, 1), E4M3, TENSOR).t()
