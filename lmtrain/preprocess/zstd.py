"""Zstandard reader that detects truncated files, at whose end the library's own stream stops without an error."""

import io
from typing import IO, Any

import zstandard

_CHUNK_BYTES = 1 << 17


class ZstdReader(io.RawIOBase):
    """Decompressed bytes of one or more frames. Raises EOFError if the file ends inside one."""

    def __init__(self, raw: IO[Any]):
        self._raw = raw
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_CHUNK_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a Zstandard frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
