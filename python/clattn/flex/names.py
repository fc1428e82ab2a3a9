"""The functions of NumPy and torch that symbols know, by name, and how calls of them arrive.

Nothing here imports torch: what arrives by `__torch_function__` has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from clattn.flex import operations as ops

if TYPE_CHECKING:
    from clattn.flex.graph import Trace
    from clattn.flex.symbols import Symbol

    Operation = Callable[..., Symbol]

__all__ = ["call_function", "call_torch", "call_ufunc", "method"]

_COMPARISONS: dict[str, Operation] = {
    "lt": ops.less,
    "le": ops.less_equal,
    "gt": ops.greater,
    "ge": ops.greater_equal,
    "eq": ops.equal,
    "ne": ops.not_equal,
}
_REAL_FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos")

# Of NumPy and of torch.
_COMMON: dict[str, Operation] = {
    "add": ops.add,
    "subtract": ops.subtract,
    "multiply": ops.multiply,
    "divide": ops.divide,
    "true_divide": ops.divide,
    "floor_divide": ops.floor_divide,
    "remainder": ops.remainder,
    "square": ops.square,
    "negative": ops.negative,
    "positive": ops.positive,
    "absolute": ops.absolute,
    "sign": ops.sign,
    "minimum": ops.minimum,
    "maximum": ops.maximum,
    "clip": ops.clip,
    "floor": ops.floor,
    "where": ops.where,
    "full_like": ops.full_like,
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "bitwise_and": ops.bitwise_and,
    "bitwise_or": ops.bitwise_or,
    "bitwise_xor": ops.bitwise_xor,
    "logical_and": ops.logical_and,
    "logical_or": ops.logical_or,
    "logical_xor": ops.logical_xor,
    "logical_not": ops.logical_not,
    "less": ops.less,
    "less_equal": ops.less_equal,
    "greater": ops.greater,
    "greater_equal": ops.greater_equal,
    "equal": ops.equal,
    "not_equal": ops.not_equal,
    **{name: ops.real_function(name) for name in _REAL_FUNCTIONS},
}

_NUMPY: dict[str, Operation] = {
    **_COMMON,
    "power": ops.power,
    "invert": ops.invert,
    "left_shift": ops.left_shift,
    "right_shift": ops.right_shift,
}

_TORCH: dict[str, Operation] = {
    **_COMMON,
    "sub": ops.subtract,
    "mul": ops.multiply,
    "div": ops.divide,
    "pow": ops.power,
    "neg": ops.negative,
    "abs": ops.absolute,
    "clamp": ops.clip,
    "bitwise_not": ops.invert,
    "bitwise_left_shift": ops.left_shift,
    "bitwise_right_shift": ops.right_shift,
    "masked_fill": ops.masked_fill,
    "sgn": ops.sign,
    **_COMPARISONS,
}

# What torch calls for operators with a tensor on the left; `rsub` and the like are the reflected.
_TORCH_OPERATORS: dict[str, Operation] = {
    "__add__": ops.add,
    "__sub__": ops.subtract,
    "__mul__": ops.multiply,
    "__truediv__": ops.divide,
    "__floordiv__": ops.floor_divide,
    "__mod__": ops.remainder,
    "__pow__": ops.power,
    "__and__": ops.bitwise_and,
    "__or__": ops.bitwise_or,
    "__xor__": ops.bitwise_xor,
    "__lshift__": ops.left_shift,
    "__rshift__": ops.right_shift,
    **{f"__{name}__": operation for name, operation in _COMPARISONS.items()},
}


def call_ufunc(trace: Trace, name: str, way: str, inputs: Any, options: Any) -> Symbol:
    """Do what NumPy asks of `__array_ufunc__`; `way` is "__call__", or "reduce" and the like."""
    if way != "__call__":
        raise trace.refuse(f"np.{name}.{way} of a symbol, which is a single number")
    return _call(trace, f"np.{name}", _NUMPY.get(name), _NUMPY, inputs, options)


def call_function(trace: Trace, name: str, inputs: Any, options: Any) -> Symbol:
    """Do what NumPy asks of `__array_function__`."""
    return _call(trace, f"np.{name}", _NUMPY.get(name), _NUMPY, inputs, options)


def call_torch(trace: Trace, function: Any, inputs: Any, options: Any) -> Symbol:
    """Do what torch asks of `__torch_function__`."""
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__":
        table, index = inputs
        return trace.lookup(table, index)
    is_method = getattr(function, "__objclass__", None) is not None
    operation = _TORCH.get(name) or _TORCH_OPERATORS.get(name)
    if name == "where" and is_method:
        operation = ops.tensor_where
    if operation is None and name.startswith("__r"):
        operation = _TORCH_OPERATORS.get(f"__{name[3:]}")
        inputs = inputs[::-1]
    return _call(trace, f"torch.{name}", operation, _TORCH, inputs, options)


def method(name: str) -> Operation | None:
    """Return the operation of torch's and NumPy's methods of that name: score.abs(), x.clamp()."""
    return ops.tensor_where if name == "where" else _TORCH.get(name)


def _call(
    trace: Trace,
    name: str,
    operation: Operation | None,
    known: Iterable[str],
    inputs: Any,
    options: Any,
) -> Symbol:
    if operation is None:
        raise trace.refuse(f"{name} is not known; there are {', '.join(sorted(known))}")
    if options:
        code = operation.__code__
        taken = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        options = {option: value for option, value in options.items() if value is not None}
        for option in options:
            if option not in taken:
                raise trace.refuse(f"{name} of a symbol takes no {option}")
    return operation(trace, *inputs, **(options or {}))
