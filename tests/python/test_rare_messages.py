# SPDX-License-Identifier: MIT
"""Messages that no typical mistake meets, word for word: see test_messages.py for those."""

import re

import clattn
import numpy as np
import pytest
from support.loops import looped
from support.processes import run_python

attend = clattn.scaled_dot_product_attention
of_core = clattn._core.scaled_dot_product_attention  # takes arguments that have no signature
q = np.ones((1, 2, 3, 8), np.float32)
stacked = np.ones((1, 3, 1, 2, 8), np.float32)


def tensor(*shape):
    return clattn.tensor(np.ones(shape, np.float32))


def directml(**arrays):
    return clattn.directml.multihead_attention(**arrays, scale=1.0, head_count=1)


def strided(shape, strides):
    """An array of these strides, in elements."""
    memory = np.zeros(1000, np.float32)
    return np.lib.stride_tricks.as_strided(memory, shape, [4 * n for n in strides])


CALLS = {
    "query without another": (
        lambda: directml(query=None, key=q[0], value=q[0]),
        ValueError,
        "query is missing; expected exactly one of query, stacked_query_key, "
        "stacked_query_key_value",
    ),
    "keys twice": (
        lambda: directml(query=q[0], key=q[0], value=q[0], stacked_key_value=stacked),
        ValueError,
        "key is given 2 times, in key, stacked_key_value; expected exactly one of key, "
        "stacked_query_key, stacked_key_value, stacked_query_key_value",
    ),
    "the older text of opset 25": (
        lambda: clattn.onnx.attention(q, q, q, pre_errata=True, opset=25),
        ValueError,
        "pre_errata is True with opset 25, which was published corrected; expected opset 23 or 24",
    ),
    "an unknown argument": (
        lambda: of_core(q, q, q, is_casual=True),
        TypeError,
        "argument 'is_casual' is not known",
    ),
    "an argument twice": (lambda: of_core(q, q, q, key=q), TypeError,
                          "argument 'key' is given twice"),
    "an argument that is missing": (lambda: of_core(q, q), TypeError,
                                    "argument 'value' is missing"),
    "a window of three": (
        lambda: attend(q, q, q, window=(1, 2, 3)),
        ValueError,
        "window has 3 elements; expected a pair (left, right)",
    ),
    "sinks of two dimensions": (
        lambda: attend(q, q, q, sinks=np.ones((2, 3), np.float32)),
        ValueError,
        "sinks has shape (2, 3); expected (Hq,), one for each query head, or more dimensions of "
        "size 1",
    ),
    "a shape of many dimensions": (
        lambda: clattn.diagonal_matrix((1,) * 65, 1, 0, 1),
        ValueError,
        "input_or_shape has 65 dimensions; expected 64 at most",
    ),
    "rows that share elements": (
        lambda: attend(q, q, q, out=strided((1, 2, 3, 8), (0, 10, 6, 1))),
        ValueError,
        "out has elements that share memory",
    ),
    "elements that meet far apart": (
        lambda: clattn.diagonal_matrix(strided((4, 3), (2, 3)), 1, 0, 1,
                                       out=strided((4, 3), (2, 3))),
        ValueError,
        "out has elements that share memory",
    ),
    "a result that no machine holds": (
        lambda: clattn.diagonal_matrix((2**31, 2**31), 1, 0, 1),
        MemoryError,
        "no memory for a result of shape (2147483648, 2147483648) and dtype float32; compute it in "
        "parts",
    ),
    "a Tensor as a condition": (
        lambda: bool(tensor(3)),
        TypeError,
        "a Tensor is neither true nor false; use tensor.numpy()",
    ),
    "an infinite scale": (
        lambda: clattn.openvino.scaled_dot_product_attention(
            *[q.astype(np.float16)] * 3, np.float16(0), np.array(np.inf, np.float16)
        ),
        ValueError,
        "scale is inf",
    ),
    "a window below 0": (
        lambda: attend(q, q, q, window=(-2, 0)),
        ValueError,
        "window has the bound -2; expected 0 or more, or None",
    ),
    "more keys than a mod counts": (
        lambda: clattn.flex_attention(q, *[np.broadcast_to(q[:, :, :1], (1, 2, 2**31, 8))] * 2,
                                      lambda s, b, h, i, j: s + j),
        ValueError,
        "query has 3 rows and key has 2147483648; expected at most 1073741823 with score_mod, "
        "mask_mod or block_mask",
    ),
    "a position beyond 32 bits": (
        lambda: clattn.flex_attention(q, q, q, lambda s, b, h, i, j: s + i, query_offset=2**31),
        ValueError,
        "query_offset has the number 2147483648; expected ",
    ),
    "a number among a Tensor's": (
        lambda: 1.0 in tensor(3),
        TypeError,
        "a Tensor's elements are not compared; use tensor.numpy()",
    ),
    "two ellipses": (
        lambda: tensor(2, 3)[..., 0, ...],
        IndexError,
        "an index can only have a single ellipsis ('...')",
    ),
    "an index of many dimensions": (
        lambda: tensor(2, 3)[(None,) * 63],
        IndexError,
        "the index makes more than 64 dimensions",
    ),
    "a stream of a Tensor": (
        lambda: tensor(3).__dlpack__(stream=1),
        BufferError,
        "stream is 1; expected None, for OpenCL and the host have none",
    ),
    "a device that is a large number": (
        lambda: attend(q, q, q, device=2**80),
        ValueError,
        f"device is {2**80}; expected an index in clattn.devices()",
    ),
}  # fmt: skip


@looped("name", CALLS)
def test_message(name):
    call, error, said = CALLS[name]
    with pytest.raises(error, match=re.escape(said)):
        call()


def test_a_device_that_the_tensors_are_not_on(first_device):
    others = [device for device in clattn.devices() if device != first_device]
    if not others:
        pytest.skip("there is one device only")
    moved = clattn.tensor(q, first_device)
    with pytest.raises(ValueError, match=re.escape("the argument device")):
        attend(moved, moved, moved, device=others[0])


OPENED = {  # what clattn._host.drivers finds, and what the first call says
    "no loader": ({"candidates": (b"/no/such/libOpenCL.so",)},
                  "no OpenCL loader could be opened; /no/such/libOpenCL.so: cannot open"),
    "no functions of OpenCL": ({"candidates": (b"libc.so.6",)},
                               "no OpenCL loader could be opened; libc.so.6 has no cl"),
    "another memory mode": ({"memory": "ram"},
                            "memory mode 'ram': expected 'svm', 'host' or 'copy'"),
}  # fmt: skip


@looped("name", OPENED)
def test_opening(name):
    found, said = OPENED[name]
    done = run_python(
        f"""
        import clattn, clattn._host.drivers as drivers
        names = "preload", "candidates", "cache", "memory"
        found = dict(zip(names, drivers.discover())) | {found!r}
        drivers.discover = lambda: tuple(found.values())
        try:
            clattn._core.all_devices()
        except Exception as error:
            print(error)
        """
    )
    assert said in done.stdout
