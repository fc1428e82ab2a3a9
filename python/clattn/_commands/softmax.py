"""Softmax in NumPy: the commands compare results with it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def weigh(scores: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    """Return softmax(scores) @ value, (..., L, Ev), in the dtype of the scores, (..., L, S).

    A score of -inf leaves its key out; a row without keys is 0. The scores are overwritten, so that
    no second array of their size is needed.
    """
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    scores -= np.where(np.isneginf(highest), 0, highest)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=-1, keepdims=True)
    sums[sums == 0] = 1
    result: NDArray[Any] = scores @ value
    result /= sums
    return result
