# SPDX-License-Identifier: MIT
"""What the tests of clattn.Tensor share: one call of every operator, counts of memory, layouts."""

import contextlib
from typing import NamedTuple

import clattn
import numpy as np
from references.attention import attention
from references.diagonal import bits, numbers
from references.directml import make
from support.data import draw

READ_BY_HOST = "cu_seq_q", "cu_seq_k", "seqused_k", "block_table"  # from any device


class Call(NamedTuple):
    """A correct call: the function's path below clattn, the array that decides, and the rest."""

    name: str
    query: str  # results are of this argument's kind
    arrays: dict
    options: dict

    @property
    def takes_device(self):
        return self.name not in ("tril", "triu")

    @property
    def read_by_device(self):
        """The names of the arrays that are on the call's device, if they are Tensors."""
        return [name for name in self.arrays if name not in READ_BY_HOST]

    def run(self, change=lambda name, array: array, device=None, **more):
        """Call clattn; `change(name, array)` says what is passed for each array.

        Returns {name: result} of the results that there are.
        """
        function, context = clattn, contextlib.nullcontext()
        for part in self.name.split("."):
            function = getattr(function, part)
        arrays = {name: change(name, array) for name, array in self.arrays.items()}
        if device is not None and self.takes_device:
            more["device"] = device
        elif device is not None:
            context = clattn.use_device(device)
        with context:
            answer = function(**arrays, **self.options, **more)
        if not isinstance(answer, tuple):
            return {"result": answer}
        names = getattr(answer, "_fields", ("result", "lse"))
        return {n: a for n, a in zip(names, answer, strict=True) if a is not None}


def torch_like(L=17, S=33, **options):
    shapes = ((2, 3, L, 8), (2, 3, S, 8), (2, 3, S, 8))
    arrays = dict(zip(("query", "key", "value"), map(draw, shapes), strict=True))
    arrays["value"] = draw(shapes[2], seed=2)
    if options.pop("mask", None) == "bool":
        arrays["attn_mask"] = draw((3, L, S)) > -0.5
    else:
        arrays["attn_mask"] = draw((2, 1, 1, S))
    return Call("scaled_dot_product_attention", "query", arrays, {"return_lse": True} | options)


def gradients():
    """The backward pass of a call, and what the forward pass gives to it."""
    arrays = dict(torch_like(5, 7, is_causal=True).arrays)
    result, lse = attention(**arrays, is_causal=True)
    arrays |= {"output": result.astype(np.float32), "lse": lse.astype(np.float32)}
    arrays["grad_output"] = draw(result.shape, seed=3)
    options = {"is_causal": True, "needs": ("query", "key", "value", "attn_mask")}
    return Call("scaled_dot_product_attention_backward", "query", arrays, options)


def packed(**pages):
    """Two sequences, whose keys may lie in pages."""
    arrays = {"query": draw((5, 4, 8)), "key": draw((9, 2, 8), seed=1),
              "value": draw((9, 2, 8), seed=2), "cu_seq_q": np.array([0, 2, 5]),
              "cu_seq_k": np.array([0, 3, 9]), "sinks": draw((4,), seed=3)}  # fmt: skip
    if pages:
        arrays |= {name: arrays[name].reshape(3, 3, 2, 8) for name in ("key", "value")}
        arrays |= pages
    options = {"is_causal": "lower_right", "enable_gqa": True, "return_lse": True}
    return Call("varlen_attn", "query", arrays, options)


def onnx(past=True, **options):
    arrays = {"Q": draw((2, 4, 5, 8)), "K": draw((2, 2, 7, 8), seed=1),
              "V": draw((2, 2, 7, 8), seed=2)}  # fmt: skip
    arrays["attn_mask"] = draw((5, 10 if past else 7))
    if past:
        arrays |= {"past_key": draw((2, 2, 3, 8)), "past_value": draw((2, 2, 3, 8), seed=1)}
    else:
        arrays["nonpad_kv_seqlen"] = np.array([5, 7])
    options = {"return_qk": True, "qk_matmul_output_mode": 2} | options
    return Call("onnx.attention", "Q", arrays, options)


def onnx_scatter():
    arrays = {"past_cache": draw((2, 3, 9, 8)), "update": draw((2, 3, 4, 8), seed=1),
              "write_indices": np.array([7, 2])}  # fmt: skip
    return Call("onnx.tensor_scatter", "past_cache", arrays, {"mode": "circular"})


def openvino(**options):
    arrays = {"query": draw((2, 3, 5, 8)), "key": draw((2, 3, 7, 8), seed=1),
              "value": draw((2, 3, 7, 8), seed=2), "attention_mask": draw((3, 5, 7)),
              "scale": np.array([0.3], np.float32)}  # fmt: skip
    return Call("openvino.scaled_dot_product_attention", "query", arrays, options)


def directml(source="separate"):
    mask = {"mask": np.arange(14, dtype=np.int32).reshape(2, 7) % 3, "mask_type": "boolean"}
    full = make(source, P=3, bias=True) if source != "separate" else make(bias=True, **mask)
    query = next(n for n in ("query", "stacked_query_key", "stacked_query_key_value") if n in full)
    arrays = {n: a for n, a in full.items() if isinstance(a, np.ndarray)}
    options = {n: a for n, a in full.items() if n not in arrays} | {"return_present": True}
    return Call("directml.multihead_attention", query, arrays, options)


def matrices(name, argument="input", **options):
    return Call(name, argument, {argument: numbers((2, 17, 21), np.dtype("f4"))}, options)


# Results of an operator that are not of the query's kind: {name: the argument of whose kind it is}
DECIDES = {
    "onnx.attention": {"present_value": "V"},
    "scaled_dot_product_attention_backward": {n: n for n in ("key", "value", "attn_mask")},
}
CALLS = {
    "torch-like": torch_like(),
    "torch-like, causal, bool mask": torch_like(mask="bool", is_causal=True),
    "torch-like, dropout": torch_like(dropout_p=0.3, seed=5),
    "torch-like, one row": torch_like(1, 200),
    "gradients": gradients(),
    "packed": packed(),
    "packed, pages": packed(block_table=np.array([[2, 0], [1, 0]]), seqused_k=np.array([2, 5])),
    "onnx with a past": onnx(),
    "onnx with lengths": onnx(past=False),
    "onnx, rows into a cache": onnx_scatter(),
    "openvino": openvino(),
    "directml": directml(),
    "directml, packed": directml("stacked_query_key_value"),
    "directml, queries and keys packed": directml("stacked_query_key"),
    "directml, keys and values packed": directml("stacked_key_value"),
    "diagonal_matrix": matrices("diagonal_matrix", "input_or_shape", value=3, begin=-2, end=4),
    "tril": matrices("tril", diagonal=2),
    "triu": matrices("triu"),
    "diagonal_matrix1": matrices("directml.diagonal_matrix1", value=3, diagonal_fill_begin=4,
                                 diagonal_fill_end=-2),
    "directml's diagonal_matrix": matrices("directml.diagonal_matrix", value=3, offset=-1),
}  # fmt: skip


def in_host_memory(device):
    """Whether Tensors of the device lie in memory that NumPy can look at without a copy."""
    return device.memory_mode in ("svm", "host")


def settled(device):
    """(allocated_bytes, allocated_blocks) once no call is running."""
    clattn.synchronize(device)
    stats = clattn.memory_stats(device)
    return stats["allocated_bytes"], stats["allocated_blocks"]


def pooled_twice(device, most):
    """A power of two of bytes, at most `most`, of which the device's pool keeps two blocks.

    A pool keeps at least a sixteenth of the device's memory.
    """
    return min(most, 1 << (device.memory // 32).bit_length() - 1)


def same_bits(got, right, what="result"):
    """Arrays, or Tensors, of one dtype, shape and bits, whatever their strides."""
    got, right = (a.numpy() if isinstance(a, clattn.Tensor) else a for a in (got, right))
    assert got.dtype == right.dtype.newbyteorder("="), f"{what}: {got.dtype}, not {right.dtype}"
    assert got.shape == right.shape, f"{what}: {got.shape}, expected {right.shape}"
    assert np.array_equal(bits(got), bits(right)), f"{what}: {got}\nexpected\n{right}"


def strided(array, device):
    """A Tensor of the array's values that lies as the array does, as far as views can say.

    Axes in the order of its strides (repeated ones outermost), negative ones backwards, gaps
    between rows of the same length, or of a few elements where they are long; other bits in them.
    """
    reach = [abs(step) or np.inf for step in array.strides]
    order = sorted(range(array.ndim), key=lambda axis: -reach[axis])
    flips = tuple(slice(None, None, -1 if array.strides[axis] < 0 else 1) for axis in order)
    dense = array.transpose(order)[flips]
    lengths, cut = list(dense.shape), [slice(None)] * dense.ndim
    for axis, (n, step) in enumerate(zip(dense.shape, dense.strides, strict=True)):
        outer = dense.strides[axis - 1] if axis else n * step
        if step and outer > n * step:
            lengths[axis] = outer // step if outer % step == 0 and outer < 8 * n * step else n + 3
            cut[axis] = slice(1, n + 1)
    if dense.ndim and dense.strides[-1] > dense.itemsize:
        lengths[-1] = 2 * lengths[-1] + 1
        cut[-1] = slice(1, 2 * dense.shape[-1] + 1, 2)
    wide = numbers(lengths, dense.dtype.newbyteorder("="))
    wide[tuple(cut)] = dense
    return clattn.tensor(wide, device)[tuple(cut)][flips].transpose(*np.argsort(order))
