"""A real Chromium, driven by selenium, and a real ``rankwatch ui`` for it to open."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from collectors import PATIENCE
from jobs import RANKWATCH, environment

T = TypeVar("T")
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """One window. ``complaints``: the console's messages, such as a refused script or an exception."""

    def __init__(self, base: str) -> None:
        self.base = base
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for option in OPTIONS:
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.size(1280, 900)

    def open(self, path: str) -> None:
        self.driver.get(self.base + path)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        text: str = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText).join('\\n')", selector
        )
        return text

    def until(self, what: Callable[[], T]) -> T:
        """Waits until ``what`` returns something true, and returns that."""
        deadline = time.monotonic() + PATIENCE
        while not (found := what()):
            assert time.monotonic() < deadline, f"never so; the page says:\n{self.text()}\n{self.complaints()}"
            time.sleep(0.05)
        return found

    def shows(self, text: str, selector: str = "body") -> None:
        self.until(lambda: text in self.text(selector))

    def chart(self, index: int = 0) -> str:
        """A chart's text for screen readers, once the chart is drawn."""
        ask = (
            "const box = document.querySelectorAll('.chart')[arguments[0]];"
            "return box && box.querySelector('canvas') && box.getAttribute('aria-label')"
        )
        label: str = self.until(lambda: self.run(ask, index))
        return label

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "text": "\r" if (kind, key) == ("keyDown", "Enter") else ""}
            self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)

    def click(self, selector: str, text: str) -> None:
        """Clicks the first such element that begins with this text."""
        self.until(
            lambda: self.run(
                "const found = [...document.querySelectorAll(arguments[0])].find((e) => e.innerText.startsWith(arguments[1]));"
                "if (found) found.click(); return !!found",
                selector,
                text,
            )
        )

    def type(self, selector: str, text: str) -> None:
        """Types into the first such field, over what it holds, key by key."""
        find = "const field = document.querySelector(arguments[0]); if (field) field.select(), field.focus(); return !!field"
        self.until(lambda: self.run(find, selector))
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})

    def click_chart(self, across: float, down: float, index: int = 0) -> None:
        """Clicks into a chart's grid by the mouse, at these shares of the chart's width and height."""
        self.chart(index)
        ask = (
            "const box = document.querySelectorAll('.chart')[arguments[0]]; box.scrollIntoView({ block: 'center' });"
            "const { left, top, width, height } = box.getBoundingClientRect(); return [left, top, width, height]"
        )
        left, top, width, height = self.run(ask, index)
        at = {"x": left + across * width, "y": top + down * height, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **at})

    def complaints(self) -> list[str]:
        log: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [line["message"] for line in log]


def is_there() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


needed = pytest.mark.skipif(not is_there(), reason="no Chromium: apt-get install chromium chromium-driver")


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The URL that a running ``rankwatch ui`` prints."""
    command = [*RANKWATCH, "ui", str(runs), "--port", "0"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "is shown at http://127.0.0.1:" in line
        yield line.split()[-1]
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
        process.stdout.close()


@contextmanager
def browsing(runs: Path) -> Iterator[Browser]:
    """A browser that has the token."""
    with served(runs) as url:
        browser = Browser(url.partition("/?")[0])
        try:
            browser.driver.get(url)
            yield browser
            assert not browser.complaints()
        finally:
            browser.driver.quit()
