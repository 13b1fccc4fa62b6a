"""Opens a page in Chromium's engine: `python browser.py PAGE PICTURE` prints what it shows as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import (
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInfo,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

SHOWN = """JSON.stringify({
    drawings: [...document.querySelectorAll("svg")].map(e => [e.clientWidth, e.clientHeight]),
    cut: [...document.querySelectorAll(".scroll")].map(e => e.scrollWidth - e.clientWidth),
    cells: [...document.querySelectorAll("td")].map(e => e.innerText),
})"""


class Requests(QWebEngineUrlRequestInterceptor):
    """What the page asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:  # noqa: N802, the name is Qt's
        self.urls.append(info.requestUrl().toString())


def main(page: Path, picture: Path) -> None:
    # As root and without a display or a GPU, as tests run.
    os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu"
    app = QApplication(sys.argv[:1])
    requests, view = Requests(), QWebEngineView()
    profile = QWebEngineProfile.defaultProfile()
    assert profile is not None
    profile.setUrlRequestInterceptor(requests)
    shown = view.page()
    assert shown is not None
    settings = shown.settings()
    assert settings is not None
    # Else what a file asks of other hosts is refused before it is seen here.
    settings.setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
    view.resize(1100, 1600)

    def report(text: str) -> None:
        # Painted some frames behind the layout that scripts see.
        QTimer.singleShot(1500, lambda: finish(text))

    def finish(text: str) -> None:
        view.grab().save(str(picture))
        print(json.dumps({"requests": requests.urls, **json.loads(text)}))
        app.quit()

    shown.loadFinished.connect(lambda _: shown.runJavaScript(SHOWN, report))
    view.load(QUrl.fromLocalFile(str(page)))
    view.show()
    QTimer.singleShot(60_000, app.quit)
    app.exec()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
