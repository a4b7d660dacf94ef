"""Limits of time and memory for chat templates, which are programs written by others.

Jinja's sandbox restricts what a template can reach, but not what it can use. Both limits are those of one conversation
and of the thread that renders it; nothing of the process changes.

    time       CPU time of the thread, so that a busy machine does not make a template fail; read at the iterations of
               loops and at calls, since signals do not arrive in threads
    memory     an estimate of what operations produce, added up: each is estimated before it is computed where its
               result can be far larger than its operands (such as 'a' * 10**10, or a list that is in itself many times)
    integers   their bits, since one operation with large ones takes hours
"""

import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.filters import do_round
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# For one conversation: far more than any has, and little enough for every machine.
MAX_SECONDS = 10.0
MAX_BYTES = 1 << 30
MAX_BITS = 1 << 16

_STEPS_BETWEEN_CHECKS = 256
_CHARACTER, _PIECE, _ITEM = 4, 64, 64

# Filters that are put around parts of a template; no template can spell their names.
_LOOP, _MADE = "(loop)", "(made)"

# Filters and methods of texts whose result grows with a number that they are given.
_SIZED = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "tojson", "truncate", "wordwrap", "zfill"}
# Width or precision of a field of a formatted text.
_WIDTH = re.compile(r"[%:.][-+ #<>=^]*(\d+)")

_steps = itertools.count(1)


class _Used(threading.local):
    """What the conversation that this thread renders has used, and the end of its CPU time."""

    bytes = 0
    deadline = float("inf")


_used = _Used()


class TemplateLimitError(TemplateRuntimeError):
    """A template that exceeds a limit."""


class LimitedTemplate(Template):
    """A template whose conversations are limited. Raises `MemoryError` above the limit of memory."""

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        with _limits():
            yield from super().generate(*args, **kwargs)

    def render(self, *args: Any, **kwargs: Any) -> str:
        return "".join(self.generate(*args, **kwargs))


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Raises `TemplateLimitError` while a template renders."""

    template_class = LimitedTemplate
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, finalize=_written, **kwargs)
        self.filters = _LimitedFilters(self.filters | {_LOOP: _loop, _MADE: lambda value: value, "round": _round})
        del self.globals["lipsum"]  # random words, without a limit to their number

    def from_string(self, source: str | nodes.Template, *args: Any, **kwargs: Any) -> Template:
        tree = self.parse(source) if isinstance(source, str) else source
        with _limits():  # constant expressions are computed here
            return super().from_string(_Rewritten().visit(tree), *args, **kwargs)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # of a format method, wrapped
        if isinstance(owner, str):
            if function.__name__ == "join" and args:
                args = (list(args[0]),)
            _check(_estimate(function.__name__, owner, [*args, *kwargs.values()]))
        return _charge(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            power = left.bit_length() * max(right, 0)
            bits = power if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS and operator in ("*", "**"):
                raise TemplateLimitError(f"computes with integers of more than {MAX_BITS:,} bits")
        elif operator == "*":
            times, of = (left, right) if isinstance(left, int) else (right, left)
            _check(_shallow(of) * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "+":
            _check(_shallow(left) + _shallow(right))
        elif operator == "%" and isinstance(left, str):
            _check(_estimate("format", left, list(right) if isinstance(right, tuple) else [right]))
        return _charge(super().call_binop(context, operator, left, right))


class _Rewritten(NodeTransformer):
    """Puts the filters of this module around loops, and around what makes values without an operator or a call."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        node = self.generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            data = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
            node.iter = _around(node.iter, _LOOP, nodes.Const(data, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _around(nodes.List(node.nodes, lineno=node.lineno), "join")
        elif isinstance(node, nodes.List | nodes.Dict | nodes.Getitem):
            is_new = not isinstance(node, nodes.Getitem) or isinstance(node.arg, nodes.Slice)
            return _around(node, _MADE) if is_new else node
        return node


def _around(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _LimitedFilters(dict[str, Callable[..., Any]]):
    """Filters whose operands and results are limited, also those that are set later."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]):
        super().__init__()
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        skipped = int(hasattr(function, "jinja_pass_arg"))  # the environment, or the like

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            own, operands = args[:skipped], list(args[skipped:])
            if name == "join" and operands:
                operands[0] = list(operands[0])  # whose length is known
            others = [*operands[1:], *kwargs.values()]
            if operands and name != _MADE:
                _check(_size(operands[0]) + sum(map(_size, others)))
                _check(_estimate(name, operands[0], others))
            return _charge(function(*own, *operands, **kwargs))

        super().__setitem__(name, limited)


@contextmanager
def _limits() -> Iterator[None]:
    """Limit the thread's time and memory within the context."""
    _used.bytes, _used.deadline = 0, time.thread_time() + MAX_SECONDS
    try:
        yield
    finally:
        _used.bytes, _used.deadline = 0, float("inf")


def _check(estimate: int) -> None:
    """Raise `MemoryError` if a result of `estimate` bytes is too large."""
    if _used.bytes + estimate > MAX_BYTES:
        raise MemoryError


def _charge(value: Any) -> Any:
    """Count a value that was made. -> the value"""
    _used.bytes += _shallow(value)
    _check(0)
    return value


def _written(value: Any) -> Any:
    """Count the text of a value that is written, before it is made. -> the value"""
    _used.bytes += _PIECE + _size(value)
    _check(0)
    return value


def _shallow(value: Any) -> int:
    """Estimated bytes of a value without its items."""
    if isinstance(value, str):
        return _CHARACTER * len(value)
    return _ITEM * (len(value) + 1) if isinstance(value, list | tuple | dict | set) else 0


def _size(value: Any) -> int:
    """Estimated bytes of a value's text. Items that are in it several times are counted as often."""
    if not isinstance(value, list | tuple | dict):
        return _shallow(value)
    known: dict[int, int] = {}

    def size(part: Any) -> int:
        if not isinstance(part, list | tuple | dict):
            return _shallow(part)
        if id(part) not in known:
            _step()
            known[id(part)] = 0  # of a part that contains itself
            items = itertools.chain(part, part.values()) if isinstance(part, dict) else part
            known[id(part)] = _shallow(part) + sum(map(size, items))
        return known[id(part)]

    return size(value)


def _estimate(name: str, first: Any, values: list[Any]) -> int:
    """Bytes that the filter `name`, or the method of a text, may make of `first`, where that can be far more than its
    operands have."""
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if name == "join":  # a list by a text, or by a text a list
        both = [first, *values[:1]]
        length = max((len(value) for value in both if isinstance(value, list)), default=0)
        return sum(map(_size, both)) + length * sum(_shallow(value) for value in both if isinstance(value, str))
    if name == "replace" and len(values) > 1:
        return str(first).count(str(values[0])) * _shallow(str(values[1]))
    if name == "translate" and values and isinstance(values[0], Mapping):
        return len(first) * max(map(_shallow, values[0].values()), default=0)
    if name in ("format", "format_map"):  # each field may have any of the values, and one of the widths or values
        text = str(first)
        widths = [int(digits) for digits in _WIDTH.findall(text)] + (numbers if "*" in text or ":{" in text else [])
        fields = text.count("%") + text.count("{")
        return fields * max([_CHARACTER * width for width in widths] + list(map(_size, values)), default=0)
    if name in ("split", "rsplit", "splitlines"):
        separators = values[:1] if values and isinstance(values[0], str) and values[0] else " \t\r\n"
        return _ITEM * sum(first.count(separator) for separator in separators)
    if name in _SIZED:
        numbers += [len(value) for value in values if isinstance(value, str)]
        return _CHARACTER * max(numbers, default=0) * (1 + _size(first) // _CHARACTER)
    return 0


def _step() -> None:
    if next(_steps) % _STEPS_BETWEEN_CHECKS == 0 and time.thread_time() > _used.deadline:
        raise TemplateLimitError(f"runs longer than {MAX_SECONDS:g} s; is there a loop without an end?")


def _loop(items: Iterable[Any], data: int) -> Iterator[Any]:
    """What a loop iterates over; each iteration writes at most `data` characters besides values."""
    for item in items:
        _step()
        _used.bytes += _CHARACTER * data
        _check(0)
        yield item


def _round(value: float, precision: int = 0, *args: Any, **kwargs: Any) -> float:
    if abs(precision) > 1000:  # a power of ten
        raise TemplateLimitError(f"rounds to {precision} digits")
    return do_round(value, precision, *args, **kwargs)
