"""The frame of a page: what it may load, what it escapes, and the library inside."""

import base64
import hashlib
import json
import re
from importlib.resources import files

from octavo.report.page import Line, LineChart, Page, place, table

# uPlot 1.6.32 as npm serves it: `npm pack uplot@1.6.32`, dist/ and LICENSE.
HASHES = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def example() -> Page:
    page = Page("a <b>title</b>")
    page.add_chart(LineChart("loss", "Loss", "step", "loss", [Line("</script><b>", [1, 2], [0.5, None])]))
    return page


def test_the_library_is_the_one_that_was_published_and_its_licence_is_in_the_page():
    assets = files("octavo.report") / "assets"
    assert {name: hashlib.sha256((assets / name).read_bytes()).hexdigest() for name in HASHES} == HASHES
    assert (assets / "uPlot.LICENSE").read_text() in example().html()


def test_the_policy_allows_exactly_what_the_page_holds():
    html = example().html()
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    styles, scripts = re.findall("<style>(.*?)</style>", html, re.S), re.findall("<script>(.*?)</script>", html, re.S)
    hashed = [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in (*styles, *scripts)]
    assert len(scripts) == 2
    assert [*rules["style-src"].split(), *rules["script-src"].split()] == hashed
    assert {rules[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    assert "\r" not in html  # a browser reads it as another character, and the hash would not fit


def test_texts_cannot_leave_their_place():
    html = example().html()
    (data,) = re.findall('<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert json.loads(data)["charts"][0]["lines"][0] == {
        "name": "</script><b>", "x": [1, 2], "y": [0.5, None], "colour": 0, "dashed": False,
    }  # fmt: skip
    assert "<title>a &lt;b&gt;title&lt;/b&gt;</title>" in html
    assert "<script>alert" not in table(("a<",), [("<script>alert(1)</script>",)], places=[place("r", '"><i>', 3)])
    assert "<i>" not in table(("a",), [("b",)], title="<i>", remark="<i>", places=[place("r", '"><i>', 3)])


def test_a_page_without_charts_has_no_script():
    page = Page("empty")
    page.add(table(("a",), [("b",)]))
    assert "<script" not in page.html()
    assert "script-src 'none'" in page.html()
