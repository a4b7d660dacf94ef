"""Files that are there whole or not at all."""

import json
import os
from typing import Any


def write_atomically(path: str, content: bytes) -> None:
    """Write under a temporary name in the same folder, flush to disk, then rename into place."""
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: str, value: Any) -> None:
    """Indented JSON with sorted keys, written atomically: same value, same bytes."""
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def remove_temporaries(folder: str) -> None:
    """Delete what a killed writer left behind."""
    for name in os.listdir(folder):
        if ".tmp-" in name:
            os.remove(os.path.join(folder, name))
