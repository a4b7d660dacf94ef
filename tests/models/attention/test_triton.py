"""The kernels for NVIDIA GPUs: interpreted against plain attention. Compiled: tests/compiled/."""

import pytest
from models.attention.compare import SINKS, arrays, assert_plain, latent_arrays

from lmtrain.models.attention.attend import alibi_slopes
from lmtrain.models.attention.triton import blocks

ENDS = [[40, 70, 200], [90, 128, 129]]


SUITE = {
    "cap, grouped heads, window": ((4, 2, 256, 8), {"ends": ENDS, "cap": 0.8, "window": 100}),
    "window, one key head": ((2, 1, 300, 16), {"window": 100, "ends": ENDS}),
    "ALiBi, grouped heads": ((4, 2, 256, 8), {"ends": ENDS, "slopes": 4}),
    "sinks, grouped heads, window": ((4, 2, 256, 8), {"ends": ENDS, "sinks": SINKS, "window": 100}),
    "very wide values": ((2, 2, 200, 12, 384), {"ends": ENDS}),
    "latent": (latent_arrays(2, 300, 9, 6, 5), {"ends": ENDS, "window": 100}),
}
LONG = {
    "wide": ((1, 1, 256, 64), {}),
    "odd width, window of one": ((6, 2, 130, 80), {"window": 1}),
    "odd number of heads": ((3, 3, 256, 8), {"ends": ENDS, "slopes": 3}),
    "very wide heads, upcast": ((1, 1, 128, 256), {"ends": ENDS, "upcast": True}),
    "values of odd width": ((1, 1, 100, 16, 100), {}),
    "latent, sizes of DeepSeek": (latent_arrays(2, 200, 128, 64, 128), {"ends": ENDS}),
    "latent, wide values": (latent_arrays(1, 130, 16, 16, 40), {}),
}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *(pytest.param(*case, id=name) for name, case in SUITE.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_outputs_and_gradients_are_those_of_plain_attention(sizes, options):
    """Partial blocks, grouped heads, windows, documents, ALiBi, heads of odd widths, wide values."""
    if "slopes" in options:
        options = {**options, "slopes": alibi_slopes(options["slopes"], 8)}
    inputs = sizes if isinstance(sizes, list) else arrays(*sizes)
    assert_plain("triton", inputs, rtol=1e-4, atol=5e-5, **options)


@pytest.mark.long
def test_every_block_size_gives_the_same_result(monkeypatch):
    """With documents that end in the middle of a block, at its edge, and one position from it."""
    ends = [[127, 128, 129, 300], [1, 64, 256, 320]]
    for sizes in {*blocks.SMALL.values(), *blocks.LARGE.values()}:
        monkeypatch.setattr(blocks, "SMALL", dict.fromkeys((64, 128, 256), sizes))
        assert_plain("triton", arrays(2, 1, 384, 16), rtol=1e-4, atol=5e-5, ends=ends)
