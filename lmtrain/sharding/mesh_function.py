"""Jitted functions bound to the mesh that they run on."""

from dataclasses import dataclass
from typing import Any

from lmtrain.sharding.mesh import Layout


@dataclass(frozen=True)
class MeshFunction:
    """A jitted function, called and lowered with the mesh and the compute mapping of `layout`."""

    layout: Layout
    jitted: Any

    def __call__(self, *arguments: Any) -> Any:
        with self.layout.active():
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        with self.layout.active():
            return self.jitted.lower(*arguments)
