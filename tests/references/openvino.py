# SPDX-License-Identifier: MIT
"""The oracle of OpenVINO's ScaledDotProductAttention-13, written from its specification.

Batch dimensions are repeated to their common size first, as `numpy.tile` does. What remains is
the attention of `reference`, whose tolerances hold here too.
"""

import numpy as np
import references.attention as reference


def common_size(sizes):
    """The size that all of one batch dimension's sizes are repeated to.

    NumPy's rule where it applies (1 and 0 make 0); else the largest, if every other divides it.
    """
    try:
        return np.broadcast_shapes(*((n,) for n in sizes))[0]
    except ValueError:
        largest = max(sizes)
        if any(n == 0 or largest % n for n in sizes):
            raise
        return largest


def common_lead(*leads):
    """Leading dimensions of the result; a missing dimension is 1."""
    rank = max(len(lead) for lead in leads)
    padded = [(1,) * (rank - len(lead)) + tuple(lead) for lead in leads]
    return tuple(common_size(sizes) for sizes in zip(*padded, strict=True))


def repeated(array, lead):
    """`array` with its leading dimensions repeated as a whole: entry i is entry i modulo size."""
    own = (1,) * (len(lead) - (array.ndim - 2)) + array.shape
    times = [1 if n == size else size // n for n, size in zip(own[:-2], lead, strict=True)]
    return np.tile(array.reshape(own), (*times, 1, 1))


def native(array):
    """The same values in the machine's byte order."""
    array = np.asarray(array)
    return array.astype(array.dtype.newbyteorder("="))


def translated(query, key, value, attention_mask=None, scale=None, causal=False):
    """The same call as `reference` takes it: (arrays, options)."""
    query, key, value = native(query), native(key), native(value)
    lead = common_lead(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    options = {"is_causal": causal}
    if scale is not None:  # a number, or an array with one
        options["scale"] = float(np.asarray(scale).reshape(()))
    # Under `causal` the mask is ignored, whatever it is; a scalar is 0 and means no mask.
    if not causal and attention_mask is not None and np.ndim(attention_mask) > 0:
        options["attn_mask"] = repeated(native(attention_mask), lead)
    return tuple(repeated(a, lead) for a in (query, key, value)), options


def attention(*args, **options):
    """The right answer, wider than any kernel's arithmetic."""
    arrays, options = translated(*args, **options)
    return reference.attention(*arrays, **options)[0]


def judged(*args, rounds_weights=False, **options):
    """The right answer and how far a result may be from it: see `reference.judged`."""
    arrays, options = translated(*args, **options)
    return reference.judged(*arrays, rounds_weights=rounds_weights, **options)


def tolerance(*args, **options):
    """How far each number of a result may be from `attention`."""
    return judged(*args, **options).allowed.each
