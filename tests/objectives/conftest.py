"""Chunks of any size."""

import pytest

import lmtrain.objectives.chunked_sums as logits_module

# rows of a chunk: all, half, one at a time, and sizes that do not divide the twelve rows, so the last chunk is padded
ROWS = [12, 6, 1, 5, 7]


@pytest.fixture(params=ROWS, ids=lambda rows: f"chunks of {rows}")
def chunks(request, monkeypatch):
    """Compute the loss in chunks of this number of rows."""
    monkeypatch.setattr(logits_module, "rows_at_once", lambda *sizes: request.param)
    return request.param
