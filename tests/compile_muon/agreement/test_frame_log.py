"""The record of visits that ranks compare."""

from __future__ import annotations

from compile_muon.agreement.frame_log import _REMEMBERED, FrameLog


def log_of(*visits: tuple[str, str, tuple[str, ...]]) -> FrameLog:
    log = FrameLog()
    for half, frame, names in visits:
        log.note(half, frame, names)
    return log


A, B = ("forward", "frame0000", ("a", "b")), ("forward", "frame0000", ("c",))


def test_order_half_and_parameters_count_but_not_what_a_rank_calls_its_frame() -> None:
    digest = log_of(A, B).digest()
    assert digest == log_of(A, B).digest()
    assert digest == log_of(A, ("forward", "frame0017", ("c",))).digest()
    for other in ((B, A), (A,), (A, B, B), (A, ("backward", "frame0000", ("c",))), (("forward", "", ("b", "a")), B)):
        assert digest != log_of(*other).digest(), other


def test_names_do_not_run_together() -> None:
    pairs = (("forward", "", ("ab",)), ("forward", "", ("a", "b"))), ((("forward", "", ("a",)),) * 2, (A,))
    assert log_of(pairs[0][0]).digest() != log_of(pairs[0][1]).digest()
    assert log_of(*pairs[1][0]).digest() != log_of(("forward", "", ("a", "a"))).digest()


def test_details_count() -> None:
    plain, reducing = FrameLog(), FrameLog()
    plain.note("backward", "", ["a"])
    reducing.note("backward", "", ["a"], ["reduce"])
    assert plain.digest() != reducing.digest()


def test_a_step_ends_it() -> None:
    log = log_of(A)
    log.close()
    assert log.digest() == FrameLog().digest()
    assert not log.visits() and log.count == 0


def test_only_the_last_visits_are_remembered_but_all_count() -> None:
    """A loop may evaluate for hours between two steps."""
    one, other = log_of(A), log_of(B)
    for log in (one, other):
        for _ in range(_REMEMBERED):
            log.note("forward", "", ["x"])
    assert one.visits() == other.visits()
    assert list(one.visits()) == list(range(1, _REMEMBERED + 1))
    assert one.digest() != other.digest()
