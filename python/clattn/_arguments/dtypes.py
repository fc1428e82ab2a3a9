"""The float dtypes of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import DTypeLike

FLOATS = ("float32", "float16", "bfloat16", "float64")
FLOAT_WORDS = "float16, bfloat16, float32 or float64"


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sums and log-sum-exp: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def ml_dtype(word: str) -> np.dtype[Any]:
    """Return a dtype of ml_dtypes.

    Raises
    ------
    ModuleNotFoundError
        ml_dtypes is not installed.
    """
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"NumPy's {word} needs the package ml_dtypes: pip install ml_dtypes", name="ml_dtypes"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, word))
    return dtype


def float_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return a float dtype; NumPy knows the word "bfloat16" only after ml_dtypes is imported.

    None is refused: NumPy takes it for float64, while clattn's default is float32.

    Raises
    ------
    TypeError
        Not a float dtype of attention.
    ModuleNotFoundError
        The dtype is the word "bfloat16", and ml_dtypes is not installed.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        dtype = ml_dtype(dtype)
    try:
        name = "None" if dtype is None else np.dtype(dtype).name
    except (TypeError, SyntaxError):  # the second of "f4,,"
        name = repr(dtype)
    if name not in FLOATS:
        raise TypeError(f"dtype is {name}; expected {FLOAT_WORDS}")
    return dtype
