# SPDX-License-Identifier: MIT
"""Random wrong calls of every door: an answer that is right, or an error of a documented kind.

Up to three arguments of a right call are something else. The call with copies of its arrays gives
the same, and no input changes. tests/support/wrong_calls.py has the calls and the objects, and says
what is right where a call is accepted.
"""

import clattn
import numpy as np
import pytest
import references.attention as reference
from hypothesis import given
from hypothesis import strategies as st
from references.attention import bfloat16
from support.checks import assert_close
from support.data import draw
from support.foreign import to_torch
from support.random_calls import LONG, examples
from support.variants import force
from support.wrong_calls import JUDGES, MASK, PACKED, RIGHT, WRONG, Q, is_small

DOCUMENTED = TypeError, ValueError, MemoryError


@pytest.fixture(autouse=True)
def chosen_kernels(monkeypatch):
    """Those that clattn chooses, where there is time to build them."""
    if not LONG:
        force(monkeypatch, "reference")


def copied(value):
    """An argument laid out anew: the same numbers, in rows."""
    return np.array(value, order="C", subok=True) if is_small(value) else value


def contents(answer):
    """What an answer holds, to be compared."""
    if isinstance(answer, tuple):
        return [contents(one) for one in answer]
    if isinstance(answer, clattn.Tensor):
        answer = answer.numpy()
    if isinstance(answer, np.ndarray):
        return answer.shape, answer.dtype, answer.tobytes()
    if isinstance(answer, clattn.BlockMask):
        return answer.shape, answer.BLOCK_SIZE, contents(answer.to_dense())
    return answer if isinstance(answer, int) else type(answer)


def answer_of(function, arguments, device, kinds=DOCUMENTED):
    """The answer, or the kind of error. `out` stays as it is."""
    if "out" in arguments:
        arguments = arguments | {"out": copied(arguments["out"])}
    with clattn.use_device(device):
        try:
            return function(**arguments)
        except kinds as error:
            return type(error)


def changed(data, right, wrong):
    """Arguments of which up to three are wrong, and the names of these."""
    names = data.draw(st.lists(st.sampled_from(list(right)), min_size=1, max_size=3))
    return right | {name: data.draw(st.sampled_from(wrong)) for name in names}, names


@examples(350)
@given(function=st.sampled_from(list(RIGHT)), data=st.data())
def test_wrong_arguments(device, function, data):
    arguments, names = changed(data, RIGHT[function], WRONG)
    copies = {name: copied(value) for name, value in arguments.items()}
    before = [contents(value) for value in copies.values() if is_small(value)]
    answer = answer_of(function, arguments, device)
    if not {"dropout_p", "seed"} <= set(names):  # which may be random
        again = answer_of(function, arguments if LONG else copies, device)
        assert contents(again) == contents(answer)
    assert [contents(value) for value in copies.values() if is_small(value)] == before
    if not isinstance(answer, type):
        JUDGES[function](answer, **arguments)


def test_right_arguments(device):
    """What the wrong calls are made of is accepted, and judged."""
    for function, arguments in RIGHT.items():
        if function is clattn.directml.diagonal_matrix1:  # takes an input or sizes
            arguments = arguments | {"input": None}
        answer = answer_of(function, arguments, device)
        assert not isinstance(answer, type), function
        JUDGES[function](answer, **arguments)


# ---- torch ----


def torch_objects():
    """Those of WRONG, with tensors in the place of arrays, and tensors of other kinds."""
    torch = pytest.importorskip("torch")
    found = []
    for value in WRONG:
        if isinstance(value, np.ndarray) and value.dtype.kind in "fib" and value.dtype.isnative:
            value = (
                torch.ones(1).expand(value.shape)
                if not is_small(value)
                else to_torch(np.array(value))
            )
        elif isinstance(value, np.ndarray) and value.dtype == bfloat16:
            value = to_torch(value)
        found.append(value)
    q = torch.from_numpy(Q)
    views = q[0, 0], q[:, :1], q.mT, torch._neg_view(q), q.clone().requires_grad_()
    dtypes = q.double(), q.half(), q.long(), q.bool(), q.cfloat(), torch.zeros(5, 5).double()
    kinds = q.to("meta"), q.to_sparse(), torch.nn.Parameter(q), torch.eye(5) > 0
    return [*found, *views, *dtypes, *kinds]


@examples(100)
@given(data=st.data(), patched=st.booleans())
def test_wrong_arguments_of_torch(device, data, patched):
    """What torch's function answers or raises.

    clattn alone takes masks of another float dtype and of fewer than two dimensions.
    """
    torch = pytest.importorskip("torch")
    import clattn.torch

    functional = torch.nn.functional
    theirs = functional.scaled_dot_product_attention
    q = torch.from_numpy(Q)
    right = {"query": q, "key": q, "value": q, "attn_mask": torch.from_numpy(MASK),
             "dropout_p": 0.0, "is_causal": False, "scale": 0.5, "enable_gqa": False}  # fmt: skip
    arguments, _ = changed(data, right, torch_objects())
    kinds = (*DOCUMENTED, RuntimeError, NotImplementedError)

    def ours(**options):
        if not patched:
            return clattn.torch.scaled_dot_product_attention(**options)
        with clattn.torch.sdpa(device):
            return functional.scaled_dot_product_attention(**options)

    def seeded(function):
        torch.manual_seed(0)
        return answer_of(function, arguments, device, kinds)

    def theirs_of(attn_mask, **options):
        mask, given = attn_mask, options["query"]
        if torch.is_tensor(mask) and mask.is_floating_point() and torch.is_tensor(given):
            mask = torch.atleast_2d(mask.to(given.dtype))
        return theirs(attn_mask=mask, **options)

    expected, answer = seeded(theirs_of), seeded(ours)
    if isinstance(expected, type) or isinstance(answer, type):
        assert answer is expected
        return
    assert (answer.dtype, answer.shape, answer.device, answer.layout) == (
        expected.dtype, expected.shape, expected.device, expected.layout)  # fmt: skip
    assert answer.requires_grad == expected.requires_grad
    if answer.device.type == "cpu" and answer.layout is torch.strided:
        eps = torch.finfo(answer.dtype).eps
        torch.testing.assert_close(answer, expected, rtol=0, atol=32 * eps, equal_nan=True)


@examples(60)
@given(data=st.data())
def test_wrong_arguments_of_torchs_sequences(device, data):
    """What clattn.varlen_attn answers or raises, which refuses tensors that require gradients."""
    torch = pytest.importorskip("torch")
    import clattn.torch

    right = {
        name: to_torch(value) if isinstance(value, np.ndarray) else value
        for name, value in RIGHT[clattn.varlen_attn].items()
    }
    packed = to_torch(PACKED)
    wrong = [*torch_objects(), packed[0], packed.double(), packed.clone().requires_grad_(),
             packed.to("meta"), torch.tensor([0, 1, 5]), torch.tensor([0, 6])]  # fmt: skip
    arguments, _ = changed(data, right, wrong)
    kinds = (*DOCUMENTED, RuntimeError, NotImplementedError)
    expected = answer_of(clattn.varlen_attn, arguments, device, kinds)
    answer = answer_of(clattn.torch.varlen_attn, arguments, device, kinds)
    needs = any(getattr(value, "requires_grad", False) for value in arguments.values())
    if isinstance(expected, type) or isinstance(answer, type):
        assert needs or (isinstance(expected, type) and isinstance(answer, type))
        return
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (answer, expected)),
                          strict=True):  # fmt: skip
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


# ---- JAX ----


def judge_jax(answer, *, query, key, value, bias, mask, scale, is_causal, local_window_size,
              query_seq_lengths, key_value_seq_lengths, return_residual, **others):  # fmt: skip
    """Beside the reference, to which all masks are one. JAX narrows dtypes of 64 bits."""
    jnp = pytest.importorskip("jax").numpy

    def four(array):
        array = np.asarray(jnp.asarray(array))
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    q, k, v = (four(array).swapaxes(1, 2) for array in (query, key, value))
    L, S = q.shape[2], k.shape[2]
    seen = np.ones((1, 1, L, S), bool) if mask is None else four(mask)
    if key_value_seq_lengths is not None:
        lengths = np.asarray(jnp.asarray(key_value_seq_lengths)).reshape(-1, 1, 1, 1)
        seen = seen & (np.arange(S) < lengths)
    given = np.where(seen, np.float32(0) if bias is None else four(bias), -np.inf).astype("f4")
    window = local_window_size
    if window is not None:
        window = tuple(min(int(n), 2**40) for n in np.broadcast_to(np.asarray(window), 2))
    scale = scale if scale is None else float(scale)
    right = reference.judged(q, k, v, attn_mask=given, is_causal=is_causal, scale=scale,
                             window=window, enable_gqa=True)  # fmt: skip
    result, lse, kept = right.result.copy(), right.lse.copy(), np.ones((1, 1, L), bool)
    if query_seq_lengths is not None:
        kept = np.arange(L) < np.asarray(jnp.asarray(query_seq_lengths)).reshape(-1, 1, 1)
        result, lse = np.where(kept[..., None], result, 0), np.where(kept, lse, -np.inf)
    output = answer[0] if return_residual else answer
    assert output.shape == np.shape(query)
    got = np.asarray(output).reshape(q.swapaxes(1, 2).shape).swapaxes(1, 2)
    assert_close(got, result, right.allowed)
    if return_residual:
        got = np.asarray(answer[1]).reshape(q.swapaxes(1, 2).shape[:3]).swapaxes(1, 2)
        assert_close(got, lse, right.allowed_lse, "residual")


@examples(60)
@given(data=st.data())
def test_wrong_arguments_of_jax(device, data):
    jax = pytest.importorskip("jax")
    import clattn.jax

    x = draw((1, 5, 2, 8))
    bias = MASK[None, None]
    right = {"query": x, "key": x, "value": x, "bias": bias, "mask": bias > -1, "scale": 0.5,
             "is_causal": True, "query_seq_lengths": np.int32([4]),
             "key_value_seq_lengths": np.int32([3]), "local_window_size": (2, 1),
             "implementation": None, "return_residual": True}  # fmt: skip
    arguments, _ = changed(data, right, [*WRONG, x[0], x[:, :1], x[:, :, :1], jax.numpy.asarray(x)])

    def call(**options):
        return jax.block_until_ready(clattn.jax.dot_product_attention(**options))

    answer = answer_of(call, arguments, device)
    if not isinstance(answer, type):
        judge_jax(answer, **arguments)
