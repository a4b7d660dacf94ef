"""Reader and writer of safetensors files, against the format's own library and with corrupt files."""

import io
import json

import ml_dtypes
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file, save

from lmtrain.hf.safetensors_file import SafetensorsWeights, header_of, read_header, read_tensor, write_tensor
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import open_fs, write_bytes

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_]
SHAPES = {"matrix": (2, 3), "vector": (5,), "scalar": (), "empty": (0,), "no rows": (0, 4), "no columns ü": (4, 0)}


def tensors(dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape, scale=100).astype(dtype) for name, shape in SHAPES.items()}


def written(arrays: dict[str, np.ndarray]) -> bytes:
    """Content of a complete file written by lmtrain; all arrays have the same dtype."""
    file = io.BytesIO()
    file.write(header_of({name: (array.shape, array.dtype) for name, array in arrays.items()}))
    for array in arrays.values():
        write_tensor(file, array)
    return file.getvalue()


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def read_all(path: str) -> dict[str, np.ndarray]:
    return {name: read_tensor(path, info) for name, info in read_header(path).items()}


def by_library(folder, content: bytes) -> dict[str, np.ndarray]:
    (folder / "for the library").write_bytes(content)
    return load_file(folder / "for the library")


@pytest.fixture(params=["path", "memory"])
def place(request, tmp_path):
    """`place(content)` writes a file and returns its path or URL."""
    folder = str(tmp_path) if request.param == "path" else f"memory://{tmp_path}"

    def put(content: bytes, name: str = "a ü.safetensors") -> str:
        write_bytes(f"{folder}/{name}", content)
        return f"{folder}/{name}"

    yield put
    if request.param == "memory":
        fs, inside = open_fs(folder)
        if fs.exists(inside):
            fs.rm(inside, recursive=True)


def test_some_rows_of_a_tensor_are_read(place):
    matrix = np.arange(30, dtype=np.float32).reshape(10, 3)
    path = place(written({"before": np.ones(5, np.float32), "matrix": matrix, "after": np.ones(5, np.float32)}))
    weights = SafetensorsWeights([path])
    for first, last in ((0, 10), (0, 1), (4, 7), (9, 10), (10, 10)):
        np.testing.assert_array_equal(weights.read_rows("matrix", first, last), matrix[first:last])
    with pytest.raises(UserError, match="truncated"):
        weights.read_rows("matrix", 9, 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_and_lmtrain_read_the_files_of_one_another(place, tmp_path, dtype):
    path = place(save(tensors(dtype), metadata={"format": "pt", "made": "by hand"}))
    assert_same(read_all(path), tensors(dtype))
    assert {name: info.shape for name, info in read_header(path).items()} == SHAPES
    assert_same(by_library(tmp_path, written(tensors(dtype))), tensors(dtype))
    assert_same(read_all(place(written(tensors(dtype)))), tensors(dtype))


def test_several_dtypes_in_one_file_and_a_file_of_another_writer_without_metadata_or_padding(place):
    mixed = {np.dtype(dtype).name: np.arange(3).astype(dtype) for dtype in DTYPES}
    assert_same(read_all(place(save(mixed))), mixed)
    header = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"b":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'
    )
    data = b"\x07..." + np.array([1.5, -2], np.float32).tobytes()  # with a gap, and in another order
    found = read_all(place(len(header).to_bytes(8, "little") + header + data))
    assert_same(found, {"a": np.array([1.5, -2], np.float32), "b": np.array(7, np.uint8)})


def test_data_start_at_a_multiple_of_8_bytes_and_the_header_has_format_pt():
    for length in range(1, 9):
        header = header_of({"n" * length: ((3,), np.dtype(np.float32))})
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(12, dtype=np.float32)[::-2],
        np.broadcast_to(np.float32(3), (2, 2)),
    ],
    ids=["transposed", "permuted", "backwards", "broadcast"],
)
def test_a_non_contiguous_array_is_written_in_logical_order(tmp_path, array):
    np.testing.assert_array_equal(by_library(tmp_path, written({"a": array}))["a"], array)


def test_only_the_requested_bytes_are_read(tmp_path, monkeypatch):
    path = f"memory://{tmp_path}/ranges"
    write_bytes(path, written(tensors(np.float32)))
    asked = []

    def cat_file(self, inside, start=None, end=None, **keywords):
        asked.append((start, end))
        return original(self, inside, start=start, end=end, **keywords)

    original = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    info = read_header(path)["vector"]
    read_tensor(path, info)
    begin = len(header_of({name: (shape, np.dtype(np.float32)) for name, shape in SHAPES.items()}))
    assert asked == [(0, 8), (8, begin), (begin + 6 * 4, begin + 11 * 4)]


def file_with(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(16)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> bytes:
    """A file with one tensor and this header entry."""
    return file_with(json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode())


def two(first, second) -> bytes:
    """A file with two tensors at these offsets."""
    entries = [
        {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} for start, end in (first, second)
    ]
    return file_with(json.dumps(dict(zip("ab", entries, strict=True))).encode())


WHOLE = written(tensors(np.float32))
CORRUPT = [
    *(b"", b"\x01\x02", b"this is some text and no file of tensors"),
    *map(file_with, (b"[]", b"null", b"[" * 100_000, b'{"a": 3}', b'{"a": {"shape": [2], "data_offsets": [0, 8]}}')),
    *(WHOLE[:40], WHOLE[:20] + b"\xff\xfe" + WHOLE[22:]),  # the header cut off and overwritten
    *(entry(offsets=offsets) for offsets in ([0], [0, 4], [8, 0], [-8, 0])),
    *(entry(shape=shape) for shape in ([1], 3, [-1, -2], [2.0], [1 << 70])),
    *(two((0, 8), (4, 12)), two((0, 8), (0, 8)), two((0, 16), (4, 8))),  # overlapping
]


@pytest.mark.parametrize("content", CORRUPT, ids=range(len(CORRUPT)))
def test_an_invalid_file_is_an_error_with_its_name(place, content):
    path = place(content)
    with pytest.raises(UserError) as error:
        read_header(path)
    assert str(error.value).startswith(f"{path}: not a safetensors file")


@pytest.mark.parametrize("missing", [1, 48])
def test_a_truncated_file_and_an_unsupported_dtype_are_errors_with_its_name(place, missing):
    path = place(WHOLE[:-missing])
    with pytest.raises(UserError) as error:
        read_header(path)
    assert str(error.value).startswith(f"{path}: truncated")
    with pytest.raises(UserError, match="F4"):
        read_header(place(entry(dtype="F4")))


def test_a_missing_file_is_an_error_with_its_name(place):
    path = place(b"").replace("a ü", "another")
    with pytest.raises(UserError, match=r"another\.safetensors: cannot be read"):
        read_header(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_header(path.rpartition("/")[0])
