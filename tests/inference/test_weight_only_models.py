"""Packed models whose GEMMs are weight-only: by their scheme, or because a GPU has no FP8 GEMM for it."""

from collections import Counter

import pytest
import torch
from metrics import distance
from operation_counts import operations
from packed_experts import packed_experts, routed
from packed_layers import packed_layer
from runtime_examples import ARCHITECTURES, logits
from tiny_models import open_theirs, with_slow

import octavo
from octavo.checkpoint import scheme as gemm_path
from octavo.checkpoint.scheme import CHANNEL, INT8, MX, SCHEMES, STATIC, TENSORWISE, WEIGHT, find_gemm, input_cast
from octavo.inference import opening
from octavo.inference import packed_experts as packed_experts_module
from octavo.inference.opening import gemm_notes
from octavo.inference.packed_experts import expert_input_cast
from octavo.nn import Experts
from octavo.numerics import ROW, Cast, Granularity, group
from octavo.ops import Backend, dispatch
from octavo.ops.launching import ARCHITECTURES as GPUS
from octavo.packing import unpack
from octavo.rates.measured import experts_like, measured_speeds, slower_experts_note, slower_note

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_fp8_gemm(monkeypatch):
    """The device has no FP8 GEMM, as an Ampere GPU has none."""
    monkeypatch.setattr("octavo.checkpoint.scheme.product_backend", lambda *args: Backend("none", "no FP8 GEMM here"))
    monkeypatch.setattr(gemm_path, "_find_cached", gemm_path._input_cast)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_the_weight_is_rounded(made, tmp_path, name):
    model = octavo.load(made(name, scheme="weight"))
    unpack(made(name, scheme="weight"), tmp_path / "unpacked")
    exact, wide = (logits(open_theirs(folder)) for folder in (made(name), tmp_path / "unpacked"))
    assert distance(logits(model), wide) < 0.03  # both round activations to BF16
    assert distance(logits(model.half()), exact) < 0.15
    assert distance(logits(model.float()), exact) < 0.15


def test_a_folder_of_eight_bit_inputs_runs_weight_only_where_no_fp8_gemm_is(made, no_fp8_gemm, monkeypatch):
    monkeypatch.setattr("octavo.inference.opening.is_gpu", lambda device: True)
    with pytest.warns(UserWarning, match=r"14 layers of the scheme channel \(no FP8 GEMM here: weight-only\)"):
        model = octavo.load(made("llama", scheme="channel"))
    assert operations(lambda: logits(model))["octavo::weight_only_mm"] == 8
    assert torch.equal(logits(model), logits(octavo.load(made("llama", scheme="weight"))))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in ("static", "int8")])
def test_every_scheme_of_fp8_has_this_path(scheme, no_fp8_gemm):
    layer = packed_layer(scheme)
    x = torch.randn(3, layer.in_features)
    exact = x.double() @ layer.packed_weight().dequantize().double().t() + layer.bias.double()
    assert distance(layer(x), exact) < 1e-6


def test_the_choice_by_scheme_and_device(monkeypatch):
    assert input_cast(WEIGHT, CPU) is None
    assert input_cast(CHANNEL, CPU) == CHANNEL.inputs
    ada, ampere = GPUS["ada"], GPUS["ampere"]
    for scheme in SCHEMES.values():
        cast, backend = find_gemm(scheme, ada)
        assert (cast, backend.name == "none") == (scheme.inputs, False)
        cast, backend = find_gemm(scheme, ampere)
        assert cast == (scheme.inputs if scheme is INT8 else None)
        assert backend.name == dispatch.find_int8_backend(ampere).name if scheme is INT8 else "triton"
    assert find_gemm(TENSORWISE, ada)[1].reason.startswith("row x row")
    assert find_gemm(STATIC, ada)[1].reason.startswith("tensor x tensor")
    monkeypatch.setattr("octavo.checkpoint.scheme.find_weight_only_backend", lambda *_: Backend("triton", ""))
    monkeypatch.setattr(
        "octavo.checkpoint.scheme.product_backend",
        lambda x, w, device: Backend("none" if w == MX.weight else "cublaslt", "why"),
    )
    note = gemm_notes(Counter([CHANNEL, MX, MX, WEIGHT]), CUDA)[0]
    assert note.endswith("inputs that are not quantized: 2 layers of the scheme mx (why: weight-only)")
    assert gemm_notes(Counter([CHANNEL, WEIGHT]), CUDA)[0] == ""


def test_a_note_names_the_layers_that_run_in_bf16_at_many_tokens(monkeypatch):
    names = {"mx": "dequantized", "channel": "cublaslt", "weight": "triton"}
    monkeypatch.setattr(
        opening.schemes, "find_gemm", lambda scheme, device: (scheme.inputs, Backend(names[scheme.name], ""))
    )
    note = gemm_notes(Counter([CHANNEL, MX, MX, WEIGHT]), CUDA)[1]
    assert "slower than BF16" in note
    assert "2 layers of the scheme mx above 256 tokens; 1 layer of the scheme weight above 16 tokens. " in note
    assert gemm_notes(Counter([CHANNEL]), CUDA)[1] == ""
    assert gemm_notes(Counter([WEIGHT]), CPU)[1] == ""


def test_experts_run_so_where_no_grouped_gemm_is(monkeypatch):
    monkeypatch.setattr(packed_experts_module, "input_cast", lambda scheme, device: scheme.inputs)
    monkeypatch.setattr(packed_experts_module, "find_grouped_backend", lambda *_: Backend("none", "not a Hopper"))
    weight = torch.empty(4, 32, 64)
    schemes = (CHANNEL, TENSORWISE, STATIC, MX)
    for scheme in schemes:
        assert expert_input_cast(scheme, weight, CUDA) is None
        assert expert_input_cast(scheme, weight, CPU) == scheme.inputs
    asked = []
    monkeypatch.setattr(
        packed_experts_module, "find_grouped_backend", lambda *args: asked.append(args[2:]) or Backend("triton", "")
    )
    for scheme in schemes:
        assert expert_input_cast(scheme, weight, CUDA) == scheme.inputs
        assert expert_input_cast(scheme, weight[:, :30], CUDA) is None
    assert asked[0::2] == [(ROW, ROW), (ROW, ROW), (ROW, ROW), (group(32), group(32))]


def test_experts_without_a_cast_are_the_widened_ones(no_fp8_gemm):
    x, index, weight = routed()
    for scheme in ("channel", "static", "block"):
        experts, _, _ = packed_experts((scheme, scheme))
        wide = Experts(4, x.shape[1], 128).bfloat16()
        with torch.no_grad():
            wide.gate_up_proj.copy_(experts.gate_up_proj.dequantize(torch.bfloat16))
            wide.down_proj.copy_(experts.down_proj.dequantize(torch.bfloat16))
            assert distance(experts(x, index, weight), wide(x, index.clamp(max=3), weight * (index < 4))) < 0.01


@pytest.mark.parametrize("name", with_slow(SCHEMES, ("channel", "weight", "int8")))
def test_the_choice_is_traced_and_makes_no_cast_meanwhile(name, monkeypatch):
    """torch.compile of torch 2.11 refuses a `Cast` or a `Granularity` that is made in the code that it traces."""

    def refuse(self):
        raise AssertionError(f"{type(self).__name__} is made in traced code")

    for kind in (Cast, Granularity):
        monkeypatch.setattr(kind, "__post_init__", refuse)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        torch.compiler.reset()

        def choose(x):
            casts = input_cast(SCHEMES[name], CUDA), expert_input_cast(SCHEMES[name], x, CUDA)
            return x + 2 - sum(cast is None for cast in casts)

        weight_only = name == "weight" or (capability == (8, 0) and name != "int8")
        found = torch.compile(choose, fullgraph=True, backend="eager")(torch.zeros(2, 32, 64))
        assert found[0, 0, 0].item() == 2 - weight_only - (weight_only or name == "int8")


def test_a_note_names_what_was_measured_to_be_slower_on_this_gpu(monkeypatch):
    layers, (sizes, experts) = measured_speeds(), experts_like(4096 * 14336)
    for gpu in ("NVIDIA H200", "NVIDIA L40S"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        for scheme in SCHEMES.values():
            note = slower_note(Counter([scheme]), CUDA)
            of_experts = slower_experts_note(scheme, (sizes["mlp_width"], sizes["width"]), CUDA)
            for speeds, said in ((layers, note), (experts, of_experts)):
                slower = [gpu == "NVIDIA H200" and found.get(scheme.name, 1) < 1 for found in speeds.values()]
                assert [f"x at {tokens} token" in said for tokens in speeds] == slower
