"""A headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver) with the standard library alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


class Browser:
    """One page, and what can be asked of it."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Show ``path`` in a window that is ``width`` CSS pixels wide."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        self.devtools("Emulation.setEmulatedMedia", features=features)
        call("POST", f"{self._session}/url", {"url": path.resolve().as_uri()})
        late = time.monotonic() + 30
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < late, f"{path} did not load within 30 s"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        return call("POST", f"{self._session}/execute/sync", {"script": f"return {expression}", "args": []})

    def messages(self) -> list[str]:
        """What the page wrote to the console since this was last asked, with requests that failed."""
        return [entry["message"] for entry in call("POST", f"{self._session}/se/log", {"type": "browser"})]

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the Chrome DevTools protocol."""
        return call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})


def call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """A WebDriver command, and the value of its answer."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)["value"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in the folder ``profile``; it is gone afterwards."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to run as root with one
    chrome = {"binary": CHROMIUM, "args": arguments}
    wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            server = f"http://127.0.0.1:{_port(driver)}"
            answer = call("POST", f"{server}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = f"{server}/session/{answer['sessionId']}"
            try:
                yield Browser(session)
            finally:
                call("DELETE", session)
        finally:
            driver.terminate()


def _port(driver: subprocess.Popen[str]) -> int:
    """The free port that chromedriver chose, which it says when it is ready."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip().rstrip(".").rpartition(" ")[2])
    raise RuntimeError("chromedriver ended before it was ready")
