"""The record of visits that ranks compare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from compile_muon.runtime.trail import _REMEMBERED, Trail


def accounts(*names: str) -> Any:
    return [SimpleNamespace(name=name, key=name.encode()) for name in names]


def trail_of(*visits: tuple[str, str, tuple[str, ...]]) -> Trail:
    trail = Trail()
    for half, frame, names in visits:
        trail.note(half, frame, accounts(*names))
    return trail


A, B = ("forward", "frame0000", ("a", "b")), ("forward", "frame0000", ("c",))


def test_order_half_and_parameters_count_but_not_what_a_rank_calls_its_frame() -> None:
    digest = trail_of(A, B).digest()
    assert digest == trail_of(A, B).digest()
    assert digest == trail_of(A, ("forward", "frame0017", ("c",))).digest()
    for other in ((B, A), (A,), (A, B, B), (A, ("backward", "frame0000", ("c",))), (("forward", "", ("b", "a")), B)):
        assert digest != trail_of(*other).digest(), other


def test_names_do_not_run_together() -> None:
    pairs = (("forward", "", ("ab",)), ("forward", "", ("a", "b"))), ((("forward", "", ("a",)),) * 2, (A,))
    assert trail_of(pairs[0][0]).digest() != trail_of(pairs[0][1]).digest()
    assert trail_of(*pairs[1][0]).digest() != trail_of(("forward", "", ("a", "a"))).digest()


def test_details_count() -> None:
    plain, reducing = Trail(), Trail()
    plain.note("backward", "", accounts("a"))
    reducing.note("backward", "", accounts("a"), ["reduce"])
    assert plain.digest() != reducing.digest()


def test_a_step_ends_it() -> None:
    trail = trail_of(A)
    trail.close()
    assert trail.digest() == Trail().digest()
    assert not trail.visits() and trail.count == 0


def test_only_the_last_visits_are_remembered_but_all_count() -> None:
    """A loop may evaluate for hours between two steps."""
    one, other = trail_of(A), trail_of(B)
    for trail in (one, other):
        for _ in range(_REMEMBERED):
            trail.note("forward", "", accounts("x"))
    assert one.visits() == other.visits()
    assert list(one.visits()) == list(range(1, _REMEMBERED + 1))
    assert one.digest() != other.digest()
