"""Limits of time and memory for chat templates, which are programs written by others.

Jinja's sandbox restricts what a template can reach, but not what it can use:

    time       CPU time of the thread, so that a busy machine does not make a template fail; read at the iterations of
               loops and at calls, since signals do not arrive in threads
    memory     the address space of the process, read likewise, and limited by the operating system for one operation
    integers   their bits, since one operation with large ones takes hours
"""

import itertools
import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.filters import do_round
from jinja2.sandbox import ImmutableSandboxedEnvironment

# For one conversation: far more than any has, and little enough for every machine.
MAX_SECONDS = 10.0
MAX_BYTES = 1 << 30
MAX_BITS = 1 << 16

_STEPS_BETWEEN_CHECKS = 256

# The output is kept in pieces and joined, and a character has up to four bytes.
_BYTES_OF_PIECE, _BYTES_OF_OUTPUT = 16, 8

# The filter that is put around what a loop iterates over; no template can spell its name.
_COUNTED = "(counted)"

_steps = itertools.count(1)
# Of the conversation that holds the lock: the end of its CPU time, the largest address space.
_deadline, _max_address_space = float("inf"), 0
_lock = threading.RLock()  # the limit of memory is that of the process


class TemplateLimitError(TemplateRuntimeError):
    """A template that exceeds a limit."""


class LimitedTemplate(Template):
    """A template whose conversations are limited. Raises `MemoryError` above the limit of memory."""

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        size = 0
        with _limits():
            pieces: Any = super().generate(*args, **kwargs)
            for piece in pieces:
                size += _BYTES_OF_PIECE + _BYTES_OF_OUTPUT * len(piece)
                if size > MAX_BYTES:
                    pieces.throw(MemoryError())  # inside the template: the error then has its line
                yield piece

    def render(self, *args: Any, **kwargs: Any) -> str:
        return "".join(self.generate(*args, **kwargs))


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Raises `TemplateLimitError` while a template renders."""

    template_class = LimitedTemplate
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.filters |= {_COUNTED: _counted, "round": _round}
        del self.globals["lipsum"]  # random words, without a limit to their number

    def from_string(self, source: str | nodes.Template, *args: Any, **kwargs: Any) -> Template:
        tree = self.parse(source) if isinstance(source, str) else source
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.iter.lineno)
        with _limits():  # constant expressions are computed here
            return super().from_string(tree, *args, **kwargs)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            power = left.bit_length() * max(right, 0)
            bits = power if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"computes with integers of more than {MAX_BITS:,} bits")
        return super().call_binop(context, operator, left, right)


@contextmanager
def _limits() -> Iterator[None]:
    """Limit the thread's time and the process's memory within the context."""
    global _deadline, _max_address_space
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = _address_space()
        _deadline = time.thread_time() + MAX_SECONDS
        _max_address_space = used + MAX_BYTES
        allowed = _max_address_space + MAX_BYTES // 4  # some is left to raise the error
        try:
            if used and (soft == resource.RLIM_INFINITY or allowed < soft):
                resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Size of the process's address space in bytes; 0 on systems other than Linux, where memory is not limited."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def _step() -> None:
    if next(_steps) % _STEPS_BETWEEN_CHECKS == 0:
        if time.thread_time() > _deadline:
            raise TemplateLimitError(f"runs longer than {MAX_SECONDS:g} s; is there a loop without an end?")
        if _address_space() > _max_address_space:
            raise MemoryError


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


def _round(value: float, precision: int = 0, *args: Any, **kwargs: Any) -> float:
    if abs(precision) > 1000:  # a power of ten
        raise TemplateLimitError(f"rounds to {precision} digits")
    return do_round(value, precision, *args, **kwargs)
