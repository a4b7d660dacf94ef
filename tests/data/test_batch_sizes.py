"""Batch sizes in phases, against a loop that counts step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.batch_sizes import BatchSizes


class Naive:
    """Reference implementation that counts step by step."""

    def __init__(self, phases: list[tuple[int, int]]):
        self.phases = phases

    def at(self, step: int) -> int:
        return [size for start, size in self.phases if start <= step][-1]

    def before(self, step: int) -> int:
        return sum(self.at(earlier) for earlier in range(step))

    def whole_steps(self, sequences: int) -> int:
        steps = 0
        while self.before(steps + 1) <= sequences:
            steps += 1
        return steps


# phases that start at step 0, then at random gaps
PHASES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda pairs: [(sum(gap for gap, _ in pairs[:number]), size) for number, (_, size) in enumerate(pairs)]
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(PHASES, st.integers(0, 30), st.integers(0, 90))
def test_results_match_the_naive_count(phases, step, sequences):
    sizes, naive = BatchSizes.of(phases), Naive(phases)
    assert sizes.at(step) == naive.at(step)
    assert sizes.before(step) == naive.before(step)
    assert sizes.whole_steps(sequences) == naive.whole_steps(sequences)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(PHASES, st.integers(0, 10**12))
def test_steps_and_sequences_are_inverse(phases, step):
    """N steps are filled by exactly the sequences before step N, and not by one fewer."""
    sizes = BatchSizes.of(phases)
    assert sizes.whole_steps(sizes.before(step)) == step
    assert sizes.before(step + 1) == sizes.before(step) + sizes.at(step)
    if step:
        assert sizes.whole_steps(sizes.before(step) - 1) == step - 1


@pytest.mark.parametrize("size", [1, 7])
def test_one_size_is_one_phase(size):
    sizes = BatchSizes.of(size)
    assert sizes == BatchSizes.of([(0, size)])
    assert (sizes.all, sizes.at(0), sizes.at(10**9)) == ([size], size, size)
    assert (sizes.before(0), sizes.before(5)) == (0, 5 * size)
    assert (sizes.whole_steps(0), sizes.whole_steps(size - 1), sizes.whole_steps(3 * size)) == (0, 0, 3)


def test_a_phase_starts_at_its_step():
    sizes = BatchSizes.of([(0, 2), (3, 4), (5, 1)])
    assert [sizes.at(step) for step in range(7)] == [2, 2, 2, 4, 4, 1, 1]
    assert [sizes.before(step) for step in range(8)] == [0, 2, 4, 6, 10, 14, 15, 16]
    # 7 to 9 sequences fill the three small batches and no large one
    assert [sizes.whole_steps(number) for number in (6, 7, 9, 10, 13, 14, 15)] == [3, 3, 3, 4, 4, 5, 6]


def test_all_sizes_are_ascending_and_distinct():
    assert BatchSizes.of([(0, 8), (2, 4), (5, 8), (9, 16)]).all == [4, 8, 16]


def test_batch_sizes_can_be_compared_and_hashed():
    one, other = BatchSizes.of([(0, 2), (3, 4)]), BatchSizes.of(((0, 2), (3, 4)))
    assert one == other
    assert hash(one) == hash(other)
    assert one != BatchSizes.of(2)
