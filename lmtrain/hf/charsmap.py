"""Rules of a sentencepiece model's normalization: which characters it replaces, and by what."""

from collections import defaultdict

import numpy as np

# Those of sentencepiece have 500,000 prefixes of at most 16 bytes; a file could have a cycle.
_MAX_PREFIXES, _MAX_BYTES = 5_000_000, 1000


def read_rules(charsmap: bytes) -> dict[str, str]:
    """Replacement of each sequence of characters that a `precompiled_charsmap` replaces.

    The format: a 32-bit length, a trie of that many bytes, and the replacements, each of which ends with a zero byte.
    The trie is a double array of darts-clone: 32-bit units, where the child with label `c` of a node with offset `o` is
    stored at position `o ^ c`, and its value at position `o`. Raises `ValueError` for other content.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if not 4 <= size <= len(charsmap) - 4 or size % 4:
        raise ValueError("not a normalization of sentencepiece")
    units = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64)
    replacements = charsmap[4 + size :]
    positions = np.arange(len(units))
    labels = np.where(units >> 31, 0, units & 0xFF)  # the first bit marks values
    offsets = (positions ^ ((units >> 10) << ((units & 512) >> 6))).tolist()
    children = defaultdict(list)  # of a node, by its offset
    for node, label in zip(np.flatnonzero(labels).tolist(), labels[labels > 0].tolist(), strict=True):
        children[node ^ label].append((node, bytes([label])))
    rules = {}
    prefixes = [(0, b"")]  # nodes with the bytes that lead to them
    visited = 0
    while prefixes:
        node, prefix = prefixes.pop()
        visited += 1
        if visited > _MAX_PREFIXES or len(prefix) > _MAX_BYTES:
            raise ValueError("not a normalization of sentencepiece: too many or too long rules")
        if units[node] >> 8 & 1:  # it ends here
            if offsets[node] >= len(units):
                raise ValueError("not a normalization of sentencepiece: its trie is corrupt")
            start = int(units[offsets[node]]) & 0x7FFFFFFF
            rules[prefix.decode()] = replacements[start : replacements.index(b"\0", start)].decode()
        prefixes += [(child, prefix + label) for child, label in children[offsets[node]]]
    return rules
