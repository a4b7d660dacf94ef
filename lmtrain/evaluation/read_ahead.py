"""Results of a step over many batches, read asynchronously to keep the device busy."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Maximum number of batches dispatched ahead of the result that is read next.
_AHEAD = 4


def read_ahead(
    step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any], between: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """`step(params, batch)` of each batch, in order; `between` is called after each is dispatched.

    Some batches are dispatched before the first result is read, so that the device is never idle; not all, because each
    needs memory, and a run that stops has to wait for them.
    """
    waiting = deque[Any]()
    for batch in batches:
        waiting.append(step(params, batch))
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
        between()
    yield from waiting
