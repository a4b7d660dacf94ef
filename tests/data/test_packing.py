"""Which documents share a sequence."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data import packing
from lmtrain.data.packing import kept_lengths, pack, pieces_of

LENGTHS = st.lists(st.integers(0, 30), max_size=60)
ANY_SPEED = settings(deadline=None, max_examples=60, derandomize=True)


def packed(lengths, seq_len, too_long="cut", how="best_fit"):
    """The documents of each sequence, and the number of those that are too long."""
    found = pack(np.array(lengths, np.int64), seq_len, too_long, how)
    return [part.tolist() for part in np.split(found.documents, found.offsets[1:-1]) if len(part)], found.too_long


@ANY_SPEED
@given(LENGTHS, st.integers(2, 20), st.sampled_from(["cut", "drop"]))
def test_first_fit_takes_documents_in_order_until_the_next_one_does_not_fit(lengths, seq_len, too_long):
    found, num_long = packed(lengths, seq_len, too_long, "first_fit")
    expected, sequence = [], []
    for number, length in enumerate(lengths):
        if sequence and sum(min(lengths[other], seq_len) for other in sequence) + length > seq_len:
            expected.append(sequence)
            sequence = []
        sequence += [number] * (0 < length <= seq_len or (length > 0 and too_long == "cut"))
    assert found == [*expected, *([sequence] if sequence else [])]
    assert num_long == sum(length > seq_len for length in lengths)


def by_definition(lengths, seq_len):
    """Best fit decreasing, as its definition says."""
    sequences = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        rooms = [seq_len - sum(lengths[other] for other in sequence) for sequence in sequences]
        fitting = [at for at, room in enumerate(rooms) if room >= lengths[number]]
        if fitting:
            sequences[min(fitting, key=lambda at: (rooms[at], at))].append(number)
        else:
            sequences.append([number])
    return sorted(sorted(sequence) for sequence in sequences)


@ANY_SPEED
@given(LENGTHS, st.integers(2, 20), st.sampled_from(["cut", "drop"]), st.sampled_from([7, 16_384]))
def test_best_fit_is_that_of_its_definition_in_the_order_of_documents(lengths, seq_len, too_long, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_BLOCK", block)
        found, num_long = packed(lengths, seq_len, too_long)
    kept = [number for number, length in enumerate(lengths) if 0 < length <= seq_len or (length and too_long == "cut")]
    expected = []
    for at in range(0, len(kept), block):
        part = kept[at : at + block]
        sequences = by_definition([min(lengths[number], seq_len) for number in part], seq_len)
        expected += [[part[place] for place in sequence] for sequence in sequences]
    assert found == expected
    assert num_long == sum(length > seq_len for length in lengths)


@ANY_SPEED
@given(LENGTHS, st.integers(2, 20), st.sampled_from(["first_fit", "best_fit"]), st.booleans())
def test_pieces_are_the_tokens_of_the_documents(lengths, seq_len, how, in_pairs):
    lengths = np.array([length + 1 for length in lengths][: len(lengths) // 2 * 2], np.int64)
    of_units = lengths.reshape(-1, 2).sum(1) if in_pairs else lengths
    found = pack(of_units, seq_len, "cut", how)
    pieces = pieces_of(found, lengths, seq_len, in_pairs)
    begins = np.cumsum(lengths) - lengths
    for sequence, units in enumerate(np.split(found.documents, found.offsets[1:-1])):
        expected = []
        for unit in units.tolist():
            numbers = [2 * unit, 2 * unit + 1] if in_pairs else [unit]
            kept = kept_lengths(*lengths[numbers], seq_len) if in_pairs else [min(lengths[unit], seq_len)]
            for number, length in zip(numbers, kept, strict=True):
                expected += range(begins[number], begins[number] + length)
        own = slice(*pieces.offsets[sequence : sequence + 2])
        ranges = list(zip(pieces.starts[own].tolist(), pieces.lengths[own].tolist(), strict=True))
        assert [token for start, length in ranges for token in range(start, start + length)] == expected
        assert len(expected) <= seq_len
        assert all(start + length != after for (start, length), (after, _) in itertools.pairwise(ranges))
        assert begins[pieces.documents[own]].tolist() == [start for start, _ in ranges]


@ANY_SPEED
@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 20))
def test_the_longer_answer_is_cut_off_first(chosen, rejected, seq_len):
    kept = [int(part) for part in kept_lengths(np.int64(chosen), np.int64(rejected), seq_len)]
    if chosen + rejected <= seq_len:
        assert kept == [chosen, rejected]
        return
    assert sum(kept) == seq_len
    half = seq_len // 2
    assert kept[0] == min(chosen, seq_len - half) or kept[1] == rejected
    assert kept[1] == min(rejected, half) or kept[0] == chosen


# Mean tokens of a conversation: Zheng et al. 2023 (LMSYS-Chat-1M, table 1: turns times tokens of prompt and response),
# Zhao et al. 2024 (WildChat, table 1), and the size in the dataset's card of ultrachat_200k at 4.5 bytes a token.
PUBLISHED = {"hh-rlhf": 225, "lmsys-chat-1m": 568, "ultrachat_200k": 1_286, "wildchat": 1_872}


@pytest.mark.parametrize("name", PUBLISHED)
def test_best_fit_pads_at_most_3_percent_of_public_chat_lengths(name):
    """Log-normal lengths with the published mean; the figures of the guide."""
    for spread in (0.9, 1.3):
        rng = np.random.default_rng(0)
        lengths = np.exp(rng.normal(np.log(PUBLISHED[name]) - spread**2 / 2, spread, 50_000)).astype(np.int64) + 8
        for seq_len in (2_048, 4_096, 8_192):
            padding = {}
            for how in ("first_fit", "best_fit"):
                found = pack(lengths, seq_len, "cut", how)
                tokens = np.minimum(lengths[found.documents], seq_len).sum()
                padding[how] = 1 - tokens / ((len(found.offsets) - 1) * seq_len)
            print(name, spread, seq_len, *(f"{how} {100 * share:.1f} %" for how, share in padding.items()))
            assert padding["best_fit"] < min(0.03, padding["first_fit"])
