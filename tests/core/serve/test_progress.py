"""How far the ranks of an attempt are: a plain dict is the oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.core.serve.progress import Progress

Ranks = tuple[int, int, int, int]
RANKS = st.tuples(st.integers(0, 3), st.integers(0, 1), st.just(0), st.just(0))
MOVES = st.lists(st.one_of(st.tuples(RANKS, st.integers(0, 9)), st.none()), max_size=40)


@given(MOVES)
def test_the_fewest_steps_are_those_of_some_rank_and_no_rank_has_fewer(moves: list[tuple[Ranks, int] | None]) -> None:
    progress = Progress()
    known: dict[Ranks, int] = {}
    for move in moves:
        if move is None:
            progress.clear()
            known.clear()
        else:
            ranks, upto = move
            progress[ranks] = known[ranks] = upto
            assert progress.others(ranks) == known.keys() - {ranks}
        assert dict(progress) == known
        assert not known or progress.least == min(known.values())
