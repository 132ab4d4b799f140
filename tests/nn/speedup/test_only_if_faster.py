"""`convert(..., only_if_faster=True)` leaves in BF16 the layers that FP8 would not speed up."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from speedup_examples import NATIVE, UNKNOWN, table_of
from torch import Tensor, nn

import octavo
from octavo.nn import conversion
from octavo.nn.only_if_faster import cache_path, hides_launching, write_table
from octavo.ops import Backend


def mixed() -> nn.ModuleDict:
    with torch.device("meta"):
        wide, narrow, head = nn.Linear(2048, 4096), nn.Linear(2048, 1024), nn.Linear(2048, 4096)
        return nn.ModuleDict({"wide": wide, "narrow": narrow, "lm_head": head})


def test_each_layer_is_judged_by_its_sizes(pretend: Callable) -> None:
    pretend(UNKNOWN)
    write_table(cache_path(UNKNOWN), table_of(lambda m, k, n: 1.43 if n == 4096 else 0.93))
    model = mixed()
    report = octavo.convert(model, only_if_faster=True, tokens=32768)
    assert report.converted == ["wide"]
    assert report.skipped == {"narrow": "0.93x: left in BF16", "lm_head": "an output head or router (lm_head)"}
    assert {r.name: r.speedup for r in report.rows} == {
        "wide": pytest.approx(1.43),
        "narrow": pytest.approx(0.93),
        "lm_head": None,
    }
    assert [type(m) for m in model.values()] == [octavo.Linear, nn.Linear, nn.Linear]
    lines = {line.split()[0]: line for line in str(report).splitlines()}
    assert lines["wide"].endswith("converted, 1.43x")
    assert lines["narrow"].endswith("skipped: 0.93x: left in BF16")
    assert f"only if faster: from 1.05x on, measured on this GPU ({cache_path(UNKNOWN)})" in str(report)


def test_tokens_are_the_rows_of_a_forward_pass(pretend: Callable) -> None:
    pretend(UNKNOWN)
    write_table(cache_path(UNKNOWN), table_of(lambda m, k, n: {2048: 0.8, 8192: 1.0, 32768: 1.2}[m]))
    assert octavo.convert(mixed(), only_if_faster=True, tokens=32768).converted == ["wide", "narrow"]
    assert octavo.convert(mixed(), only_if_faster=True, tokens=16384).rows[0].speedup == pytest.approx(1.1)
    assert octavo.convert(mixed(), only_if_faster=True).converted == []
    with pytest.raises(ValueError, match=r"tokens.* must be at least 1, got \(M, K, N\) \(0, 2048, 1024\)"):
        octavo.convert(mixed(), only_if_faster=True, tokens=0)


@pytest.mark.parametrize(("speedup", "pays"), [(1.0, False), (1.049, False), (1.051, True)])
def test_a_speedup_within_the_noise_does_not_count(speedup: float, pays: bool, pretend: Callable) -> None:
    pretend(UNKNOWN)
    write_table(cache_path(UNKNOWN), table_of(lambda m, k, n: speedup))
    assert bool(octavo.convert(mixed(), only_if_faster=True, tokens=32768).converted) is pays


def test_a_model_of_little_work_is_left_to_bf16(pretend: Callable) -> None:
    pretend(UNKNOWN)
    write_table(cache_path(UNKNOWN), table_of(lambda m, k, n: 1.4))
    report = octavo.convert(mixed(), only_if_faster=True)  # 0.5e12 operations, 1.0e12 hide the launches of two layers
    assert report.converted == []
    assert "GPU would wait for the host" in report.skipped["wide"]
    assert report.rows[0].speedup == pytest.approx(1.4)
    assert octavo.convert(mixed(), only_if_faster=True, tokens=32768).converted == ["wide", "narrow"]


@pytest.mark.parametrize(
    ("shapes", "hidden"),
    [
        ([(4096, 4096, 4096)], False),  # measured on an H200: 0.84x
        ([(2048, 16384, 2048)], False),  # 0.83x
        ([(4096, 4096, 8192)], True),  # 1.19x
        ([(2048, 8192, 8192)], True),  # 1.17x
        ([(4096, 8192, 8192)], True),  # 1.55x
        ([(2048, 4096, 32768)], True),  # 1.40x
        ([(4096, 4096, 2048)] * 12, False),
        ([(4096, 4096, 8192)] * 12, True),
    ],
)
def test_one_layer_needs_more_work_to_hide_the_launches(shapes: list[tuple[int, int, int]], hidden: bool) -> None:
    assert hides_launching(shapes) is hidden


def test_on_a_cpu_nothing_is_converted_and_the_report_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    octavo.convert(model[1], "delayed")  # converted before, now BF16 again
    keys = model.state_dict().keys()
    report = octavo.convert(model, only_if_faster=True)
    assert report.converted == []
    assert set(report.skipped.values()) == {"cpu emulates FP8, which is never faster than BF16"}
    assert "cpu emulates FP8" in str(report)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]
    assert model.state_dict().keys() == keys
    assert not octavo.scales.scale_state(model)
    x = torch.randn(3, 8)
    assert torch.equal(model(x), F.linear(F.linear(x, model[0].weight, model[0].bias), model[1].weight, model[1].bias))
    assert octavo.convert(model).converted == ["0", "1"]


def test_a_gpu_without_the_gemm_is_left_in_bf16(pretend: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(UNKNOWN)
    none = dict.fromkeys(NATIVE, Backend("none", "needs compute capability 9.0"))
    monkeypatch.setattr(conversion, "gemm_backends", lambda *_: none)
    report = octavo.convert(mixed(), only_if_faster=True)
    assert report.converted == []
    assert "needs compute capability 9.0" in report.skipped["wide"]


def test_a_model_whose_every_layer_is_skipped_is_still_an_error() -> None:
    with pytest.raises(ValueError, match="every linear layer"):
        octavo.convert(nn.ModuleDict({"lm_head": nn.Linear(4, 4)}), only_if_faster=True)


def test_the_batch_gives_the_tokens_of_each_layer(pretend: Callable) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.few = nn.Linear(2048, 4096, device="meta"), nn.Linear(4096, 2048, device="meta")
            self.never = nn.Linear(2048, 2048, device="meta")

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.few(self.many(x)[:, 0]) * scale

    pretend(UNKNOWN)
    write_table(cache_path(UNKNOWN), table_of(lambda m, k, n: {2048: 0.8, 8192: 1.0, 32768: 1.2}[m]))
    batch = {"x": torch.empty(2048, 16, 2048, device="meta"), "scale": 0.5}
    report = octavo.convert(Two(), only_if_faster=True, tokens=8192, batch=batch)
    assert {row.name: row.speedup for row in report.rows} == {
        "many": pytest.approx(1.2),
        "few": pytest.approx(0.8),
        "never": None,
    }
    assert report.skipped == {"few": "0.80x: left in BF16", "never": "the batch does not reach it: left in BF16"}
