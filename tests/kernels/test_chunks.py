"""Chunks: every matrix once, memory bounded."""

from hypothesis import given
from hypothesis import strategies as st

from compile_muon.kernels.batching import Stack, chunked

STACKS = st.lists(st.builds(Stack, matrices=st.integers(1, 12), bytes_each=st.integers(1, 60)), max_size=12)
LIMITS = st.integers(0, 200)


def taken(chunk: list[tuple[int, slice]], stacks: list[Stack]) -> int:
    return sum((piece.stop - piece.start) * stacks[index].bytes_each for index, piece in chunk)


@given(STACKS, LIMITS)
def test_every_matrix_exactly_once(stacks, limit):
    found = [(index, i) for chunk in chunked(stacks, limit) for index, p in chunk for i in range(p.start, p.stop)]
    assert sorted(found) == [(index, i) for index, stack in enumerate(stacks) for i in range(stack.matrices)]


@given(STACKS, LIMITS)
def test_a_chunk_over_the_limit_is_one_matrix(stacks, limit):
    for chunk in chunked(stacks, limit):
        matrices = sum(p.stop - p.start for _, p in chunk)
        assert matrices >= 1 and all(p.stop > p.start for _, p in chunk)
        assert matrices == 1 or taken(chunk, stacks) <= limit
        assert len({index for index, _ in chunk}) == len(chunk)


def test_a_stack_is_cut_where_the_limit_is():
    assert chunked([Stack(5, 10)], 25) == [[(0, slice(0, 2))], [(0, slice(2, 4))], [(0, slice(4, 5))]]
    assert chunked([Stack(1, 5), Stack(1, 40), Stack(3, 10)], 30) == [
        [(1, slice(0, 1))], [(2, slice(0, 3))], [(0, slice(0, 1))],
    ]  # fmt: skip
    assert chunked([], 10) == []
