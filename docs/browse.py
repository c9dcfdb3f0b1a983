"""Open every page of the built site in Chromium, and report problems; run by ``make docs-browser``.

A page must load without errors on the console, without requests that fail or go to other hosts, and without
scrolling sideways. Each page is opened on a phone in light colors, and on a desktop in dark colors.
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple

from playwright.sync_api import ConsoleMessage, Page, Request, Response, sync_playwright

SITE = Path(__file__).parent.parent / "site"


class Screen(NamedTuple):
    """A screen, and the colors that its user prefers."""

    name: str
    width: int
    height: int
    colors: Literal["light", "dark"]


SCREENS = [
    Screen("phone", 390, 844, "light"),
    Screen("desktop", 1440, 900, "dark"),
]

# The outermost elements that stick out of the page and are not in an element that scrolls.
STICKING_OUT = """() => {
    const width = document.documentElement.clientWidth
    const scrolls = element => {
        for (let up = element.parentElement; up && up !== document.body; up = up.parentElement)
            if (getComputedStyle(up).overflowX !== "visible") return true
        return false
    }
    const out = [...document.querySelectorAll("main *")].filter(
        element => element.getBoundingClientRect().right > width + 1 && !scrolls(element))
    return out.filter(element => !out.includes(element.parentElement)).map(
        element => `<${element.tagName.toLowerCase()}> ${element.textContent.trim().slice(0, 60)}`)
}"""


class _Quiet(SimpleHTTPRequestHandler):
    """Serve files without logging each request."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Log nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the site at a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def pages(site: Path) -> list[str]:
    """Return the paths of all pages, relative to the root of the site."""
    found = sorted(site.rglob("index.html"))
    return [str(path.parent.relative_to(site)).removeprefix(".") for path in found]


def check(page: Page, url: str, root: str) -> list[str]:
    """Open a page, and return its problems."""
    wrong: list[str] = []

    def console(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            wrong.append(f"{message.type} on the console: {message.text}")

    def request(request: Request) -> None:
        if not request.url.startswith(("data:", "blob:", root)):
            wrong.append(f"request to another host: {request.url}")

    def response(response: Response) -> None:
        if response.status >= HTTPStatus.BAD_REQUEST:
            wrong.append(f"status {response.status}: {response.url}")

    listeners = {
        "console": console,
        "pageerror": lambda error: wrong.append(f"error: {error}"),
        "request": request,
        "requestfailed": lambda request: wrong.append(f"failed request: {request.url}"),
        "response": response,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(url, wait_until="networkidle")
    width, available = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    out = page.evaluate(STICKING_OUT)
    if width > available or out:
        wrong.append(f"it is {width} px wide, and the screen {available}; these stick out: {out[:5]}")
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return wrong


def main() -> None:
    """Check all pages on all screens; exit with status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the path of Chromium")
    parser.add_argument("--screenshots", type=Path, help="a folder for a picture of each page")
    parser.add_argument("--page", action="append", help="a page to open, such as tutorial; all if omitted")
    options = parser.parse_args()
    if not (SITE / "index.html").exists():
        parser.error("there is no site: run `make docs` first")
    if options.chromium is None:
        parser.error("Chromium is not installed: install the package chromium, or pass --chromium")
    count = failures = 0
    with served(SITE) as root, sync_playwright() as playwright:
        # Chromium has no sandbox for root, and the pages are ours.
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for screen in SCREENS:
            context = browser.new_context(
                viewport={"width": screen.width, "height": screen.height}, color_scheme=screen.colors
            )
            page = context.new_page()
            for path in options.page or pages(SITE):
                wrong = check(page, f"{root}{path}/" if path else root, root)
                count += 1
                failures += bool(wrong)
                for text in wrong:
                    print(f"{screen.name}: /{path}: {text}")
                if options.screenshots is not None:
                    name = f"{path.replace('/', '-') or 'home'}-{screen.name}.png"
                    page.screenshot(path=options.screenshots / name, full_page=True)
            context.close()
        browser.close()
    print(f"opened {count} pages, of which {failures} have a problem")
    sys.exit(1 if failures or not count else 0)


if __name__ == "__main__":
    main()
