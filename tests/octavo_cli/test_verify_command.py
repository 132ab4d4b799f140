"""octavo verify, as it is typed."""

import json
import os
import re
from datetime import UTC, datetime
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import make_model

from octavo.packing import pack


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("a <b>folder & more")
    model = make_model(root / "llama", "llama")
    (root / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 30)
    return {"model": model, "packed": pack(model, root / "packed").folder, "text": root / "text.txt"}


def arguments(folders: dict[str, Path], *more: Any) -> list[Any]:
    """The command line that verifies the folder on prompts, with more options."""
    defaults = {"--against": folders["model"], "--samples": 8, "--context": 48}
    options = [word for option, value in defaults.items() if option not in more for word in (option, value)]
    return ["verify", folders["packed"], "--data", folders["text"], *options, *more]


class Page(HTMLParser):
    """The tags of a page, which must nest, and the attributes that could load something."""

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
    code, out, err = octavo(*arguments(folders, *files, "--budget", "kl=1", "--budget", "ppl=5%"))
    assert (code, err) == (0, "")
    assert "the bytes are right; transformers, octavo agree with them" in out
    for title in ("Readers", "Quality", "Layers", "Size"):
        assert title in out
    assert "8 prompts, 384 tokens" in out
    assert "INT8 is measured for comparison: it is MODEL with the same layers in eight-bit integers" in out
    assert "of 14 layers the 12 that lose most are shown" in out
    assert out.startswith("read 1 file (")
    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert written["ok"] is True
    assert written["model"] == "LlamaForCausalLM"
    assert written["versions"]["transformers"] == transformers.__version__
    assert written["command"].startswith("octavo verify ")
    age = datetime.now(UTC) - datetime.fromisoformat(written["date"])
    assert 0 <= age.total_seconds() < 600
    assert written["data"]["files"] == 1
    assert len(written["layers"]) == 14
    assert written["readers"][0]["outcome"] == "agrees"
    assert written["quality"]["kl"]["low"] < written["quality"]["kl"]["value"] < written["quality"]["kl"]["high"]
    assert written["int8"]["tokens"] == 384
    page = (tmp_path / "r.html").read_text()
    assert all(escape(text) in page for text in (written["date"], written["command"], transformers.__version__))
    check_page(tmp_path / "r.html", layers=14)


def check_page(path: Path, layers: int) -> None:
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert not {"link", "img", "iframe"} & set(page.seen)
    assert page.seen.count("script") == (3 if layers else 0)  # the numbers, the library, and the code that draws
    assert "<b>folder" not in text
    assert "a &lt;b&gt;folder &amp; more" in text
    if layers:
        (chart,) = json.loads(re.search('id="data">(.*?)</script>', text).group(1))["charts"]
        assert [line["name"] for line in chart["lines"]] == ["weight", "output"]
        assert [len(line["y"]) for line in chart["lines"]] == [layers, layers] == 2 * [len(set(chart["names"]))]
    check_narrow(text, page)


def check_narrow(text: str, page: Page) -> None:
    """On a phone, words and numbers of tables are not broken, and each table scrolls in its own box."""
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert page.seen.count("table") == len(re.findall('<div class="wide"[^>]*><table>', text))
    styles = dict(re.findall(r"^([^\n{]*) \{([^}]*)\}", text, re.M))
    assert "overflow: auto" in styles[".wide"]
    assert "white-space: nowrap" in styles["th, td"]
    assert "overflow-wrap: normal" in styles["table"]
    assert not re.search("anywhere|break-all|width: \\d{3,}px", "".join(re.findall("<style>(.*?)</style>", text, re.S)))


def test_over_budget(octavo: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    code, out, err = octavo(*arguments(folders, "--budget", "kl=1e-9", "--html", tmp_path / "r.html"))
    assert code == 1
    assert err == ""
    assert "the limit is kl=1e-09" in out
    verdict, *findings = out.splitlines()[-2:]
    assert verdict.endswith("packed: 1 thing is wrong")
    assert [line.split(": ")[0] for line in findings] == ["  budget kl"]
    check_page(tmp_path / "r.html", layers=14)
    text = (tmp_path / "r.html").read_text()
    assert text.index("1 thing is wrong") < text.index("<li>budget kl: ") < text.index("<h2>")


def test_damage(octavo: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "a <b>folder & more"
    bad.mkdir()
    for path in folders["packed"].iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    os.truncate(bad / "model.safetensors", 5000)
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    code, out, err = octavo("verify", bad, "--against", folders["model"], *files)
    assert (code, err) == (1, "")
    assert "is truncated or not a safetensors file" in out
    assert "1 thing is wrong; nothing was run on this folder, since its bytes are wrong" in out
    assert json.loads((tmp_path / "r.json").read_text())["findings"][0]["kind"] == "file"
    check_page(tmp_path / "r.html", layers=0)


def test_structure_alone(octavo: Any, folders: dict[str, Path]) -> None:
    code, out, err = octavo("verify", folders["packed"], "--against", folders["model"])
    assert (code, err) == (0, "")
    assert "Quality" not in out
    assert "weight dB" in out
    assert "output dB" not in out


def test_errors_are_one_line(refused: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    for more, message in (
        (("--budget", "ppl=half"), "the budget ppl must be a percentage above 0% and up to 100%, such as 0.5%, or a"),
        (("--json", tmp_path / "none" / "r.json"), "r.json cannot be written: No such file or directory. Nothing was"),
        (("--html", tmp_path), "cannot be written: Is a directory. Nothing was run"),
        (("--samples", 0), "samples, context and batch must be at least 1"),
        (("--data", tmp_path / "none"), "there is no"),
        (("--against", tmp_path / "none"), "give a run of octavo train, or a Hugging Face model"),
        (("--against", folders["packed"]), "is quantized already: give the model in BF16 that it was made from"),
    ):
        assert message in refused(*arguments(folders, *more))
