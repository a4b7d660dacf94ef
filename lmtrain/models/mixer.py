"""Token mixers: what mixes the positions of a layer, as the rest of lmtrain sees it. Imports no JAX.

A `Mixer` describes one layer's: its FLOPs, the state of its cache, what it needs of attention, and how devices share a
sequence. `BaseModelConfig.mixers` has that of each layer; FLOPs, plans, the split of sequences and generation ask only
these. The module that computes is `TokenMixer` in `lmtrain/models/layers/block.py`.

FLOPs are those of a forward pass per token, by formula; a multiplication and an addition are two operations. Norms,
activations, softmax and rotary embeddings are excluded, as usual: they are a fraction of a percent. Training takes
three times as many: the backward pass has two products for each product of the forward pass. Recomputation to save
memory is not counted. There are two conventions for attention: `causal` counts the keys that a query sees, on average
half of them; the full convention counts all keys, as computed without a kernel that skips the rest.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol


def mean_keys(seq_len: int, causal: bool, window: int | None = None) -> float:
    """Mean number of keys per query, averaged over the sequence."""
    if not causal:
        return seq_len if window is None else min(window, seq_len)
    seen = min(window or seq_len, seq_len)
    # the first `seen` queries see 1, 2, ... keys, the others `seen` each
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len


def linear_flops(inputs: int, outputs: int) -> int:
    """FLOPs of a matrix times a vector."""
    return 2 * inputs * outputs


def mlp_flops(hidden_dim: int, width: int, matrices: int = 2) -> int:
    """FLOPs of an MLP: up and down projections; with three matrices also the gate."""
    return matrices * linear_flops(hidden_dim, width)


class SequenceSplit(NamedTuple):
    """How devices share a sequence: a text for the log; the values that a device sends for each of its positions and
    each pass, in multiples of an activation's size; whether queries are a part of the sequence (the feature `part` of
    attention); whether a device needs an even number of positions; and the bytes that a device sends for each sequence
    and pass, whatever its length."""

    text: str
    sent: float
    has_parts: bool
    needs_even: bool
    sent_once: float = 0.0


class StateArray(NamedTuple):
    """An array of a mixer's state: its shape for one sequence, and its dtype; None: that of the parameters."""

    shape: tuple[int, ...]
    dtype: str | None = None


class Mixer(Protocol):
    """The mixer of a layer. Layers with equal mixers have one state in the cache."""

    @property
    def forgets(self) -> bool:
        """Whether the state lacks earlier positions, so that generation cannot go back to one."""

    @property
    def features(self) -> Set[str]:
        """What it needs of attention: keys of `FEATURES` in `models/attention/names.py`."""

    def flops(self, seq_len: int, causal: bool) -> tuple[float, float]:
        """FLOPs per token: those that do not depend on the number of keys, and those that do."""

    def split(self, parts: int, head_parts: int) -> SequenceSplit | None:
        """How `parts` devices share a sequence whose heads are split over `head_parts` devices; None if they cannot."""

    def state(self, length: int) -> Mapping[str, StateArray]:
        """The arrays of a layer's state for sequences of up to `length` positions, by name; all are 0 before them."""


@dataclass(frozen=True, kw_only=True)
class AttentionMixer:
    """Causal attention. `head_width` is that of queries and keys; a query sees at most `window` keys, None: all. Heads
    that are `gated` have a projection of the width of queries more."""

    hidden_dim: int
    heads: int
    kv_heads: int
    head_width: int
    window: int | None = None
    is_gated: bool = False

    @property
    def forgets(self) -> bool:
        return self.window is not None

    @property
    def features(self) -> Set[str]:
        needs = {
            "wide_heads": self.head_width > 128,
            "very_wide_heads": self.head_width > 256,
            "odd_heads": self.head_width % 8 != 0,
            "window": self.window is not None,
        }
        return {name for name, is_needed in needs.items() if is_needed}

    @property
    def score_share(self) -> float:
        """The share of scores in the FLOPs that depend on the number of keys."""
        return 0.5

    def flops(self, seq_len: int, causal: bool) -> tuple[float, float]:
        values = self.heads * self.head_width
        queries = 2 * values if self.is_gated else values
        projections = linear_flops(self.hidden_dim, queries + 2 * self.kv_heads * self.head_width)
        each_key = 2 * linear_flops(values, 1)  # scores and weighted values
        keys = mean_keys(seq_len, causal, self.window)
        return projections + linear_flops(values, self.hidden_dim), each_key * keys

    def split(self, parts: int, head_parts: int) -> SequenceSplit:
        """Devices exchange heads for positions, and gather keys and values (`models/attention/split.py`)."""
        heads = self.heads_on(head_parts)
        kv_heads = max(self.kv_heads * heads // self.heads, 1)
        size = exchange_size(parts, heads)
        copied = math.lcm(kv_heads, size)
        exchanged = 2 * (heads + copied) * (size - 1) / size
        gathered = 2 * copied * (parts // size - 1) + heads if size < parts else 0.0
        return SequenceSplit(
            describe_split(parts, heads),
            self.head_width * (exchanged + gathered),
            has_parts=size < parts,
            needs_even=size < parts and size % 2 == 1,
        )

    def groups(self, parts: int, head_parts: int) -> int:
        """How many groups of devices gather keys."""
        return parts // exchange_size(parts, self.heads_on(head_parts))

    def heads_on(self, parts: int) -> int:
        """The number of heads on a device, with heads split over `parts` devices."""
        return self.heads // parts

    def state(self, length: int) -> Mapping[str, StateArray]:
        size = length if self.window is None else min(self.window, length)
        return dict.fromkeys(("k", "v"), StateArray((self.kv_heads, size, self.head_width)))


def exchange_size(parts: int, heads: int) -> int:
    """How many of the `parts` that split a sequence exchange heads for positions; `heads` on each device."""
    return math.gcd(parts, heads)


def describe_split(parts: int, heads: int) -> str:
    """How `parts` devices share a sequence, for the log."""
    size = exchange_size(parts, heads)
    exchange = f"{size} devices exchange heads for positions"
    if size == parts:
        return exchange
    gather = f"{parts // size} groups gather keys and values and swap halves of queries"
    return gather if size == 1 else f"{exchange}, {gather}"
