"""Batch sizes in phases, against a loop that counts step by step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.config import BatchSizes


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


def test_one_size_is_one_phase_and_all_sizes_are_ascending_and_distinct():
    assert BatchSizes.of(7) == BatchSizes.of([(0, 7)])
    assert BatchSizes.of([(0, 8), (2, 4), (5, 8), (9, 16)]).all == [4, 8, 16]
