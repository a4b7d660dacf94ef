"""Check a report in headless Chromium, without a network: `python tools/check_report.py REPORT.html [--screenshot F]`.

Exits with 1 if the page requests any other file, if the browser's console has a warning or an error, if a picture is
empty, if the page is wider than the window, or if a chart has no hover value or is not drawn for some axes.
Requires Debian's `chromium`, which is controlled by its debugging pipe.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SECONDS = 60
_FLAGS = [
    "--headless",
    "--no-sandbox",  # not available in a container
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]
# Measurements in the page that reveal missing content.
_MEASURE = """JSON.stringify({
  text: document.body.innerText.length,
  pictures: document.querySelectorAll("svg.chart").length,
  empty: [...document.querySelectorAll("svg.chart")].filter(e => e.getBoundingClientRect().height < 40).length,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  height: document.documentElement.scrollHeight,
})"""

# Uses the switches and the pointer, and returns what does not work.
_USE = """(() => {
  const problems = [];
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const [select, ...boxes] = document.querySelectorAll(".controls select, .controls input");
  const before = [select.value, ...boxes.map((box) => box.checked)];
  for (const axis of [...select.options].map((option) => option.value)) {
    for (const log of [false, true]) {
      select.value = axis;
      for (const box of boxes) box.checked = log;
      for (const each of [select, ...boxes]) each.dispatchEvent(new Event("change"));
      for (const figure of figures) {
        const svg = figure.querySelector(".chart");
        const area = svg.getBoundingClientRect();
        const [clientX, clientY] = [area.left + area.width * 0.4, area.top + area.height / 2];
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
        const where = `${figure.getAttribute("data-chart")} over ${axis}${log ? ", logarithmic" : ""}`;
        if (!figure.querySelector(".tip.shown")) problems.push(`${where}: no hover value`);
        if (!svg.querySelector(".drawn path")) problems.push(`${where}: not drawn`);
        if (svg.querySelectorAll(".drawn text").length < 4) problems.push(`${where}: no ticks`);
      }
    }
  }
  select.value = before[0];
  boxes.forEach((box, at) => { box.checked = before[at + 1]; });
  for (const each of [select, ...boxes]) each.dispatchEvent(new Event("change"));
  return JSON.stringify(problems);
})()"""


class Browser:
    """Chromium with one page; commands and events of its DevTools protocol use two pipes, with zero bytes as ends."""

    def __init__(self, program: str, profile: str, width: int):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:  # Chromium reads from 3 and writes to 4; move the pipes away from these numbers first
            read, write = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read, 3)
            os.dup2(write, 4)

        flags = [*_FLAGS, f"--window-size={width},900", f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [program, *flags], stdout=quiet, stderr=quiet, close_fds=False, preexec_fn=connect
        )
        os.close(to_browser)
        os.close(from_browser)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def open_page(self) -> None:
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive earlier are stored."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)
        raise SystemExit(f"{method}: no response")

    def wait_for(self, event: str) -> None:
        while not any(each.get("method") == event for each in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._in, 1 << 16)
            if not part:
                raise SystemExit("the browser exited")
            self._pending += part
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)


def check(browser: Browser, arguments: argparse.Namespace) -> list[str]:
    """The problems of the page."""
    page, screenshot = arguments.report, arguments.screenshot
    browser.open_page()
    for domain in ("Page", "Network", "Runtime", "Log"):
        browser.send(f"{domain}.enable")
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if arguments.dark else "light"}]
    browser.send("Emulation.setEmulatedMedia", features=scheme)
    browser.send("Page.navigate", url=page.resolve().as_uri() + arguments.axes)
    browser.wait_for("Page.loadEventFired")
    if arguments.open:
        browser.send("Runtime.evaluate", expression="document.querySelectorAll('details').forEach(e => e.open = true)")
    time.sleep(0.5)  # scripts or styles may send requests with a delay
    done = browser.send("Runtime.evaluate", expression=_USE)["result"]
    used = json.loads(done.get("value", '["the page has no switches, or its script fails"]'))
    found = json.loads(browser.send("Runtime.evaluate", expression=_MEASURE)["result"]["value"])
    if screenshot is not None:
        clip = {"x": 0, "y": 0, "width": arguments.width, "height": min(found["height"], 16_000), "scale": 1}
        picture = browser.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        screenshot.write_bytes(base64.b64decode(picture))
    print(f"{page}: {found['pictures']} pictures, {found['text']:,} characters, {found['height']:,} pixels high")
    problems = [*used, *_problems_of(browser.events, page.resolve().as_uri())]
    if found["empty"] or not found["pictures"]:
        problems.append(f"{found['empty']} of {found['pictures']} pictures are empty")
    if found["wide"] > 0:
        problems.append(f"the page is {found['wide']} pixels wider than the window")
    return problems


def _problems_of(events: list[dict[str, Any]], page: str) -> list[str]:
    """Problems in events: requests, failures, and console messages."""
    problems = []
    for event in events:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url != page and not url.startswith("data:"):
                problems.append(f"request to {url}")
        elif event.get("method") == "Network.loadingFailed":
            problems.append(f"request failed: {params['errorText']}")
        elif event.get("method") == "Runtime.exceptionThrown":
            problems.append(f"script failed: {params['exceptionDetails']['text']}")
        elif event.get("method") == "Runtime.consoleAPICalled":
            problems.append(f"script message: {[each.get('value') for each in params['args']]}")
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            problems.append(f"console: {params['entry']['text']}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--screenshot", type=Path, metavar="FILE.png", help="write a screenshot of the full page")
    parser.add_argument("--dark", action="store_true", help="use the dark color scheme")
    parser.add_argument("--open", action="store_true", help="unfold all foldable parts")
    parser.add_argument("--axes", default="", metavar="HASH", help="axes of the screenshot: '#x=tokens&log=xy'")
    parser.add_argument("--width", type=int, default=1280, help="width of the window in pixels")
    parser.add_argument("--chromium", default="chromium", help="name of the Chromium program")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(arguments.chromium, profile, arguments.width)
        try:
            problems = check(browser, arguments)
            browser.send("Page.close")
        finally:
            browser.process.terminate()
            browser.process.wait()
    for problem in problems:
        print(f"  {problem}")
    print("failed" if problems else "ok: complete and self-contained")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
