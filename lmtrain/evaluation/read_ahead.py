"""Results of a step over many batches, with the device always at work."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Batches that are dispatched ahead of the result that is read.
_AHEAD = 4


def read_ahead(
    step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any], between: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """`step(params, batch)` of each batch, in order; `between` is called after each is dispatched.

    Some batches are dispatched before the first result is read, so that the device is never idle; not all, as each
    takes memory, and a run that is to end would have to wait for them.
    """
    waiting = deque[Any]()
    for batch in batches:
        waiting.append(step(params, batch))
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
        between()
    yield from waiting
