"""A headless Chromium for pages: Debian's packages chromium and chromium-driver, or any others on the PATH."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import HANG
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.wait import WebDriverWait

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Browser:
    """One tab. `open` shows a page, and fails on an error on its console and on a request other than for the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Show the page in a window of 1200 x 900 pixels, and wait until it is drawn."""
        size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.theme("light")
        self.driver.get_log("performance")  # forget the page before
        self.driver.get(path.as_uri())
        WebDriverWait(self.driver, HANG, 0.02).until(lambda _: self.run("document.documentElement.dataset.drawn"))
        self.check()

    def check(self) -> None:
        """Fail if the console has a message, or if anything but one file was requested since `open`."""
        assert self.driver.get_log("browser") == []
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        assert [url for url in urls if not url.startswith("file:")] == []
        assert len(urls) <= 1

    def theme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, expression: str, *arguments: Any) -> Any:
        """The value of an expression of JavaScript; its arguments are `arguments[0]`, ..."""
        return self.driver.execute_script(f"return {expression}", *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.run("document.querySelector(arguments[0]).textContent", selector))

    def wait_for(self, selector: str, text: str) -> str:
        """The text of an element as soon as it has `text`. A chart follows the mouse in its next frame."""
        WebDriverWait(self.driver, HANG, 0.02).until(
            lambda _: text in self.text(selector), f"no {text!r} in {selector}"
        )
        return self.text(selector)

    def point(self, selector: str, right: float, down: float, *, click: bool = False) -> None:
        """Move the mouse into an element: shares of its width and height from its top left corner."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        box = element.rect
        offset = int((right - 0.5) * box["width"]), int((down - 0.5) * box["height"])
        actions = ActionChains(self.driver, duration=0).move_to_element_with_offset(element, *offset)
        (actions.click() if click else actions).perform()

    def press(self, *keys: str) -> None:
        """Type into the element that has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Without Chromium the test is skipped; in CI (the environment variable CI) it fails."""
    program, chromedriver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or chromedriver is None:
        missing = "needs Chromium and chromedriver: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
