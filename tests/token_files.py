"""Files of token ids as other systems write them, by their specifications, and the documents that are in them."""

import struct

import numpy as np

EOS = 256  # of the tokenizer `byte`, whose ids are 0 to 256


def documents(seed=0, number=60, vocab=EOS):
    """Ids without EOS."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size) for size in rng.integers(0, 300, number)]


def ended(docs):
    return np.concatenate([np.append(ids, EOS) for ids in docs])


def begun(docs):
    return np.concatenate([np.append(EOS, ids) for ids in docs])


def nano_gpt(path, docs, dtype="<u2"):
    """numpy's tofile of ids that end in EOS: nanoGPT's prepare.py, and OLMo's memory maps."""
    ended(docs).astype(dtype).tofile(path)


def llm_c(path, docs, dtype="<u2"):
    """llm.c's write_datafile: 256 numbers of four bytes, then ids that begin with EOS."""
    ids = begun(docs).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = (20240520, 1, len(ids)) if dtype == "<u2" else (20240801, 7, len(ids))
    path.write_bytes(header.tobytes() + ids.tobytes())


def numpy_array(path, docs, dtype="<u4"):
    with open(path, "wb") as file:
        np.save(file, ended(docs).astype(dtype))


def megatron(path, docs, dtype="<u2", sentences=1):
    """Megatron-LM's IndexedDataset, each document in this many sequences."""
    ids = [np.append(ids, EOS).astype(dtype) for ids in docs]
    parts = [part for document in ids for part in np.array_split(document, sentences)]
    sizes = np.array([len(part) for part in parts], "<i4")
    width = np.dtype(dtype).itemsize
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * width
    entries = np.arange(0, len(parts) + 1, sentences, dtype="<i8")
    code = {"<u2": 8, "<i4": 4, "<i8": 5}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(parts), len(entries))
    path.write_bytes(np.concatenate(parts).tobytes())
    path.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + entries.tobytes())
