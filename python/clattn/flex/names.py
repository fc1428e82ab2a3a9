"""The functions of NumPy and torch that symbols know, by name, and how calls of them arrive.

Nothing here imports torch: what arrives by `__torch_function__` has a name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from clattn.flex import functions as fns
from clattn.flex import operations as ops
from clattn.flex.graph import Graph
from clattn.flex.kinds import BOOL, INT, LONG, REAL

__all__ = ["OPERATORS", "call_method", "call_numpy", "call_torch", "is_method"]

Operation = Callable[..., Any]

# Where users read which functions there are.
_PAGE = "docs/operators/flex_attention.md"

# The operators of two operands, by the names of their methods.
OPERATORS: dict[str, Operation] = {
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
    "__lt__": ops.less,
    "__le__": ops.less_equal,
    "__gt__": ops.greater,
    "__ge__": ops.greater_equal,
    "__eq__": ops.equal,
    "__ne__": ops.not_equal,
}

# Of NumPy and of torch.
_COMMON: dict[str, Operation] = {
    "add": ops.add,
    "subtract": ops.subtract,
    "multiply": ops.multiply,
    "divide": ops.divide,
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
    "round": fns.round_,
    "fmod": fns.fmod,
    "reciprocal": fns.reciprocal,
    "isnan": fns.isnan,
    "isinf": fns.isinf,
    "isfinite": fns.isfinite,
    "nan_to_num": fns.nan_to_num,
    "isin": fns.isin,
    "hypot": ops.real_function_of_two("hypot"),
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
}
_COMMON |= {
    name: ops.real_function(name)
    for name in (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sqrt",
        "tanh",
        "sin",
        "cos",
        "erf",
        "erfc",
    )
}
_COMMON |= {name: ops.rounding(name) for name in ("floor", "ceil", "trunc")}

# By the names that functions have: that of np.abs is "absolute". SciPy's ufuncs arrive as NumPy's.
_NUMPY: dict[str, Operation] = {
    **_COMMON,
    "power": ops.power,
    "invert": ops.invert,
    "rint": fns.round_,
    "arctan2": ops.real_function_of_two("atan2"),
    "expit": fns.sigmoid,
    "log_expit": fns.log_sigmoid,
    "left_shift": ops.left_shift,
    "right_shift": ops.right_shift,
}

# Torch has a function of each name, and a method of nearly each.
_TORCH: dict[str, Operation] = {
    **_COMMON,
    **{name: OPERATORS[f"__{name}__"] for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "sub": ops.subtract,
    "mul": ops.multiply,
    "div": ops.divide,
    "true_divide": ops.divide,
    "pow": ops.power,
    "neg": ops.negative,
    "abs": ops.absolute,
    "sgn": ops.sign,
    "clamp": ops.clip,
    "bitwise_not": ops.invert,
    "bitwise_left_shift": ops.left_shift,
    "bitwise_right_shift": ops.right_shift,
    "masked_fill": ops.masked_fill,
    "embedding": fns.embedding,
    "dot": fns.dot,
    "min": ops.minimum,
    "max": ops.maximum,
    "atan2": ops.real_function_of_two("atan2"),
    "arctan2": ops.real_function_of_two("atan2"),
    "rsqrt": ops.real_function("rsqrt"),
    "relu": fns.relu,
    "leaky_relu": fns.leaky_relu,
    "elu": fns.elu,
    "sigmoid": fns.sigmoid,
    "silu": fns.silu,
    "gelu": fns.gelu,
    "softplus": fns.softplus,
    "log_sigmoid": fns.log_sigmoid,
}

# Methods of torch's and NumPy's arrays.
_METHODS: dict[str, Operation] = {
    **_TORCH,
    "where": ops.tensor_where,
    "round": fns.round_,
    "astype": ops.cast,
    "to": ops.to,
    "bool": ops.cast_to(BOOL),
    "int": ops.cast_to(INT),
    "long": ops.cast_to(LONG),
    **dict.fromkeys(("float", "half", "bfloat16", "double"), ops.cast_to(REAL)),
    "new_ones": ops.new_constant(1),
    "new_zeros": ops.new_constant(0),
}


def call_numpy(graph: Graph, function: str, inputs: Any, options: Any) -> Any:
    """Do what NumPy asks of `__array_ufunc__` or `__array_function__`."""
    return _call(graph, f"np.{function}", _NUMPY.get(function), _NUMPY, inputs, options)


def call_torch(graph: Graph, function: Any, inputs: Any, options: Any) -> Any:
    """Do what torch asks of `__torch_function__`."""
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__":
        return graph.lookup(*inputs)
    if name == "where" and getattr(function, "__objclass__", None) is not None:  # the method
        return call_method(graph, name, inputs, options)
    operation = _TORCH.get(name) or OPERATORS.get(name)
    return _call(graph, f"torch.{name}", operation, _TORCH, inputs, options)


def is_method(name: str) -> bool:
    """Return whether symbols have a method of that name: score.abs(), x.clamp()."""
    return name in _METHODS


def call_method(graph: Graph, name: str, inputs: Any, options: Any) -> Any:
    """Call a method; the first of the inputs is the symbol that has it."""
    return _call(graph, f"the method {name}", _METHODS[name], _METHODS, inputs, options)


def _call(
    graph: Graph,
    name: str,
    operation: Operation | None,
    known: Iterable[str],
    inputs: Any,
    options: Any,
) -> Any:
    if operation is None:
        raise graph.refuse(f"{name} is not known{_nearest(name, known)}; {_PAGE} lists what is")
    if options:  # all of them are None by default
        options = {option: value for option, value in options.items() if value is not None}
    try:
        return operation(graph, *inputs, **options)
    except TypeError:
        own = 2 if known is _METHODS else 1  # the graph, and the symbol that has the method
        _check_arguments(graph, name, operation, own, inputs, options)
        raise


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return words that name the known function whose name is nearest, if one is near."""
    import difflib  # a library that importing clattn does not load

    module, _, function = name.rpartition(".")
    near = difflib.get_close_matches(function, known, 1)
    return f"; the nearest is {module}.{near[0]}" if near else ""


def _check_arguments(
    graph: Graph, name: str, operation: Operation, own: int, inputs: Any, options: dict[str, Any]
) -> None:
    """Raise TypeError if an operation does not take such arguments.

    The first `own` arguments are not among those that the user has written.
    """
    signature = inspect.signature(operation)
    for option in options:
        if option not in signature.parameters:
            raise graph.refuse(f"{name} of a symbol takes no {option}")
    try:
        signature.bind(graph, *inputs, **options)
    except TypeError:
        given = 1 + len(inputs) + len(options) - own
        plain = [
            parameter.replace(annotation=parameter.empty)
            for parameter in list(signature.parameters.values())[own:]
        ]
        expected = signature.replace(parameters=plain, return_annotation=signature.empty)
        raise graph.refuse(
            f"{name} of a symbol is given {given} argument{'s' * (given != 1)}; expected {expected}"
        ) from None
