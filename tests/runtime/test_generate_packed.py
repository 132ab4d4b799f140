"""Running from a packed folder: the layer, the checks of what is read, and the text that comes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from packed_examples import Example
from torch import Tensor, nn
from typer.testing import CliRunner
from verify_examples import change_config, change_tensors

from octavo import convert
from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.scheme import SCHEME_OF, SCHEMES
from octavo.generation import Engine, Sampling
from octavo.ops import quantize
from octavo.runtime import PackedLinear, end_tokens, load_packed
from octavo.runtime.packed_linear import swap_linears
from octavo_cli.generate import generate_command
from octavo_cli.pack import pack_command

PROMPT = "Grüße, "


# --- The layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 3, 128), (1, 2, 3, 128), (0, 128), (2, 0, 128)])
@pytest.mark.parametrize("recipe", [recipe for recipe in SCHEME_OF if recipe not in ("delayed", "tensorwise")])
def test_the_layer_is_the_forward_of_training(
    recipe: str, dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(128, 256, bias=bias))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())  # the bias is stored so
    model = nn.Sequential(nn.Linear(128, 256, bias=bias))
    scheme = SCHEMES[SCHEME_OF[recipe]]
    swap_linears(model, {"0": scheme})
    q = quantize(trained[0].weight.detach(), scheme.weight)
    stored = {"0.weight": q.data, "0.weight_scale": scheme.stored_scale(q)}
    model.load_state_dict(stored | ({"0.bias": trained[0].bias.bfloat16()} if bias else {}))
    convert(trained, recipe)
    x = (torch.randn(shape) * 3).to(dtype)
    with torch.no_grad():
        y, want = model(x), trained(x)
    assert y.dtype == dtype
    assert y.shape == want.shape == (*shape[:-1], 256)
    assert torch.equal(y, want)


def test_a_loaded_model_has_no_wide_copy_of_a_packed_weight(example: Example) -> None:
    model = load_packed(example.packed).model
    assert not model.training
    layers = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert layers.keys() == example.report.packed.keys()
    for layer in layers.values():
        assert [layer.weight.dtype, layer.weight_scale.dtype] == [torch.float8_e4m3fn, torch.float32]
        assert not list(layer.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert held < 1.01 * (example.packed / "model.safetensors").stat().st_size


def test_a_tied_head_stays_tied(packed: dict[str, Example]) -> None:
    llama, qwen = (load_packed(packed[name].packed).model for name in ("llama", "qwen2"))
    for model in (llama, qwen):
        assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


# --- What is read ------------------------------------------------------------------------------------------------

NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.weight"), f"{NAME}.weight is missing"),
        (lambda t: t.pop(f"{NAME}.weight_scale"), f"{NAME}.weight_scale is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra has no place"),
        (lambda t: t.update({f"{NAME}.weight": t[f"{NAME}.weight"][:-1].clone()}), f"{NAME}.weight must have shape"),
        (lambda t: t.update({f"{NAME}.weight": t[f"{NAME}.weight"].bfloat16()}), f"{NAME}.weight must be torch.float8"),
        (lambda t: t[f"{NAME}.weight_scale"].view(-1)[:1].fill_(torch.nan), f"{NAME}.weight_scale holds inf or NaN"),
        (lambda t: t[f"{NAME}.weight_scale"].view(-1)[:1].zero_(), f"{NAME}.weight_scale must be positive"),
    ],
)
def test_wrong_tensors(
    copy_of: Callable[[str], Path], change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = copy_of("llama")
    change_tensors(folder, change)
    with pytest.raises(ArtifactError, match=rf"{message}.*pack it again"):
        load_packed(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files(copy_of: Callable[[str], Path], name: str) -> None:
    folder = copy_of("llama")
    for path in folder.glob("tokenizer*") if "tokenizer" in name else [folder / name]:
        path.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_packed(folder)


def test_pickles_are_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, never opened")
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin, a pickle, .*save the model with safetensors"):
        load_packed(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ignore": ["lm_head", NAME]}, f"{NAME}.weight_scale has no place"),
        ({"format": "pack-quantized"}, "format is 'pack-quantized', octavo runs float-quantized"),
    ],
)
def test_wrong_settings(copy_of: Callable[[str], Path], settings: dict[str, Any], message: str) -> None:
    folder = copy_of("llama")
    change_config(folder, **settings)
    with pytest.raises(ArtifactError, match=message):
        load_packed(folder)


# --- The text ----------------------------------------------------------------------------------------------------


def test_end_tokens_are_those_of_the_folder(packed: dict[str, Example], tmp_path: Path) -> None:
    assert end_tokens(packed["qwen2"].packed) == {0}
    assert end_tokens(packed["llama"].packed) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert end_tokens(tmp_path) == {2, 3}


def test_greedy_text_is_that_of_the_logits(example: Example) -> None:
    """With its cache, against one forward over the whole text, in float32 so that rounding turns no choice."""
    model, tokenizer, context, _ = load_packed(example.packed)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    ids = tokenizer.encode(PROMPT)
    for _ in range(6):
        with torch.no_grad():
            out = model(torch.tensor([ids]))
        ids.append(int((out if isinstance(out, Tensor) else out.logits)[0, -1].argmax()))
    prompt = tokenizer.encode(PROMPT)
    steps = Engine(model, context=context).generate([prompt], 6, Sampling(temperature=0))
    assert prompt + [token for [token] in steps] == ids


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_text_goes_on_past_the_context(packed: dict[str, Example], name: str) -> None:
    model, tokenizer, context, _ = load_packed(packed[name].packed)
    assert context == 48
    prompt, engine = tokenizer.encode(PROMPT), Engine(model, context=context)
    assert len(prompt) + 44 > context

    def tokens(seed: int) -> list[list[int | None]]:
        return list(engine.generate([prompt], 44, Sampling(top_k=50, seed=seed)))

    first = tokens(5)
    assert len(first) == 44
    assert first == tokens(5) != tokens(6)


# --- The commands ------------------------------------------------------------------------------------------------


def command(function: Callable[..., None], *arguments: object) -> Any:
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_pack_and_generate_from_the_command_line(tmp_path: Path, packed: dict[str, Example]) -> None:
    run, out = shutil.copytree(packed["llama"].run, tmp_path / "a run"), tmp_path / "a folder" / "out"
    done = command(pack_command, run, out)
    assert done.exit_code == 0, done.output
    assert "linear layers packed   14" in done.output
    assert "lm_head: it shares its weight with the embedding" in done.output
    shutil.rmtree(run)  # what follows has the folder only
    options = ("--prompt", "Hello [b]you", "--count", 12, "--seed", 1, "--device", "cpu")
    texts = [command(generate_command, out, *options) for _ in range(2)]
    assert texts[0].exit_code == 0, texts[0].output
    assert texts[0].stdout == texts[1].stdout
    assert texts[0].stdout.startswith("Hello [b]you")
    assert len(texts[0].stdout) > len("Hello [b]you") + 3
    assert not set(texts[0].output) & {chr(code) for code in range(32) if chr(code) not in "\n\t"}


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    missing = command(generate_command, tmp_path / "nothing", "--prompt", "a")
    assert isinstance(missing.exception, FileNotFoundError)
    nothing = command(pack_command, tmp_path, tmp_path / "out")
    assert isinstance(nothing.exception, FileNotFoundError)
    assert "a run of octavo train, or a Hugging Face model folder" in str(nothing.exception)


@pytest.mark.parametrize("function", [pack_command, generate_command])
def test_the_help_has_an_example(function: Callable[..., None]) -> None:
    assert "octavo generate packed/first --prompt" in " ".join(command(function, "--help").output.split())
