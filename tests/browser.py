"""Opens every page of the site in Chromium's engine, searches it, and prints what it shows as JSON.

`python browser.py FOLDER`; the words to search for stand on standard input, one a line.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInfo,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

WIDTHS = (1280, 420)

# What only scrolls with the page: not what lies in a box that scrolls, or hides, what is too wide for it.
LAYOUT = """(() => {
    const room = document.documentElement.clientWidth;
    const boxed = e =>
        e && e != document.body && (getComputedStyle(e).overflowX != "visible" || boxed(e.parentElement));
    const wide = [...document.querySelectorAll(".md-content *")].filter(
        e => e.getBoundingClientRect().right > room + 1 && !boxed(e.parentElement));
    return JSON.stringify({
        overflow: Math.max(0, document.documentElement.scrollWidth - room),
        wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 120)),
    });
})()"""

PARTS = """JSON.stringify({
    ids: [...document.querySelectorAll("[id], a[name]")].map(e => e.id || e.name),
    links: [...document.querySelectorAll("a[href]")].map(e => e.href),
    edit: [...document.querySelectorAll("a[rel=edit]")].map(e => e.href),
    header: document.querySelector(".md-header__topic").innerText.trim(),
    symbols: [...document.querySelectorAll(".doc-heading")].map(e => e.id),
    neighbours: [...document.querySelectorAll(".md-footer__link")].map(e => e.href.split("/").pop()),
    code: document.querySelectorAll("pre > code").length,
    copies: document.querySelectorAll("pre > .md-code__nav").length,
    empty: [...document.querySelectorAll("thead")].filter(t => t.offsetHeight && !t.innerText.trim()).length,
    images: [...document.images].filter(e => e.complete && !e.naturalWidth).map(e => e.src),
})"""

# The search is drawn in a shadow root, which opens with it; results come from the worker.
SEARCH = """(async () => {
    window.found = null;
    const until = async (ready, ms = 20000) => {
        for (const end = Date.now() + ms; Date.now() < end && !ready();) await new Promise(r => setTimeout(r, 50));
        return ready();
    };
    const roots = () => [...document.querySelectorAll("*")].map(e => e.shadowRoot);
    const root = () => roots().find(r => r && r.querySelector("input"));
    const button = document.querySelector(".md-search__button");
    await until(() => { button.click(); return root(); });
    const found = {};
    for (const word of WORDS) {
        const input = root().querySelector("input");
        input.value = word;
        input.dispatchEvent(new Event("input", {bubbles: true}));
        const first = () => root().querySelector(`a[href*="h=${word}"]`);
        await until(first);
        found[word] = first() && first().href;
    }
    window.found = found;
})()"""


TOGGLE = """(() => {
    const scheme = () => document.body.dataset.mdColorScheme;
    const before = scheme();
    [...document.querySelectorAll("label[for^=__palette]")].find(e => e.offsetWidth).click();
    return JSON.stringify([before, scheme()]);
})()"""


class Requests(QWebEngineUrlRequestInterceptor):
    """What pages ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:  # noqa: N802, the name is Qt's
        self.urls.append(info.requestUrl().toString())


class Page(QWebEnginePage):
    """A page, and what it says in the console."""

    def __init__(self, parent: QWebEngineView) -> None:
        super().__init__(parent)
        self.said: list[str] = []

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:  # noqa: N802
        if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
            self.said.append(f"{source}:{line}: {message}")


class Browser:
    """A window of Chromium's engine, driven from top to bottom."""

    def __init__(self) -> None:
        # As root and without a display or a GPU, as tests run.
        os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
        os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu"
        self.app = QApplication(sys.argv[:1])
        self.requests, self.view = Requests(), QWebEngineView()
        profile = QWebEngineProfile.defaultProfile()
        profile.setUrlRequestInterceptor(self.requests)
        self.page = Page(self.view)
        self.view.setPage(self.page)
        settings = self.page.settings()
        # Else what a file asks of other hosts is refused before it is seen here.
        settings.setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)

    def open(self, path: Path, width: int, height: int) -> None:
        """Load a page and show it."""
        loaded: list[bool] = []
        note = self.page.loadFinished.connect(loaded.append)
        self.view.resize(width, height)
        self.view.load(QUrl.fromLocalFile(str(path.resolve())))
        self.view.show()
        self._until(lambda: bool(loaded))
        assert loaded[0], f"{path} did not load"
        self.page.loadFinished.disconnect(note)

    def ask(self, script: str) -> Any:
        """The value of a script."""
        values: list[Any] = []
        self.page.runJavaScript(script, values.append)
        self._until(lambda: bool(values))
        return values[0]

    def wait(self, seconds: float) -> None:
        """Let the page go on."""
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() > end)

    def wait_for(self, script: str, value: Any) -> None:
        """Let the page go on until a script has this value."""
        self._until(lambda: self.ask(script) == value)

    def _until(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        wake = QTimer()  # or events are waited for that do not come
        wake.start(5)
        while not ready():
            assert time.monotonic() < end, "the page does not answer"
            self.app.processEvents()
            time.sleep(0.002)


def site(folder: Path, words: list[str]) -> dict[str, Any]:
    """Each page by its path, with its layout at each width; colors ahead of a click and behind; what a search finds."""
    browser, pages = Browser(), {}
    for path in sorted(set(folder.rglob("*.html")) - {folder / "404.html"}):  # a server's, which knows its own root
        browser.page.said.clear()
        browser.open(path, WIDTHS[0], 1000)
        browser.wait(0.15)  # scripts that wrap tables and put buttons at code run behind loading
        found = json.loads(browser.ask(PARTS))
        for width in WIDTHS:
            browser.view.resize(width, 1000)
            browser.wait(0.1)
            browser.wait_for("innerWidth", width)
            found[str(width)] = json.loads(browser.ask(LAYOUT))
        pages[path.relative_to(folder).as_posix()] = {**found, "said": list(browser.page.said)}
    browser.open(folder / "index.html", WIDTHS[0], 1000)
    browser.wait(0.15)
    colors = json.loads(browser.ask(TOGGLE))
    browser.ask(SEARCH.replace("WORDS", json.dumps(words)))
    while (found := browser.ask("JSON.stringify(window.found)")) == "null":
        browser.wait(0.1)
    return {"requests": browser.requests.urls, "pages": pages, "found": json.loads(found), "colors": colors}


if __name__ == "__main__":
    print(json.dumps(site(Path(sys.argv[1]), sys.stdin.read().split())))
    sys.stdout.flush()
    os._exit(0)  # Qt's own end of a page that is still there is noise
