"""The rules of octavo doctor: each fires on the combination that it names, and none on a machine without it."""

from dataclasses import replace

import pytest
import torch

from octavo.inspection.doctor import Facts, driver_version, judge, read_versions

FINE = Facts(environment={}, driver="580.159.03", cuda="13.0", sees_gpu=True, interfaces=("lo", "eth0"))
BAD = [
    ({"sees_gpu": False, "cuda": ""}, "torch without CUDA", "install a build with CUDA"),
    ({"sees_gpu": False, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "hidden GPU", "unset it"),
    ({"sees_gpu": False, "environment": {"CUDA_VISIBLE_DEVICES": "-1"}}, "hidden GPU", "unset it"),
    ({"sees_gpu": False}, "no GPU", "nvidia-smi"),
    ({"sees_gpu": False, "driver": "535.54"}, "old driver", "install driver 580 or newer"),
    ({"triton": False}, "no Triton", "pip install triton"),
    ({"compiler": False}, "no C compiler", "install gcc"),
    ({"tf32": False}, "TF32 is off", 'set_float32_matmul_precision("high")'),
    ({"extensions": ("_C.cpython-310-x86_64-linux-gnu.so", "_C.abi3.so")}, "torchao for another Python", "nothing"),
    ({"environment": {"NCCL_SOCKET_IFNAME": "ib0"}}, "no such network interface", "name one of these"),
    ({"environment": {"GLOO_SOCKET_IFNAME": "=eth1"}}, "no such network interface", "name one of these"),
    ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "environment", "unset it"),
]


@pytest.mark.parametrize(("facts", "name", "fix"), BAD)
def test_a_bad_combination_is_named_with_its_fix(facts, name, fix):
    (problem,) = judge(replace(FINE, **facts))
    assert problem.name == name
    assert fix in problem.fix
    assert name != "torchao for another Python" or "for Python 3.10, this is 3.12: " in problem.found


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"driver": "", "cuda": "", "sees_gpu": False, "triton": False, "compiler": False, "tf32": False},  # no GPU
        {"cuda": "12.8", "driver": "525.60"},
        {"cuda": "", "driver": ""},  # ROCm
        {"environment": {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_SOCKET_IFNAME": "eth", "CUDA_VISIBLE_DEVICES": "0"}},
        {"environment": {"GLOO_SOCKET_IFNAME": "^docker"}},
        {"extensions": ("_C.cpython-312-x86_64-linux-gnu.so", "_C_2.cpython-310-x86_64-linux-gnu.so")},
    ],
)
def test_a_machine_without_a_problem_has_none(facts):
    assert judge(replace(FINE, **facts)) == []


def test_the_driver_is_read_from_its_file(monkeypatch, tmp_path):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module  580.159.03  Release Build\nGCC version: gcc 13.3.0\n"
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr("octavo.inspection.doctor._DRIVER", tmp_path / "version")
    assert driver_version() == "580.159.03"
    monkeypatch.setattr("octavo.inspection.doctor._DRIVER", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() == ""


def test_the_toolkit_is_that_of_nvcc_on_the_path(monkeypatch, tmp_path):
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert read_versions(torch.device("cpu"))["toolkit"] == "12.8"
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    assert "toolkit" not in read_versions(torch.device("cpu"))
