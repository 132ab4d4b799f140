"""A packed model whose weights alone are in FP8, on CUDA: against the CPU, compiled, and through `generate`."""

from pathlib import Path

import pytest
import torch
from metrics import distance
from runtime_examples import layer_by_layer, logits, make_decoder, tokens

import octavo
from octavo.packing import pack
from octavo.runtime import gemm_path

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    make_decoder("llama with biases", hidden_size=256, intermediate_size=544, head_dim=64).save_pretrained(
        root / "model"
    )
    for scheme in ("weight", "channel"):
        pack(root / "model", root / scheme, scheme=scheme)
    return root


@pytest.mark.parametrize("length", [1, 13, 300])  # one row, tiles, the widened weight
def test_the_gpu_gives_what_the_cpu_gives(packed: Path, length: int) -> None:
    models = [octavo.load(packed / "weight", device) for device in ("cuda", "cpu")]
    text = tokens(length).clamp(max=98)[:1]
    gpu, cpu = logits(models[0], text.cuda()).cpu(), logits(models[1], text)
    assert distance(gpu, cpu) < 0.02  # BF16's own
    apart = logits(layer_by_layer(models[0]), text.cuda()).cpu()
    assert distance(gpu, apart) < 0.02


def test_compiled_it_gives_the_same(packed: Path) -> None:
    torch.compiler.reset()
    model = octavo.load(packed / "weight", "cuda")
    text = tokens(7).cuda()
    eager = logits(model, text)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    assert distance(logits(model, text), eager) < 0.02


def test_generate_takes_the_tokens_of_the_whole_forward_pass(packed: Path) -> None:
    model = octavo.load(packed / "weight", "cuda")
    ids = model.generate(tokens(9)[:1].cuda(), max_new_tokens=8, do_sample=False)
    scores = logits(model, ids[:, :-1])[0, 8:].float()
    chosen = scores.gather(1, ids[0, 9:, None]).squeeze(1)
    assert (scores.amax(1) - chosen < 0.05 * scores.std()).all()  # but for ties within BF16's rounding


def test_a_gpu_without_an_fp8_gemm_runs_a_channel_folder_so(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(octavo.load(packed / "weight", "cuda"), tokens(5).cuda())
    monkeypatch.setattr(gemm_path, "product_backend", lambda *args: gemm_path.Backend("none", "an Ampere"))
    monkeypatch.setattr(gemm_path, "_find_cached", gemm_path._input_cast)
    with pytest.warns(UserWarning, match="of the scheme channel .an Ampere: weight-only."):
        model = octavo.load(packed / "channel", "cuda")
    assert torch.equal(logits(model, tokens(5).cuda()), expected)
