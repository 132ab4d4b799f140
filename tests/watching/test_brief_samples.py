"""Brief samples: of every tenth step, for the rules alone."""

import numpy as np
import pytest
import torch
from watch_examples import matrix, one_layer, tiny_model

import octavo
from octavo.numerics import Cast
from octavo.observation.operand_statistics import Rows
from octavo.watching import read_watch
from octavo.watching.records import transfer
from octavo.watching.rules import RULES, History, SampleGrids


def train(model, watch, steps, x=None, change=None):
    """Steps that leave the weights as they are. `change` is called with the number of each step."""
    x = matrix(48, 80, spread=1) if x is None else x
    for _ in range(steps):
        if change is not None:
            change(watch.done + 1)
        y = model(x)
        (y * torch.linspace(-1, 1, y.shape[-1])).square().mean().backward()
        watch.read_gradients()
        model.zero_grad()
        octavo.scales.update_scales(model)
        watch.step()


def judged(watch, sample):
    history = History(len(watch.layers))
    history.amax[:], history.kurtosis[:] = 1, 1
    made = SampleGrids(*sample, watch.layers)
    with np.errstate(invalid="ignore"):
        return [rule.numbers(made, history) for rule in RULES]


@pytest.mark.parametrize("recipe", ["rowwise", "delayed", "tensorwise_rotated", "blockwise", "mxfp8", "bf16"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_rules_find_the_same_numbers_in_a_brief_sample_as_in_a_full_one(name, recipe):
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for interval in (100, 10):
        model = tiny_model(name, recipe)
        with octavo.watch(model, interval=interval, rows=16) as watch:
            train(model, watch, 10, tokens)
            full, (_, sample) = watch.latest(), watch.take()
        found.append(judged(watch, sample))
    assert (full.step, sample[0]["step"][0]) == (10, 10)
    brief, of_full = found
    expected = judged(watch, (full.operands, full.layer_records))
    for rule, numbers, same, whole in zip(RULES, brief, of_full, expected, strict=True):
        np.testing.assert_allclose(numbers, same, rtol=1e-4, atol=1e-6, err_msg=rule.words)
        # A brief sample has no gradients of weights, and its moments are those about zero.
        if "gradient" not in rule.words and rule.name != "kurtosis_growth":
            np.testing.assert_allclose(numbers, whole, rtol=1e-4, atol=1e-6, err_msg=rule.words)
    finite = {rule.name for rule, numbers in zip(RULES, expected, strict=True) if np.isfinite(numbers).any()}
    assert ("underflow" in finite) == (recipe != "bf16")
    assert ("swiglu_alignment" in finite) == (name == "llama")


def test_a_brief_sample_while_another_model_has_a_full_one():
    model = one_layer()
    with octavo.watch(model) as watch, octavo.watch(one_layer()):
        train(model, watch, 10)
        (first, _), (brief, _) = watch.take()
    for name in ("amax", "kurtosis", "flushed", "shift_lost", "nonfinite"):
        np.testing.assert_array_equal(brief[name], first[name])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("row", [0, 17])
def test_a_number_that_is_not_finite_is_found_in_any_row(bad, row):
    model, x = one_layer(), matrix(48, 80, spread=1)

    def spoil(step):
        x[row, 5] = bad if step == 10 else 1

    with octavo.watch(model) as watch:
        train(model, watch, 10, x, spoil)
        (first, _), (brief, _) = watch.take()
    assert first["nonfinite"].tolist() == [0, 0, 0]
    assert brief["nonfinite"][0] > 0
    assert brief["nonfinite"][1] == 0  # w is finite


def test_the_kurtosis_is_that_about_zero():
    model, x = one_layer(), matrix(16, 80) + 3
    with octavo.watch(model) as watch:
        train(model, watch, 10, x)
        _, (found, _) = watch.take()
    for record, tensor in zip(found[:2], (x, model[0].weight), strict=True):
        rows = octavo.observation.operand_statistics.sampled_rows(len(tensor), 16, tensor.device)
        wide = tensor.detach().double().numpy()[rows]
        assert record["kurtosis"] == pytest.approx((wide**4).mean() / (wide**2).mean() ** 2, rel=1e-5)
        assert record["rms"] == pytest.approx((wide**2).mean() ** 0.5, rel=1e-5)


def test_micro_batches_add_up_and_rows_do_not_wait_without_end(monkeypatch):
    found = []
    for most in (1 << 25, 0):
        monkeypatch.setattr(octavo.observation.operand_statistics, "_MOST", {True: most, False: most})
        model = one_layer()
        with octavo.watch(model) as watch:
            for seed in range(3):
                model(matrix(16, 80, seed=seed)).sum().backward()
            watch.read_gradients()
            watch.step()
            found.append(watch.take()[0][0])
    assert np.array_equal(found[0].view(np.uint8), found[1].view(np.uint8))
    parts = [matrix(16, 80, seed=seed) for seed in range(3)]
    assert found[0]["rms"][0] == pytest.approx(torch.cat(parts).double().square().mean().sqrt().item(), rel=1e-5)
    assert found[0]["amax"][0] == pytest.approx(max(part.abs().max().item() for part in parts), rel=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_has_the_same_numbers(backend):
    """The code of aot_eager passes copies of the buffers of statistics."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = one_layer()
        call = torch.compile(model, backend=backend) if compiled else model
        with octavo.watch(model) as watch:
            call(matrix(48, 80)).square().mean().backward()
            watch.read_gradients()
            watch.step()
            found.append(watch.take()[0][0])
    assert len(found[0]) == 3
    for name in ("amax", "scale", "kurtosis", "flushed", "shift_lost", "nonfinite"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, err_msg=name)


def test_files_that_reach_their_limit_have_fewer_samples_and_rules_as_many(tmp_path):
    model = one_layer()
    with octavo.watch(model, folder=tmp_path, interval=2, limit=2000) as watch:
        train(model, watch, 40)
        assert [operands["step"][0] for operands, _ in watch.take()] == [1, 10, 20, 30, 40]
        assert watch.interval == read_watch(tmp_path).interval > 4


# ---- Samples on a GPU: the numbers of a CPU


def rows_of(device, full):
    """Those of many sizes and dtypes: unquantized, quantized, with a known amax, folded."""
    for rows, columns in ((16, 64), (5, 14336), (16, 100)):
        for dtype in (torch.float32, torch.bfloat16):
            x = matrix(rows, columns).to(device, dtype)[None]
            scales, shift = (torch.full((1, rows, 1), value, device=device) for value in (4.0, 3))
            q = (Cast(), (x.float() / 4).to(torch.float8_e4m3fn).to(torch.bfloat16), scales)
            scale = scales.view(-1)[:1]
            yield Rows(x, full)
            yield Rows(x, full, *q, scale=scale)
            yield Rows(x, full, *q, scale=scale, known=x.float().abs().amax().view(1))
            yield Rows(x, full, *q, shift, scale=scale, smallest_amax=-torch.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("full", [False, True])
def test_a_gpu_finds_the_numbers_of_a_cpu(full):
    expected, found = ([rows.statistics().cpu() for rows in rows_of(device, full)] for device in ("cpu", "cuda"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("device", range(min(torch.cuda.device_count(), 2)))
def test_the_copy_to_the_host_is_waited_for(device):
    with torch.cuda.device(device):
        torch.cuda._sleep(1 << 28)  # cycles
    assert transfer([(torch.ones(3, 2, dtype=torch.float64, device=device), 1)], 7)()[1] == 7
