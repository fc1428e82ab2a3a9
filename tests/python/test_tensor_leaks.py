# SPDX-License-Identifier: MIT
"""References: operators and methods keep none to their arguments, whether they raise or not.

conftest.py checks after every test that memory is given back.
"""

import gc

import clattn
import numpy as np
import pytest
from support.checks import assert_references_return
from support.data import draw
from support.loops import looped
from support.tensors import CALLS, settled

each_call = looped("call", CALLS.values(), ids=CALLS)
ERRORS = (TypeError, ValueError, IndexError, BufferError, AttributeError, MemoryError)


def constants(device):
    return [device, None, True, (), np.dtype("f4"), np.dtype("f8"), np.dtype(bool), clattn.Tensor,
            np.ndarray, 0, 1, clattn]  # fmt: skip


@each_call
@looped("kind", ["arrays", "Tensors", "mixed"])
def test_arguments(device, call, kind):
    """Right calls, and calls whose last argument is wrong."""
    passed = {}
    for n, (name, a) in enumerate(call.arrays.items()):
        on_device = kind == "Tensors" or (kind == "mixed" and n % 2 == 0)
        passed[name] = clattn.tensor(a, device) if on_device else a
    last = list(passed)[-1]

    def action():
        call.run(lambda name, _: passed[name], device=device)
        for wrong in (np.zeros((1, 2, 3), "c8"), "text", object()):
            with pytest.raises(ERRORS):
                call.run(lambda n, _: wrong if n == last else passed[n], device=device)  # noqa: B023
        with pytest.raises(ValueError, match="device"):
            call.run(lambda name, _: passed[name], device="no such device")

    assert_references_return(action, [*passed.values(), *constants(device)])


@looped("kind", ["array", "Tensor"])
def test_out(device, kind):
    """Nothing keeps out, whether the call is right or wrong."""
    t = clattn.tensor(draw((4, 8)), device)
    outs = [np.zeros((4, 8), np.float32), np.zeros((4, 9), np.float32), np.zeros((4, 8))]
    if kind == "Tensor":
        outs = [clattn.tensor(a, device) for a in outs]
    out, shape, dtype = outs

    def action():
        assert clattn.diagonal_matrix(t, 1, 0, 2, out=out) is out
        assert clattn.diagonal_matrix((4, 8), 1, 0, 2, out=out) is out
        clattn.scaled_dot_product_attention(t, t, t, out=out, return_lse=True)
        for wrong in (shape, dtype):
            with pytest.raises(ERRORS):
                clattn.diagonal_matrix(t, 1, 0, 2, out=wrong)
            with pytest.raises(ERRORS):
                clattn.scaled_dot_product_attention(t, t, t, out=wrong)

    assert_references_return(action, [t, *outs, *constants(device)])


def test_methods(device):
    """Views, arrays, exports, attributes, and their errors."""
    a = draw((4, 5))
    t = clattn.tensor(a, device)
    index, axes, shape = (slice(1, None), ..., None), (1, 0), (2, -1)
    wrong = [[0, 5], "text", (0, 0, 0), 99, np.ones(4, bool)]

    def refused(method, argument):
        with pytest.raises(ERRORS):
            method(argument)

    def action():
        clattn.tensor(a, device)
        clattn.tensor(t, device)
        t[index], t.transpose(*axes), t.transpose(axes), t.reshape(shape), t.T, t.T.reshape(20)
        t.numpy(), t.__array__(), np.asarray(t, "f8"), repr(t), len(t), list(t), hash(t), t == t
        for name in ("shape", "strides", "dtype", "device", "ndim", "size", "itemsize", "nbytes"):
            getattr(t, name)
        t.to(device), t.__dlpack_device__(), t.__dlpack__(), t.__dlpack__(max_version=(1, 0))
        np.from_dlpack(t, device="cpu"), clattn.memory_stats(device), clattn.synchronize(device)
        for bad in wrong:
            refused(t.__getitem__, bad)
            refused(t.reshape, bad)
            refused(t.transpose, bad)
            refused(t.to, bad)
            refused(lambda version: t.__dlpack__(max_version=version), bad)
            refused(lambda place: t.__dlpack__(dl_device=place), bad)
        for bad in ([1.0], "text", np.zeros(3, "c8"), object()):
            refused(lambda source: clattn.tensor(source, device), bad)
        refused(lambda word: clattn.tensor(a, word), "no such device")

    things = [a, t, index, axes, shape, *wrong, *constants(device)]
    assert_references_return(action, things)


def test_cycles(device):
    """Collecting a cycle of objects frees a Tensor in it."""
    start = settled(device)

    class Node:
        pass

    node = Node()
    node.itself, node.tensor = node, clattn.tensor(draw((40, 50)), device)
    node.array = node.tensor.numpy()
    del node
    gc.collect()
    assert settled(device) == start


def test_errors_that_are_kept_do_not_keep_arguments(device):
    """An exception without its traceback refers to no Tensor."""
    start = settled(device)
    wrong = (lambda t: t.reshape(7), lambda t: t[9], lambda t: clattn.tril(t, diagonal="x"),
             lambda t: clattn.scaled_dot_product_attention(t, t[:, :3], t))  # fmt: skip
    kept = []
    for action in wrong:
        try:
            action(clattn.tensor(draw((4, 5)), device))
        except ERRORS as error:
            kept.append(error.with_traceback(None))
    gc.collect()
    assert len(kept) == 4
    assert settled(device) == start
