"""Where chat templates run: Jinja with the helpers that they expect, no way out, and bounds on time and size.

A template is a program that came with a model file or a request. It can neither reach Python nor change its inputs;
its loop rounds, calls and characters are counted, so that a runaway one ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000
"""Loop rounds and calls of one rendering: at most a few seconds."""
MAX_CHARS = 16_000_000
"""Characters that one rendering writes, and of any value that it builds."""
MAX_WIDTH = 10_000
"""Largest number that functions which pad or repeat may be given."""
MAX_BITS = 4096
"""Size of a whole number that the template computes."""
PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice"})


class TemplateError(ValueError):
    """The template refused the messages, failed, or ran away; the text says which, in the template's words."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs templates under the bounds above. `now` is the clock of `strftime_now`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed at run time, under the bounds
            finalize=_written,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.context_class = _CountingContext
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.filters = {name: _sized(name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _tojson, _ROUNDS: _rounds, _JOINED: _joined}

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Raises `jinja2.TemplateSyntaxError`."""
        return self.from_string(cast(nodes.Template, _AddBounds().visit(self.parse(source))))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget(context).spend_step()
        if getattr(obj, "__name__", None) in PADDING:
            _check_width(args, kwargs)
        return _check_size(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > 64:
            raise TemplateError(f"the chat template computes a power of {right}")
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if (
                    isinstance(sized, (str, list, tuple))
                    and isinstance(count, int)
                    and len(sized) * count > MAX_CHARS
                ):
                    raise TemplateError(f"the chat template repeats a value {count} times")
        return _check_size(super().call_binop(context, operator, left, right))


class _Budget:
    """What a rendering may still use."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.chars = MAX_CHARS

    def spend_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateError(f"the chat template runs away: more than {MAX_STEPS} loop rounds and calls")

    def spend_chars(self, count: int) -> None:
        self.chars -= count
        if self.chars < 0:
            raise TemplateError(f"the chat template writes more than {MAX_CHARS} characters")


class _CountingContext(Context):
    """Each rendering has its own; blocks run in derived ones and share the budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = _Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        cast(_CountingContext, context).budget = self.budget
        return context


def _budget(context: Context) -> _Budget:
    return cast(_CountingContext, context).budget


_ROUNDS, _JOINED = "bounded rounds", "bounded join"
"""Filters that only the rewritten tree can name."""


class _AddBounds(NodeTransformer):
    """Makes loops count their rounds, `~` check its result, and literal text count like other output."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ROUNDS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks an answer for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@pass_context
def _written(context: Context, value: Any) -> str:
    text = str(value)
    _budget(context).spend_chars(len(text))
    return text


@pass_context
def _rounds(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for value in values:
        budget.spend_step()
        yield value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    return _check_size("".join(map(str, values)))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, no ASCII escapes, keys in their order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object = "the chat template raised an exception") -> NoReturn:
    raise TemplateError(str(message))


def _sized(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result, and for padding ones arguments, are checked. `wraps` keeps what Jinja passes first."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if name in PADDING:
            _check_width(args, kwargs)
        return _check_size(function(*args, **kwargs))

    return checked


def _check_width(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and value > MAX_WIDTH:
            raise TemplateError(
                f"the chat template asks for a width of {value}, at most {MAX_WIDTH} is allowed"
            )


def _check_size(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise TemplateError(f"the chat template builds a value longer than {MAX_CHARS}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateError(f"the chat template computes a number of more than {MAX_BITS} bits")
    return value
