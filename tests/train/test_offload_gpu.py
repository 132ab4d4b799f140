"""The memory of a GPU that offloading and moments in eight bits save, and that the losses stay what they are."""

import pytest

from octavo.models import LlamaConfig, build

pytestmark = pytest.mark.gpu

# 8 blocks; the activations of 128 tokens are small beside the weights
SIZES = {"width": 1024, "heads": 8, "kv_heads": 8, "mlp_width": 4096, "layers": 8, "context": 128}
RUN = SIZES | {
    "recipe": "bf16", "batch": 1, "steps": 3, "evaluate_every": 3, "device": "cuda",
    "learning_rate": 1e-4, "min_learning_rate": 1e-5,
}  # fmt: skip


def parameters():
    config = LlamaConfig(vocabulary=256, tied=True, **SIZES)
    return sum(p.numel() for p in build(config).parameters())


@pytest.fixture
def measured(spawn, records, tmp_path):
    """measured(name, **settings): the losses of a run and the peak of its memory in bytes a parameter."""

    def run(name, **settings):
        process = spawn(**RUN, out=str(tmp_path / name), **settings)
        _, error = process.communicate(timeout=400)
        assert process.returncode == 0, error
        peak = max(records(tmp_path / name, "peak_memory").values())
        return list(records(tmp_path / name).values()), peak / parameters()

    return run


def test_weights_gradients_and_moments_leave_the_gpu(measured):
    losses, peak = measured("plain")
    moved, low = measured("offload", optimizer={"offload": True})
    assert moved == pytest.approx(losses, rel=1e-3)  # AdamW runs on the CPU
    assert 16 < peak < 22  # weight, gradient and two moments in FP32, and the BF16 copies of the weights
    # Left: BF16 copies of the weights, which autocast saves for backward, and FP32 weights and gradients of 2 to 3 of 8
    # blocks. The peak without offloading is at the end of backward, where the copies are gone.
    assert peak - low > 10


def test_moments_in_eight_bits_take_two_bytes(measured):
    pytest.importorskip("torchao")
    losses, peak = measured("plain")
    found, low = measured("8bit", optimizer={"state": "8bit"})
    assert found == pytest.approx(losses, rel=1e-2)
    # 8 bytes become 2, and 1/32 of scales. The peak is in the first step, while the update is compiled: a byte above
    # that of later steps, with weights of this size.
    assert 4.5 < peak - low < 6.1


def test_bf16_weights_train_on_a_gpu(measured):
    pytest.importorskip("torchao")
    losses, peak = measured("plain")
    found, low = measured("bf16", accumulate=2, optimizer={"weights": "bf16", "state": "fp8", "offload": True})
    assert found == pytest.approx(losses, rel=2e-2)
    assert low < peak / 2
