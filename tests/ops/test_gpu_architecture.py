"""The architecture of a GPU by its compute capability."""

import pytest
import torch

from octavo.ops.gpu_architecture import AMD, ARCHITECTURES, NVIDIA, architecture_of, find_architecture


@pytest.mark.parametrize(
    ("capability", "key"),
    [
        ((7, 5), "older"),
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 7), "ampere"),
        ((8, 9), "ada"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((10, 3), "blackwell"),
        ((11, 0), "blackwell"),
        ((12, 0), "rtx_blackwell"),
        ((12, 1), "rtx_blackwell"),
        ((13, 0), "unknown"),
    ],
)
def test_nvidia(capability, key):
    assert architecture_of(capability).key == key


@pytest.mark.parametrize(
    ("capability", "key"),
    [
        ((9, 0), "amd_older"),
        ((9, 4), "mi300"),
        ((9, 5), "mi350"),
        ((11, 0), "amd_other"),
        ((12, 0), "rdna4"),
        ((12, 5), "amd_newer"),
    ],
)
def test_amd(capability, key):
    assert architecture_of(capability, amd=True).key == key


def test_the_device_and_the_build_of_pytorch_decide(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 5))
    assert find_architecture(torch.device("cuda")).key == "hopper"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert find_architecture(torch.device("cuda")).key == "mi350"


def test_tables_are_in_order_and_only_hopper_is_measured():
    for table in (NVIDIA, AMD):
        assert [each.lowest for each in table] == sorted({each.lowest for each in table})
    assert [key for key, each in ARCHITECTURES.items() if each.measured] == ["hopper"]
