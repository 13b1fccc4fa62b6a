"""What a run shows: lines of long work, an optimizer in a few of them."""

import doctest
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import compile_muon
from compile_muon import folding, progress


def test_names_are_folded() -> None:
    assert doctest.testmod(folding).failed == 0
    experts = [(f"h.{layer}.experts.{i}.up", "muon") for layer in range(3) for i in (0, 1, 3)]
    assert folding.folded(experts) == [("h.0…2.experts.0…1,3.up × 9", "muon")]
    # What differs in more than the number stays apart.
    assert folding.folded([("h.0.up", "muon"), ("h.1.up", "adamw")]) == [("h.0.up", "muon"), ("h.1.up", "adamw")]


def test_an_optimizer_is_shown_in_a_few_lines() -> None:
    optimizer = compile_muon.MuonZero(nn.Sequential(*(nn.Linear(8, 8) for _ in range(7))))
    assert len(repr(optimizer).splitlines()) <= 5 and "muon: 6 parameters, algorithm muon, lr 0.02" in repr(optimizer)
    told = str(optimizer.summary())
    assert "0…5.weight × 6" in told and len(told.splitlines()) < 14


def test_long_work_says_how_long_and_short_work_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, lines = logging.getLogger("compile_muon"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with progress.underway("brief work"):
            pass
        with progress.underway("long work", (0.01, 60.0)):
            wait_for(lambda: any("so far" in line for line in lines))
        wait_for(lambda: len(lines) == 2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [line.rpartition(":")[0] for line in lines] == ["long work", "long work"] and "done after" in lines[1]
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])  # a program that shows warnings
    with progress.underway("unseen work", (0.01,)):
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[progress.Compilation]:
    """Compilations that have lines soon, in a program that sets up no logging and writes to a file."""
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level  # other tests run trainers, which set it
    logging.root.setLevel(logging.WARNING)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiling = progress.Compilation((0.05,), quiet=0.1)
    yield compiling
    logging.getLogger("compile_muon").setLevel(logging.NOTSET)
    logging.root.setLevel(level)


def test_compilation_is_told_of_without_a_terminal(
    unset: progress.Compilation, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(words: str) -> str:
        text = ""
        while words not in text:
            time.sleep(0.01)
            text += capsys.readouterr().err
        return text

    for last in ("", r"; it took \d+ s here last time"):
        with unset("a frame (blocks.4)"), unset("the backward of frame0000"):
            text = said("compiling the backward of frame0000: 0 of 2 graphs done")
        first, *_, done = (text + said("done after")).splitlines()
        assert re.search(r"\d s so far" + last + "$", first)
        assert done.startswith("compile_muon: compiling: 2 graphs done after")
    with unset("brief"):
        pass
    wait_for(lambda: not unset._pieces)
    logging.getLogger("compile_muon").setLevel(logging.WARNING)
    with unset("a frame (blocks.4)"):
        time.sleep(0.2)
    wait_for(lambda: not unset._pieces)
    assert capsys.readouterr() == ("", "")


def wait_for(condition: object) -> None:
    while not condition():
        time.sleep(0.01)
