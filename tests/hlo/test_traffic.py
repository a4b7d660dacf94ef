"""Memory traffic."""

from hlo.programs import ALONE, SLICES

from lmtrain.compiled.figures import measure


def test_slices_of_large_arrays_are_not_counted_in_full():
    """One slice is read and written, then read for the copy; the update reads on-chip memory and writes one row."""
    index = 4
    assert measure(SLICES, ALONE).hbm_bytes == (256 + index + 256) + 256 + (index + 256)
