"""FLOPs of a forward pass per token, by formula. A multiplication and an addition are two operations.

Norms, activations, softmax and rotary embeddings are excluded, as usual: they are a fraction of a percent. Training
takes three times as many: the backward pass has two products for each product of the forward pass. Recomputation to
save memory is not counted.

There are two conventions for attention. `causal` counts the keys that a query sees, on average half of them; the full
convention counts all keys, as computed without a kernel that skips the rest. State which one when you compare.
"""


def mean_keys(seq_len: int, causal: bool, window: int | None = None) -> float:
    """Mean number of keys per query, averaged over the sequence."""
    if not causal:
        return seq_len if window is None else min(window, seq_len)
    seen = min(window or seq_len, seq_len)
    # the first `seen` queries see 1, 2, ... keys, the others `seen` each
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len


def linear(inputs: int, outputs: int) -> int:
    """FLOPs of a matrix times a vector."""
    return 2 * inputs * outputs


def attention(hidden_dim: int, heads: int, kv_heads: int, head_width: int, keys: float) -> float:
    """FLOPs of query, key and value projections; scores and weighted values of `keys` keys; output projection."""
    projections = linear(hidden_dim, (heads + 2 * kv_heads) * head_width) + linear(heads * head_width, hidden_dim)
    return projections + 2 * linear(heads * head_width, 1) * keys


def mlp(hidden_dim: int, width: int, matrices: int = 2) -> int:
    """FLOPs of an MLP: up and down projections; with three matrices also the gate."""
    return matrices * linear(hidden_dim, width)
