"""octavo verify, as it is typed."""

from __future__ import annotations

import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import serve
from octavo.models.tokenizer import ByteTokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("a <b>folder & more")
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.1, **SIZES, **ends)).save_pretrained(
        root / "llama"
    )
    ByteTokenizer().save(root / "llama")
    serve.pack(root / "llama", root / "packed")
    (root / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 30)
    return {"model": root / "llama", "packed": root / "packed", "text": root / "text.txt"}


def words(folders: dict[str, Path], *more: Any) -> list[Any]:
    given = ["verify", folders["packed"], "--against", folders["model"], "--data", folders["text"]]
    return [*given, "--samples", 8, "--context", 48, *more]


class Page(HTMLParser):
    """The tags of a page, which must nest, and what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_right_folder(octavo: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    code, out, err = octavo(*words(folders, *files, "--budget-kl", 1, "--budget-ppl", "5%"))
    assert (code, err) == (0, "")
    assert "the bytes are right; transformers, octavo agree with them" in out
    for title in ("Readers", "Quality", "Layers", "Size", "Speed of the packed layers, times BF16: a forecast"):
        assert title in out
    assert "A forecast, not a measurement." in out
    assert "8 prompts, 384 tokens" in out
    assert "of 14 layers the 12 that lose most are shown" in out
    assert "Findings" not in out
    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert written["ok"] is True
    assert len(written["layers"]) == 14
    assert written["consumers"][0]["outcome"] == "agrees"
    assert written["quality"]["kl"]["low"] < written["quality"]["kl"]["value"] < written["quality"]["kl"]["high"]
    assert written["int8"]["tokens"] == 384
    assert written["forecast"]["shapes"][0]["gains"]["1"] > 1.5
    check_page(tmp_path / "r.html", layers=14)


def check_page(path: Path, layers: int) -> None:
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert set(re.findall(r"https?://[^\"]+", text)) <= {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert "<b>folder" not in text
    assert "a &lt;b&gt;folder &amp; more" in text
    assert page.seen.count("rect") == (2 + 2 * layers if layers else 0)


def test_over_budget(octavo: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    code, out, err = octavo(*words(folders, "--budget-kl", "1e-9", "--html", tmp_path / "r.html"))
    assert code == 1
    assert err == ""
    assert "nats a token, 1e-09 were allowed" in out
    assert "1 thing is wrong" in out
    check_page(tmp_path / "r.html", layers=14)


def test_damage(octavo: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "a <b>folder & more"
    bad.mkdir()
    for path in folders["packed"].iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    os.truncate(bad / "model.safetensors", 5000)
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    code, out, err = octavo("verify", bad, "--against", folders["model"], *files)
    assert (code, err) == (1, "")
    assert "is truncated or no safetensors file" in out
    assert "1 thing is wrong; nothing was run on this folder, since its bytes are wrong" in out
    assert json.loads((tmp_path / "r.json").read_text())["findings"][0]["kind"] == "file"
    check_page(tmp_path / "r.html", layers=0)


def test_structure_alone(octavo: Any, folders: dict[str, Path]) -> None:
    code, out, err = octavo("verify", folders["packed"], "--against", folders["model"])
    assert (code, err) == (0, "")
    assert "Quality" not in out
    assert "weight dB" in out
    assert "output dB" not in out


def test_errors_are_one_line(octavo: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    for more, message in (
        (("--budget-ppl", "half"), "--budget-ppl takes a part such as 0.5% or 0.005, got 'half'"),
        (("--budget-ppl=-1%",), "--budget-ppl takes a part"),
        (("--samples", 0), "need samples >= 1"),
        (("--data", tmp_path / "none"), "there is no"),
        (("--against", tmp_path / "none"), "config.json is missing"),
    ):
        code, out, err = octavo(*words(folders, *more))
        assert code == 1
        assert message in err
        assert "Traceback" not in out + err


def test_help_has_an_example(octavo: Any) -> None:
    code, out, _ = octavo("verify", "--help")
    assert code == 0
    assert "octavo verify packed/qwen --against models/qwen" in out
    assert sys.argv[1] == "verify"
