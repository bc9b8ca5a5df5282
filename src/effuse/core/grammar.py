"""The grammar of specs: literals, lists and calls, `label_skew(beta=0.5, mask=True)`.

It is parsed with `ast` and never evaluated.
"""

import ast
import dataclasses
import re
import threading
from typing import Any

from effuse.core.errors import RecipeError

LONGEST_LIST = 1_000_000  # `[6000] * 10` is allowed, but a manifest must not fill its reader's memory
# CPython 3.11 has one depth counter for all threads. Two threads that parse at once can fail with "AST constructor recursion
# depth mismatch".
PARSING = threading.Lock()
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
FILE = re.compile(rf"\b((?:folder|path|attributes|groups)\s*=\s*)(?:{QUOTED.pattern})")  # a plain name may be a file's
PATH = re.compile(r"[^\s'\",;()\[\]]*[/\\][^'\",;()\[\]]*")  # outside of quotes
HIDDEN = "'...'"


@dataclasses.dataclass(frozen=True)
class Call:
    """A parsed `name(args, key=value)` whose target type is not known yet."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


def parse(source: str) -> Any:
    """Turn text of the grammar into literals, tuples and `Call`s; `hf:NAME` is short for `hf("NAME")`."""
    prefixed = re.fullmatch(r"([a-z_]+):(\S+)", source.strip())
    if prefixed:
        return Call(prefixed[1], (prefixed[2],))
    try:
        with PARSING:
            node = ast.parse(source.strip(), mode="eval").body
        if (n := _written_out(node)) > LONGEST_LIST:
            raise RecipeError(f"'{clip(source)}' expands to {n} values; at most {LONGEST_LIST} are allowed")
        return _value(node, source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        counts = [(source.count(a), source.count(b)) for a, b in ("()", "[]")]
        hint = "; a bracket is missing" if any(opened != closed for opened, closed in counts) else ""
        raise RecipeError(f"cannot read '{clip(source)}': expected a literal, a list or name(key=value){hint}") from None


def _written_out(node: ast.AST) -> int:
    """The number of values of an expression after all its repeated lists are expanded."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return max(1, sum(map(_written_out, items)))
        case ast.BinOp(left=left, right=ast.Constant(value=int(times))):
            return _written_out(left) * max(1, times)
        case ast.Call(args=args, keywords=keywords):
            return 1 + sum(map(_written_out, args)) + sum(_written_out(k.value) for k in keywords)
    return 1


def _value(node: ast.AST, source: str) -> Any:
    match node:
        case ast.Constant(value=int(value)) if value.bit_length() > 64:
            pass  # no key takes so large a number, and Python refuses to print much longer ones
        case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, str)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value) as operand) if type(value) in (int, float):
            return -_value(operand, source)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_value(item, source) for item in items)
        case ast.BinOp(op=ast.Mult(), left=ast.List() as left, right=ast.Constant(value=int(times))):
            items = _value(left, source)
            return items * times
        case ast.Name(id="true" | "false" as word):
            return word == "true"
        case ast.Name() | ast.Attribute():
            return Call(_dotted(node, source))
        case ast.Call(func=func, args=args, keywords=keywords) if all(k.arg for k in keywords):
            kwargs = tuple((str(k.arg), _value(k.value, source)) for k in keywords)
            return Call(_dotted(func, source), tuple(_value(a, source) for a in args), kwargs)
    raise RecipeError(f"'{clip(source)}': '{clip(ast.unparse(node))}' is neither a literal, a list nor name(key=value)")


def _dotted(node: ast.AST, source: str) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value, source)}.{attr}"
    raise RecipeError(f"'{clip(source)}': '{clip(ast.unparse(node))}' is not a name")


def clip(source: str, limit: int = 120) -> str:
    """Text shortened for an error message."""
    return source if len(source) <= limit else source[: limit - 3] + "..."


def hidden(value: str, data: bool = False) -> str:
    """A value of a recipe or protocol for others to read: of data no quoted word, elsewhere no name of a file."""

    def instead(found: re.Match[str]) -> str:
        return HIDDEN if data or "/" in found[0] or "\\" in found[0] else found[0]

    return PATH.sub("...", QUOTED.sub(instead, FILE.sub(rf"\1{HIDDEN}", value)))
