"""Floating point operations of a forward pass, per token, by formula. A multiplication and an addition are two.

Norms, activations, softmax and rotary turns are left out, as in everybody's figures: they are a fraction of a percent.
Training takes three times as many: the backward pass multiplies each matrix by two others. What is computed twice to
save memory is not counted.

Two conventions are in use for attention. `causal` counts the keys a query sees, on average half of them; the full one
counts all, as the products on the hardware do without a kernel that leaves out the rest. Say which when you compare.
"""


def mean_keys(seq_len: int, causal: bool, window: int | None = None) -> float:
    """Keys that a query has to do with, averaged over the sequence."""
    if not causal:
        return seq_len if window is None else min(window, seq_len)
    seen = min(window or seq_len, seq_len)
    # the first `seen` queries see 1, 2, ... keys, the others `seen` each
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len


def linear(inputs: int, outputs: int) -> int:
    """A matrix times a vector."""
    return 2 * inputs * outputs


def attention(hidden_dim: int, heads: int, kv_heads: int, head_width: int, keys: float) -> float:
    """Projections to queries, keys and values; scores and the mean of values for `keys` keys; projection back."""
    projections = linear(hidden_dim, (heads + 2 * kv_heads) * head_width) + linear(heads * head_width, hidden_dim)
    return projections + 2 * linear(heads * head_width, 1) * keys


def mlp(hidden_dim: int, width: int, matrices: int = 2) -> int:
    """Up and down; with three matrices also the gate."""
    return matrices * linear(hidden_dim, width)
