"""The pages in a browser: drawn, moved over, filtered, typed into; and nothing is requested or complains."""

import json
import os
import shutil

import pytest
from patience import HANG
from report_examples import make_run, write_metrics
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from octavo.report.page import page_of_report
from octavo.report.training_page import page_of_runs
from octavo.train.run_records import read_runs
from octavo.verification.findings import LayerReport, Report, invocation_of

pytestmark = pytest.mark.slow


class Browser:
    """One tab. `open` shows a page, and fails on an error on its console and on a request other than for the page."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path):
        """Show the page in a window of 1200 x 900 pixels, and wait until it is drawn."""
        size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.theme("light")
        self.driver.get_log("performance")  # forget the page before
        self.driver.get(path.as_uri())
        WebDriverWait(self.driver, HANG, 0.02).until(lambda _: self.run("document.documentElement.dataset.drawn"))
        self.check()

    def check(self):
        """Fail if the console has a message, or if anything but one file was requested since `open`."""
        assert self.driver.get_log("browser") == []
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        assert [url for url in urls if not url.startswith("file:")] == []
        assert len(urls) <= 1

    def theme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, expression, *arguments):
        """The value of an expression of JavaScript; its arguments are `arguments[0]`, ..."""
        return self.driver.execute_script(f"return {expression}", *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def text(self, selector):
        return str(self.run("document.querySelector(arguments[0]).textContent", selector))

    def wait_for(self, selector, text):
        """The text of an element as soon as it has `text`. A chart follows the mouse in its next frame."""
        wait = WebDriverWait(self.driver, HANG, 0.02)
        wait.until(lambda _: text in self.text(selector), f"no {text!r} in {selector}")
        return self.text(selector)

    def point(self, selector, right, down, *, click=False):
        """Move the mouse into an element: shares of its width and height from its top left corner."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        box = element.rect
        offset = int((right - 0.5) * box["width"]), int((down - 0.5) * box["height"])
        actions = ActionChains(self.driver, duration=0).move_to_element_with_offset(element, *offset)
        (actions.click() if click else actions).perform()

    def press(self, *keys):
        self.driver.switch_to.active_element.send_keys(*keys)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium: Debian's packages chromium and chromium-driver, or any others on the PATH. Without it the
    test is skipped; in CI (the environment variable CI) it fails."""
    program, chromedriver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or chromedriver is None:
        missing = "needs Chromium and chromedriver: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


FOCUSED = """(e) => [
  e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent,
  e.id || e.closest('figure')?.id || e.tagName,
]"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs, of which the first was watched: 73 layers as in GPT-2 124M, 2,000 steps, a sample every 50."""
    root = tmp_path_factory.mktemp("report")
    runs = [make_run(root / "rowwise", layers=73, steps=2000, interval=50), root / "bf16"]
    write_metrics(runs[1], 2000, offset=-0.1)
    path = root / "page.html"
    path.write_text(page_of_runs(read_runs(runs)).html(), encoding="utf-8")
    return path


def choose(browser, control, value):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
    browser.driver.execute_script(script, browser.find(f"#{control}"), value)


def test_the_charts_are_drawn(browser, page):
    assert page.stat().st_size < 5e6
    browser.open(page)
    canvases = browser.run("[...document.querySelectorAll('figure canvas')].map(c => c.width * c.height)")
    assert len(canvases) == 7
    assert min(canvases) > 100_000
    for chart in ("loss", "gap", "speed", "gradient", "memory", "heat", "histogram"):
        painted = "new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
        script = f"const c = document.querySelector('#{chart} canvas'); return {painted}"
        assert browser.driver.execute_script(script) > 10, chart


def test_the_values_under_the_mouse_are_said(browser, page):
    browser.open(page)
    browser.point("#loss .u-over", 0.5, 0.5)
    found = browser.wait_for("#loss .readout", "rowwise 3.")
    assert found.startswith("step 1,00")
    assert "bf16 3." in found
    browser.point("#loss .u-over", 0.9995, 0.5)
    browser.wait_for("#loss .readout", "rowwise, saturation_spike: 10.0% of dy saturates")
    choose(browser, "operand", "dy")
    browser.point("#heat .u-over", 0.99, 2.5 / 73, click=True)
    browser.wait_for("#heat .readout", "model.layers.0.attn.v_proj, step 2000: saturated share 20 %")
    assert browser.text("#histogram-caption").startswith("model.layers.0.attn.v_proj, dy at step 2000: amax ")
    assert "in e5m2, scales " in browser.text("#histogram-caption")
    browser.check()


def test_a_line_can_be_hidden_and_a_chart_be_logarithmic(browser, page):
    browser.open(page)
    buttons = browser.driver.find_elements("css selector", "#loss .legend button")
    assert [button.text for button in buttons] == ["rowwise", "rowwise evaluation", "bf16", "bf16 evaluation"]
    linear = browser.run("document.querySelector('#loss canvas').toDataURL()")
    buttons[0].send_keys(Keys.ENTER)
    assert buttons[0].get_attribute("aria-pressed") == "false"
    browser.point("#loss .u-over", 0.5, 0.5)
    assert "rowwise 3." not in browser.wait_for("#loss .readout", "bf16 3.")
    browser.find("#loss .legend input").click()
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.run("document.querySelectorAll('#loss canvas').length") == 1
    assert browser.run("document.querySelector('#loss canvas').toDataURL()") != linear
    browser.point("#loss .u-over", 0.5, 0.5)
    assert "rowwise 3." not in browser.wait_for("#loss .readout", "bf16 3.")  # it is hidden as before
    browser.theme("dark")
    browser.check()


def test_the_filter_hides_layers_everywhere(browser, page):
    browser.open(page)
    browser.find("#filter").send_keys("layers.1. MLP")
    assert browser.text("#shown") == "2 of 73 layers"
    options = browser.run("[...document.querySelectorAll('#layer option')].map(o => o.text)")
    assert options == ["model.layers.1.mlp.up", "model.layers.1.mlp.down"]
    shown = browser.run("[...document.querySelectorAll('tr[data-layer]')].filter(r => !r.hidden).length")
    assert shown == 2  # of what ran where; the event is of another layer
    browser.point("#heat .u-over", 0.5, 0.75)
    browser.wait_for("#heat .readout", "model.layers.1.mlp.down, step 10")
    browser.find("#filter").send_keys(" nothing")
    assert browser.text("#heat .readout") == "No layer has these words in its name."
    browser.find("#filter").send_keys(Keys.CONTROL, "a", Keys.BACKSPACE)
    assert browser.text("#shown") == "73 of 73 layers"
    browser.check()


def test_an_event_leads_to_its_cell(browser, page):
    browser.open(page)
    events = browser.driver.find_elements("css selector", "tr button")
    assert [button.text for button in events] == ["model.layers.0.attn.v_proj"]
    events[0].send_keys(Keys.ENTER)
    assert browser.text("#heat .readout").startswith("model.layers.0.attn.v_proj, step 2000: ")
    assert browser.text("#histogram-caption").startswith("model.layers.0.attn.v_proj, dy at step 2000: ")
    assert browser.run("document.activeElement.closest('figure').id") == "heat"


def test_everything_is_reached_and_moved_by_keys(browser, page):
    browser.open(page)
    reached = []
    while len(reached) < 60:
        browser.press(Keys.TAB)
        name, place = browser.run(f"({FOCUSED})(document.activeElement)")
        if place == "BODY":  # after the last
            break
        assert name.strip(), place
        reached.append(place)
    assert {"loss", "speed", "run", "metric", "operand", "filter", "heat", "layer", "step", "histogram"} <= set(reached)
    choose(browser, "metric", "sqnr")
    browser.run("document.querySelector('#heat .plot').focus()")
    browser.press(Keys.PAGE_UP * 8, Keys.HOME)
    assert browser.text("#heat .readout").startswith("model.layers.0.attn.q_proj, step 50: SQNR ")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert browser.text("#heat .readout").startswith("model.layers.0.attn.k_proj, step 100: SQNR ")
    assert browser.text("#histogram-caption").startswith("model.layers.0.attn.k_proj, dy at step 100: ")
    browser.run("document.querySelector('#loss .plot').focus()")
    browser.press(Keys.END)
    assert browser.text("#loss .readout").startswith("step 2,000: ")
    browser.press(Keys.ARROW_LEFT)
    assert browser.text("#loss .readout").startswith("step 1,999: ")
    browser.run("document.querySelector('#histogram .plot').focus()")
    browser.press(Keys.HOME, Keys.END, Keys.ARROW_LEFT)
    assert browser.text("#histogram .readout").endswith("25 % of the elements")  # the second binade from above
    browser.check()


def test_each_chart_has_its_data_as_a_table(browser, page):
    browser.open(page)
    rows = {}
    for chart, head in (("loss", "step"), ("heat", "layer"), ("histogram", "magnitude")):
        browser.find(f"#{chart} summary").click()
        browser.wait_for(f"#{chart} .wide", head)  # the page fills the table when the event of the click arrives
        found = f"[...document.querySelectorAll('#{chart} details tr')]"
        rows[chart] = browser.run(f"{found}.map(r => [...r.children].map(c => c.textContent))")
    assert rows["loss"][0] == ["step", "rowwise", "rowwise evaluation", "bf16", "bf16 evaluation"]
    assert len(rows["loss"]) == 2001
    assert (len(rows["heat"]), len(rows["heat"][0])) == (74, 41)
    assert rows["heat"][-1][:2] == ["lm_head", "none"]
    assert len(rows["histogram"]) == 41
    assert rows["histogram"][1][1] == "50 %"


def test_inf_and_nan_are_said(browser, tmp_path):
    losses = {1: 2.0, 2: None, 3: 1.5}
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    path = tmp_path / "page.html"
    path.write_text(page_of_runs(read_runs([tmp_path])).html(), encoding="utf-8")
    browser.open(path)
    assert "loss is inf or NaN at step 2." in browser.text("body")
    browser.run("document.querySelector('#loss .plot').focus()")
    browser.press(Keys.HOME, Keys.ARROW_RIGHT)
    assert browser.text("#loss .readout") == f"step 2: {tmp_path.name} inf or NaN"
    browser.check()


def test_a_page_of_one_step_takes_every_key(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of_runs(read_runs([make_run(tmp_path / "run", layers=4, steps=1, interval=1)])).html())
    browser.open(path)
    for chart in ("loss", "heat", "histogram"):
        browser.run(f"document.querySelector('#{chart} .plot').focus()")
        browser.press(Keys.END, Keys.ARROW_LEFT, Keys.HOME, Keys.ARROW_RIGHT)
        browser.press(Keys.PAGE_UP, Keys.ARROW_DOWN, Keys.ESCAPE)
    assert browser.text("#heat .readout").startswith("model.layers.0.attn.k_proj, step 1: ")
    browser.check()


def test_the_page_of_verify(browser, tmp_path):
    layers = [LayerReport(f"layer.{i}", "e4m3 row", (64, 64), 30.0 + i, 20.0 + i) for i in range(12)]
    report = Report(tmp_path / "packed", tmp_path / "model", "LlamaForCausalLM", layers=layers)
    path = tmp_path / "verify.html"
    path.write_text(page_of_report(report, invocation_of("octavo verify")).html(), encoding="utf-8")
    browser.open(path)
    browser.run("document.querySelector('#sqnr .plot').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.text("#sqnr .readout") == "layer.1: weight 31, output 21"
    browser.check()
