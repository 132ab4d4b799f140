"""octavo verify, and octavo inspect of a packed folder and of the dtypes of a training."""

import json
import re
import shutil
from datetime import datetime
from html import escape

import pytest
import transformers
from tiny_models import make_model
from tiny_runs import SMALLEST_TOML
from verify_examples import change_settings

from octavo import load as load_packed
from octavo.packing import pack


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("a <b>folder & more")
    model = make_model(root / "llama", "llama")
    (root / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 30)
    return {"model": model, "packed": pack(model, root / "packed").folder, "text": root / "text.txt"}


def arguments(folders, *more):
    """The command line that verifies the folder on prompts, with more options."""
    defaults = {"--against": folders["model"], "--samples": 8, "--context": 48}
    options = [word for option, value in defaults.items() if option not in more for word in (option, value)]
    return ["verify", folders["packed"], "--data", folders["text"], *options, *more]


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2030, 1, 2, 12, tzinfo=tz)


def test_a_folder_without_its_model(octavo, printed, folders):
    out = printed("verify", folders["packed"])
    assert "no fault in the folder by itself, and no weight was compared; transformers, octavo agree with them" in out
    code, _, err = octavo("verify", folders["packed"], "--data", folders["text"])
    assert code == 1
    assert "give --against" in err


def test_a_right_folder(printed, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.verification.findings.datetime", Noon)
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    for _ in range(2):  # the second reports replace the first
        out = printed(*arguments(folders, *files, "--budget", "kl=1", "--budget", "ppl=5%"))
    assert "the bytes are right; transformers, octavo agree with them" in out
    assert all(title in out for title in ("Readers", "Quality", "Layers", "Size"))
    assert "8 prompts, 384 tokens" in out
    assert "INT8 is measured for comparison: it is MODEL with the same layers in eight-bit integers" in out
    assert "of 14 layers the 12 that lose most are shown" in out
    assert out.startswith("read 1 file (")
    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert written["ok"] is True
    assert written["model"] == "LlamaForCausalLM"
    assert written["versions"]["transformers"] == transformers.__version__
    assert written["command"].startswith("octavo verify ")
    assert written["date"] == "2030-01-02T12:00:00+00:00"
    assert written["data"]["files"] == 1
    assert len(written["layers"]) == 14
    assert written["readers"][0]["outcome"] == "agrees"
    assert written["quality"]["kl"]["low"] < written["quality"]["kl"]["value"] < written["quality"]["kl"]["high"]
    assert written["int8"]["tokens"] == 384
    page = (tmp_path / "r.html").read_text()
    assert all(escape(text) in page for text in (written["date"], written["command"], transformers.__version__))
    assert "<b>folder" not in page
    (chart,) = json.loads(re.search('id="data">(.*?)</script>', page).group(1))["charts"]
    assert [(line["name"], len(line["y"])) for line in chart["lines"]] == [("weight", 14), ("output", 14)]


def test_the_live_model(octavo, printed, folders, monkeypatch):
    out = printed("verify", folders["packed"], "--live")
    assert "live: 0 faults; y of 15 linear layers and dx of 0 compared; products in FP8" in out

    def load(*args):
        model = load_packed(*args)
        model.model.layers[1].mlp.up_proj.weight_scale[3] = 0
        return model

    monkeypatch.setattr("octavo.load", load)
    code, out, _ = octavo("verify", folders["packed"], "--live")
    assert code == 1
    assert "has a scale that is NaN, infinite, zero or negative" in " ".join(out.split())


def test_over_budget(octavo, folders, tmp_path):
    code, out, err = octavo(*arguments(folders, "--budget", "kl=1e-9", "--html", tmp_path / "r.html"))
    assert code == 1
    assert err == ""
    assert "the limit is kl=1e-09" in out
    verdict, *findings = out.splitlines()[-2:]
    assert verdict.endswith("packed: 1 thing is wrong")
    assert [line.split(": ")[0] for line in findings] == ["  budget kl"]
    assert "<li>budget kl: " in (tmp_path / "r.html").read_text()


# --- inspect --dtypes: presets, settings, Hugging Face folders, and what is no model of a training


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SMALLEST_TOML.replace("layers = 1", "layers = 2"))
    return path


@pytest.fixture
def llama(made, tmp_path):
    """A folder with the description of a Llama of two layers, and nothing else."""
    shutil.copy(made("llama") / "config.json", tmp_path)
    return tmp_path


def test_tables_of_settings(printed, settings):
    out = printed("inspect", settings, "--dtypes")
    for line in ("FLOPs by dtype", "FP32 in the forward pass, and why", "products that do not run in FP8"):
        assert line in out
    assert "model.layers.*.mlp.gate_proj" in out
    assert "model.layers.0" not in out
    assert "autocast runs pow in FP32" in out


def test_operations_of_a_module_and_another_recipe(printed, settings):
    words = ("--dtypes", "--module", "*.mlp.up_proj", "--recipe", "bf16", "--batch", "1", "--json")
    found = json.loads(printed("inspect", settings, *words))
    assert {row["module"] for row in found["operations"]} == {"model.layers.*.mlp.up_proj"}
    products = {(row["name"], row["computes_in"]) for row in found["operations"] if row["kind"] == "product"}
    assert products == {("mm", "BF16")}
    assert found["flops"]["forward"] == {"BF16": 2 * 2 * 16 * 32 * 64}


@pytest.mark.parametrize("source", ["", "config.json"])
def test_a_hugging_face_folder_without_weights(printed, llama, source):
    found = json.loads(printed("inspect", llama / source, "--dtypes", "--json"))
    assert found["model"] == "LlamaForCausalLM"
    assert {each["module"] for each in found["left_out"]} == {"lm_head", "model.layers.*.self_attn"}


def test_experts_run_in_fp8(printed, made):
    found = json.loads(printed("inspect", made("mixtral"), "--dtypes", "--weights", "bf16", "--json"))
    assert found["flops"]["backward"]["FP8"] == 2 * found["flops"]["forward"]["FP8"]
    products = [row for row in found["operations"] if row["module"] == "model.layers.*.mlp.experts" and row["flops"]]
    expected = 2 * 2 * 64 * 2 * 3 * 128 * 64  # layers, 64 tokens, 2 experts of each, 3 matrices
    assert sum(row["flops"] for row in products if row["phase"] == "forward") == expected
    assert sum(row["flops"] for row in products if row["phase"] == "backward") == 2 * expected
    assert {row["computes_in"] for row in products} == {"FP8"}
    assert "3-D weight" not in [each["what"] for each in found["left_out"]]


def test_bad_folders(refused, llama):
    for settings, message in (
        ({"model_type": "unheard"}, "model_type 'unheard', which transformers"),
        ({"model_type": "vit"}, "octavo.dtype_flow(model, inputs) shows its dtypes"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ):
        change_settings(llama / "config.json", **settings)
        assert message in refused("inspect", llama, "--dtypes")
    for text, message in (("{", "is not valid JSON"), ("{}", "names no model_type")):
        (llama / "config.json").write_text(text)
        assert message in refused("inspect", llama, "--dtypes")
