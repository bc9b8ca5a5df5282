"""The wire format. Only `@message` types can be sent or saved: tensors as safetensors, the rest as JSON, never pickle.

Encoding and decoding follow the annotations. A message is one safetensors file whose metadata holds the JSON.
"""

import json
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from effuse.core.build import build
from effuse.core.errors import EffuseError, WireError
from effuse.core.grammar import parse
from effuse.core.message import MESSAGES, is_message, is_plain, json_form, message_hints, message_name
from effuse.core.params import Buffers, Params, finite
from effuse.core.spec import Spec, text
from effuse.core.visit import map_params, narrowed, widened

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAMES = {  # in safetensors
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(value: Any, hint: Any, wire: str = "fp32", marks: Mapping[str, str] | None = None) -> bytes:
    """Encode a value of the annotated type; `marks` go into the header, where `marks_in` reads them without decoding."""
    tensors: list[Tensor] = []
    tree = _pack(map_params(value, narrowed) if wire == "bf16" else value, hint, tensors, "message")
    return _saved(tensors, json.dumps(tree, allow_nan=False, separators=(",", ":")), marks or {})


def _saved(tensors: list[Tensor], tree: str, marks: Mapping[str, str]) -> bytes:
    """A safetensors file, made with one copy of each tensor; the library's own function makes three."""
    header: dict[str, Any] = {"__metadata__": {**marks, "effuse": tree}}
    views: list[memoryview] = []
    end = 0
    for i, tensor in enumerate(tensors):
        plain = tensor.detach().cpu().contiguous()
        _finite_tensor(plain)
        start, end = end, end + plain.nbytes
        header[f"{i:06d}"] = {"dtype": NAMES[plain.dtype], "shape": list(plain.shape), "data_offsets": [start, end]}
        views.append(plain.reshape(-1).view(torch.uint8).numpy().data)
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)  # the tensors must begin at a multiple of eight
    return b"".join((len(blob).to_bytes(8, "little"), blob, *views))


def _finite_tensor(tensor: Tensor) -> None:
    if not finite(tensor):
        raise WireError("a message holds a tensor with a non-finite number")


def decode(blob: bytes, hint: Any, limit: int | None = None) -> Any:
    """Decode `blob`, which must hold a value of the annotated type and nothing else."""
    if limit is not None and len(blob) > limit:
        raise WireError(f"a message of {len(blob)} bytes is over its limit of {limit}")
    try:
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        tree = json.loads(header["__metadata__"]["effuse"], parse_constant=_no_constant)
        named = safetensors.torch.load(blob)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a message of {len(blob)} bytes cannot be read: {type(error).__name__}: {error}") from None
    tensors = [named[k] for k in sorted(named)]
    for tensor in tensors:
        _check_kind(tensor, Tensor, "a message")
        _finite_tensor(tensor)
    used: set[int] = set()
    value = _unpack(tree, hint, tensors, used, "message")
    if len(used) != len(tensors):
        raise WireError(f"a message has {len(tensors) - len(used)} tensors that none of its fields name")
    return value


def marks_in(blob: bytes) -> dict[str, str]:
    """The marks that `encode` put into a blob's header."""
    try:
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        return {name: str(value) for name, value in metadata.items() if name != "effuse"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"the header of {len(blob)} bytes cannot be read: {type(error).__name__}: {error}") from None


def _pack(value: Any, hint: Any, tensors: list[Tensor], where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _pack(value, _member(value, args, where), tensors, where)
    if not _fits(value, hint):
        raise WireError(f"{where} is {type(value).__name__}, but {hint} is declared")
    for tensor in [value] if isinstance(value, Tensor) else value.tensors if isinstance(value, Params) else []:
        _check_kind(tensor, hint, where)
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, Params):
        tensors.extend(value.tensors)
        return [len(tensors) - len(value), *value]
    if isinstance(value, Spec):
        return text(value)
    if is_message(type(value)):
        hints = message_hints(type(value))
        fields = {f: _pack(getattr(value, f), h, tensors, f"{where}.{f}") for f, h in hints.items()}
        return {"": message_name(type(value)), **fields}
    if origin is dict:
        odd = [k for k in value if type(k) is not args[0]]
        if odd:
            raise WireError(f"{where} has the key {odd[0]!r}, but {hint} is declared")
        return {str(k): _pack(v, args[1], tensors, f"{where}[{k}]") for k, v in value.items()}
    if origin in (list, tuple):
        return [
            _pack(v, h, tensors, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, _items(hint, len(value), where)))
        ]
    return _finite(value, where) if hint is float else value


def _unpack(tree: Any, hint: Any, tensors: list[Tensor], used: set[int], where: str) -> Any:
    def take(i: Any) -> Tensor:
        if type(i) is not int or not 0 <= i < len(tensors) or i in used:
            raise WireError(f"{where} names tensor {i!r}, which does not exist or is used twice")
        used.add(i)
        return tensors[i]

    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _unpack(tree, _tree_member(tree, args, where), tensors, used, where)
    if hint is Tensor:
        return take(tree)
    if hint in (Params, Buffers):
        first, *names = tree if isinstance(tree, list) and tree else (None,)
        if type(first) is not int or not all(isinstance(n, str) for n in names):
            raise WireError(f"{where} is not a list of tensor names")
        if len(set(names)) != len(names):
            raise WireError(f"{where} names a tensor twice")
        named = {n: take(first + i) for i, n in enumerate(names)}
        for tensor in named.values():
            _check_kind(tensor, hint, where)
        # bf16 is for the wire only; all computation is in fp32
        return hint({n: widened(t) for n, t in named.items()})
    if isinstance(hint, type) and issubclass(hint, Spec):
        if not isinstance(tree, str):
            raise WireError(f"{where} is {type(tree).__name__}, but a {hint.name} is declared")
        try:
            spec = build(parse(tree), hint, where)
        except EffuseError as error:
            raise WireError(str(error)) from None
        if not isinstance(spec, hint):
            raise WireError(f"{where} is {type(spec).__name__}, but a {hint.name} is declared")
        if not getattr(spec, "travels", True):
            raise WireError(f"{where} is a {spec.name}, which is allowed in a recipe but not in a message")
        return spec
    if is_message(hint):
        cls = _named(tree, hint)
        if cls is None:
            raise WireError(f"{where} is not a {message_name(hint)}")
        hints = message_hints(cls)
        if tree.keys() != hints.keys() | {""}:
            raise WireError(f"{where} has the fields {sorted(tree)[1:]}, not those of {message_name(cls)}: {sorted(hints)}")
        return cls(**{f: _unpack(tree[f], h, tensors, used, f"{where}.{f}") for f, h in hints.items()})
    if origin is dict and isinstance(tree, dict):
        return {_key(k, args[0], where): _unpack(v, args[1], tensors, used, f"{where}[{k}]") for k, v in tree.items()}
    if origin in (list, tuple) and isinstance(tree, list):
        items = zip(tree, _items(hint, len(tree), where))
        return origin(_unpack(v, h, tensors, used, f"{where}[{i}]") for i, (v, h) in enumerate(items))
    if not _fits(tree, hint):
        raise WireError(f"{where} is {type(tree).__name__}, but {hint} is declared")
    return _finite(tree, where) if hint is float else tree


def _finite(number: int | float, where: str) -> float:
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise WireError(f"{where} is {value}, which is not a finite number")
    return value


def _check_kind(tensor: Tensor, hint: Any, where: str) -> None:
    """Refuse a tensor of a type that the receiver could not compute with."""
    allowed = FLOATS[:2] if hint is Params else FLOATS + INTEGERS  # parameters are fp32, or bf16 on the wire
    if tensor.dtype not in allowed:
        raise WireError(f"{where} holds a tensor of {tensor.dtype}, which {hint.__name__} may not")


def _named(tree: Any, hint: type) -> type | None:
    """The message type that a JSON tree names, if it is one of the declared kind."""
    name = tree.get("") if isinstance(tree, dict) else None
    cls = MESSAGES.get(name) if isinstance(name, str) else None
    return cls if cls is not None and issubclass(cls, hint) else None


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is None or hint is type(None):
        return value is None
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in get_args(hint))
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return type(value) in (float, int)
    if hint in (int, bool, Params, Buffers):
        return type(value) is hint
    return isinstance(value, hint)


def _member(value: Any, args: tuple[Any, ...], where: str) -> Any:
    for arg in _ints_first(args):
        if _fits(value, arg):
            return arg
    raise WireError(f"{where} is {type(value).__name__}, which fits none of the declared types")


def _tree_member(tree: Any, args: tuple[Any, ...], where: str) -> Any:
    """The member of a union that a JSON tree was encoded from."""
    for arg in _ints_first(args):
        if is_plain(arg):
            fits = _fits(tree, arg)
        else:
            fits = _named(tree, arg) is not None if is_message(arg) else type(tree) is json_form(arg)
        if fits:
            return arg
    raise WireError(f"{where} fits none of the declared types")


def _ints_first(args: tuple[Any, ...]) -> list[Any]:
    return sorted(args, key=lambda a: a is float)  # otherwise an int would be decoded as a float


def _items(hint: Any, n: int, where: str) -> list[Any]:
    args = get_args(hint)
    if get_origin(hint) is list:
        return [args[0]] * n
    if len(args) == 2 and args[1] is Ellipsis:
        return [args[0]] * n
    if len(args) != n:
        raise WireError(f"{where} has {n} items, but {len(args)} are declared")
    return list(args)


def _key(key: str, kind: type, where: str) -> int | str:
    if kind is str:
        return key
    if not re.fullmatch(r"-?(0|[1-9][0-9]{0,18})", key):
        raise WireError(f"{where} has the key '{key[:40]}', which is not a whole number of up to 19 digits")
    return int(key)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a finite number")
