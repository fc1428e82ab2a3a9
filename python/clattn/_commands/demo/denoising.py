"""Non-local means as attention, the work of ``python -m clattn demo``.

Each pixel becomes a mean of all pixels. The weights grow with the likeness of the 7x7 patches
around two pixels. This is attention: the patches are queries and keys, the pixels are values, and
the softmax of the negative squared distances gives the weights.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clattn import Device, scaled_dot_product_attention
from clattn._commands.softmax import weigh

FloatArray: TypeAlias = NDArray[np.floating[Any]]

PATCH = 7  # edge of a patch in pixels
PATCH_SIGMA = 1.2  # of the Gaussian over the pixels of a patch; the centre weighs most
CHUNK_SCORES = 2**24  # scores that the NumPy version holds at once


@dataclass(frozen=True)
class Problem:
    """Non-local means as attention."""

    query: FloatArray  # (N, 49) patches, also the keys
    value: FloatArray  # (N, 3) pixels
    mask: FloatArray  # (1, N)
    scale: float


def non_local_means(noisy: FloatArray, sigma: float) -> Problem:
    """Return non-local means of `noisy`, (height, width, 3), as an attention problem.

    The weight of pixel j for pixel i is exp(-|p_i - p_j|^2 / h^2), where a patch p has the 49
    grey values around a pixel times the square root of a Gaussian window, and

        -|p_i - p_j|^2 / h^2 = -|p_i|^2 / h^2 + (2 / h^2) p_i . p_j - |p_j|^2 / h^2

    The first term is the same for all keys, so the softmax cancels it. 2 / h^2 is the scale. The
    last term depends on the key only, so it is a mask of shape (1, N). It could also be a 50th
    column of the keys, with a column of ones in the queries. But then it would be rounded to the
    dtype of the patches, scaled again, and added to terms of the other sign inside the dot
    product. As a mask it is computed in float64 and rounded once. Centring the patches does not
    change distances and keeps the two large terms as small as possible.
    """
    # The mean of three channels has a third of their variance. Patches that differ by noise only
    # have twice this variance as their mean distance, so h is of this order.
    h_squared = sigma**2 / 3
    axis = np.arange(PATCH) - PATCH // 2
    window = np.exp(-(axis[:, None] ** 2 + axis**2) / (2 * PATCH_SIGMA**2))
    window /= window.sum()

    grey = noisy.mean(axis=2, dtype=np.float64)
    padded = np.pad(grey, PATCH // 2, mode="reflect")
    patches = np.lib.stride_tricks.sliding_window_view(padded, window.shape)
    features = ((patches - grey.mean()) * np.sqrt(window)).reshape(grey.size, -1)
    query = features.astype(np.float32)
    mask = -np.square(query, dtype=np.float64).sum(axis=1) / h_squared
    return Problem(
        query=query,
        value=np.ascontiguousarray(noisy.reshape(-1, 3)),
        mask=mask.astype(np.float32)[None, :],
        scale=2 / h_squared,
    )


def attention(problem: Problem, device: Device, rows: int | None = None) -> FloatArray:
    """Return the denoised pixels, (N, 3), or the first `rows` of them, by one call."""
    result: FloatArray = scaled_dot_product_attention(
        problem.query[:rows],
        problem.query,
        problem.value,
        attn_mask=problem.mask,
        scale=problem.scale,
        device=device,
    )
    return result


def numpy_attention(
    query: FloatArray, key: FloatArray, value: FloatArray, mask: FloatArray, scale: float
) -> FloatArray:
    """Compute the same in NumPy, a chunk of rows at a time to bound the memory."""
    result = np.empty((len(query), value.shape[1]), query.dtype)
    step = max(1, CHUNK_SCORES // len(key))
    for start in range(0, len(query), step):
        scores = (query[start : start + step] * query.dtype.type(scale)) @ key.T
        scores += mask
        result[start : start + step] = weigh(scores, value)
    return result


def psnr(image: FloatArray, clean: FloatArray) -> float:
    """Peak signal-to-noise ratio in dB of `image`, clipped to the range 0 to 1."""
    difference = np.clip(image, 0, 1).astype(np.float64) - clean
    mean_square = float(np.mean(np.square(difference)))
    return 10 * math.log10(1 / mean_square) if mean_square > 0 else math.inf
