# SPDX-License-Identifier: MIT
"""clattn.jax beside jax.nn.dot_product_attention."""

import inspect
from functools import cache, partial

import clattn
import numpy as np
import pytest
from references.attention import attention, bfloat16
from support.data import draw
from support.processes import run_python

jax = pytest.importorskip("jax")

import clattn.jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

pytestmark = pytest.mark.by_turns  # arrays and rules, which depend on no device

B, L, S, HQ, HK, E = 2, 5, 7, 4, 2, 8
QKV = draw((B, L, HQ, E)), draw((B, S, HK, E)), draw((B, S, HK, E), seed=1)
BIAS = draw((B, 1, L, S))
MASK = np.random.default_rng(0).random((1, HQ, L, S)) < 0.7
MASK[..., 0] = True  # a row without keys is the mean of the values in jax
LENGTHS = {"query_seq_lengths": np.int32([3, 5]), "key_value_seq_lengths": np.int32([7, 4])}
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"bias": BIAS},
    "mask": {"mask": MASK},
    "bias, mask, scale": {"bias": BIAS, "mask": MASK, "scale": 0.3},
    "window": {"local_window_size": (2, 1)},
    "window of one number": {"local_window_size": 1, "is_causal": True},
    "lengths": LENGTHS,
    "lengths, bias, mask": {"bias": BIAS, "mask": MASK, **LENGTHS},
    "rows": {"query_seq_lengths": np.int32([0, 5])},
    "residual": {"return_residual": True, "mask": MASK},
}


RESIDUAL = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters


def ours(*arrays, device=None, jit=False, **options):
    """Operands and static options as keywords, under jit or not."""
    call = partial(clattn.jax.dot_product_attention, device=device)
    static = [name for name, value in options.items() if not isinstance(value, np.ndarray)]
    return (jax.jit(call, static_argnames=static) if jit else call)(*arrays, **options)


def close(left, right, name):
    """Both err by a few eps of numbers of a few units."""
    for got, true in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert isinstance(got, jax.Array)
        assert got.dtype == true.dtype
        np.testing.assert_allclose(got, true, rtol=0, atol=4e-6, err_msg=name)


@cache
def theirs(case):
    # Version 0.6.2 ignores a window without another mask, and lengths of queries without those of
    # keys: hand over what changes nothing.
    more = {"mask": np.ones((1, 1, 1, 1), bool), "key_value_seq_lengths": np.int32([S] * B)}
    options = more | CASES[case]
    static = [name for name, value in options.items() if not isinstance(value, np.ndarray)]
    return jax.jit(jax.nn.dot_product_attention, static_argnames=static)(*QKV, **options)


def test_it_is_jaxs_function(device):
    """As it stands, and under jit."""
    for name, options in CASES.items():
        if name == "residual" and not RESIDUAL:  # see test_residuals
            continue
        close(ours(*QKV, device=device, **options), theirs(name), name)
    for name in ("lengths, bias, mask", *(["residual"] if RESIDUAL else [])):
        close(ours(*QKV, device=device, jit=True, **CASES[name]), theirs(name), f"{name}, jit")
    alone = ours(*(array[0] for array in QKV), bias=BIAS[0], device=device)
    assert alone.shape == (L, HQ, E)
    close(alone, theirs("bias")[0], "no batch")


def test_residuals(device):
    """With every version of jax; of rows without keys and beyond the lengths: -inf."""
    options = {"mask": MASK, "return_residual": True, **LENGTHS}
    output, residual = ours(*QKV, device=device, jit=True, **options)
    close(output, ours(*QKV, device=device, mask=MASK, **LENGTHS), "output")
    assert residual.shape == (B, L, HQ)
    q, k, v = (array.swapaxes(1, 2).astype(np.float64) for array in QKV)
    within = MASK & (np.arange(S) < LENGTHS["key_value_seq_lengths"][:, None, None, None])
    _, lse = attention(q, k.repeat(2, 1), v.repeat(2, 1), attn_mask=within)
    right = np.where(
        np.arange(L)[:, None] < LENGTHS["query_seq_lengths"][:, None, None],
        lse.swapaxes(1, 2),
        -np.inf,
    )
    np.testing.assert_allclose(residual, right, rtol=0, atol=4e-6)


def test_options_may_be_arrays(device):
    """As 1 / jnp.sqrt(E) is one. Traced ones are refused."""
    for given, plain in [
        ({"scale": jnp.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.array(0.5)}, {"scale": 0.5}),
        ({"local_window_size": jnp.array([1, 2])}, {"local_window_size": (1, 2)}),
        ({"local_window_size": [1, 2]}, {"local_window_size": (1, 2)}),
        ({"local_window_size": jnp.array(1)}, {"local_window_size": 1}),
        ({"local_window_size": np.int64(1)}, {"local_window_size": 1}),
    ]:
        result = clattn.jax.dot_product_attention(*QKV, device=device, **given)
        assert (result == ours(*QKV, device=device, **plain)).all(), given


def test_dtypes(device):
    """Half types against float64, within 2^-8 and 2^-11 of values of up to four units."""
    q, k, v = (array.swapaxes(1, 2).astype(np.float64) for array in QKV)
    right = attention(q, k.repeat(2, 1), v.repeat(2, 1))[0].swapaxes(1, 2)
    for dtype, atol in ((np.float16, 4 * 2**-11), (bfloat16, 4 * 2**-8)):
        arrays = [jnp.asarray(array, dtype) for array in QKV]
        result = ours(*arrays, bias=jnp.zeros((1, 1, L, S), dtype), mask=MASK | True, device=device)
        assert result.dtype == dtype
        np.testing.assert_allclose(np.asarray(result).astype(np.float64), right, rtol=0, atol=atol)


def test_vmap_is_one_call(device, monkeypatch):
    """Over any of the operands, of any of their dimensions, twice, and under jit."""
    calls = []
    attend = clattn.attention.scaled_dot_product_attention

    def watch(query, *args, **options):
        calls.append(query.shape)
        return attend(query, *args, **options)

    monkeypatch.setattr(clattn.attention, "scaled_dot_product_attention", watch)
    many = [draw((3, *array.shape)) for array in QKV]
    masks = np.stack([MASK, MASK, ~MASK | (np.arange(S) == 0)])
    lengths, keys = np.int32([[3, 5], [5, 5], [1, 2]]), np.int32([[7, 4], [1, 1], [2, 7]])

    def both(function, arrays, axes):
        def call(q, k, v, mask, rows, keys):
            return function(
                q, k, v, mask=mask, is_causal=True,
                query_seq_lengths=rows, key_value_seq_lengths=keys,
            )  # fmt: skip

        return jax.jit(jax.vmap(call, in_axes=axes))(*arrays)

    last = np.moveaxis(many[0], 0, -1)
    for axes, arrays in [
        ((None, 0, None, 0, None, None), (QKV[0], many[1], QKV[2], masks, None, None)),
        ((None, None, None, None, 0, 0), (*QKV, None, lengths, keys)),
        ((4, None, None, None, None, None), (last, *QKV[1:], MASK, None, None)),
    ]:
        right = both(jax.nn.dot_product_attention, arrays, axes)
        calls.clear()
        close(both(partial(ours, device=device), arrays, axes), right, str(axes))
        assert [shape for shape in calls if 0 not in shape] == [(3, B, HQ, L, E)]
    calls.clear()
    inner = jax.vmap(partial(ours, device=device), (0, None, None))
    twice = jax.vmap(inner, (None, 0, 0))(*many)
    assert [shape for shape in calls if 0 not in shape] == [(3, 3, B, HQ, L, E)]
    right = ours(many[0][1], many[1][2], many[2][2], device=device)
    close(twice[2, 1], right, "twice")


def test_rows_without_keys(device):
    """Zeros, and a residual of -inf."""
    mask = np.arange(L)[:, None] != 2
    output, residual = ours(*QKV, mask=mask[None, None], return_residual=True, device=device)
    assert (output[:, 2] == 0).all()
    assert (residual[:, 2] == -np.inf).all()
    assert np.isfinite(residual[:, 3]).all()


def test_lengths_of_one_kind_alone(device):
    """Of keys: others do not matter. Of queries: rows behind are zeros. Gradients are 0 there."""
    query, key = jnp.zeros((3, 2, 1, 1)), jnp.zeros((3, 2, 1, 1))
    value = jnp.tile(jnp.asarray([1.0, 5.0]).reshape(1, 2, 1, 1), (3, 1, 1, 1))
    keys, rows = np.int32([1, 2, 0]), np.int32([0, 1, 2])
    for lengths, right, grads in (
        ({"key_value_seq_lengths": keys}, [[1, 1], [3, 3], [0, 0]], [[2, 0], [1, 1], [0, 0]]),
        ({"query_seq_lengths": rows}, [[0, 0], [3, 0], [3, 3]], [[0, 0], [0.5, 0.5], [1, 1]]),
    ):
        call = partial(clattn.jax.dot_product_attention, query, key, device=device, **lengths)
        assert call(value)[..., 0, 0].tolist() == right
        found = jax.grad(lambda value, call=call: call(value).sum())(value)
        assert found[..., 0, 0].tolist() == grads


def test_large_arrays_under_jit(device):
    """The callback reads arrays that jax's threads have just computed."""
    x = jnp.asarray(draw((1, 2048, 4, 64)))

    def layers(x):
        for _ in range(3):
            x = x + ours(x * 2, x + 1, x, device=device)
        return x

    np.testing.assert_array_equal(jax.jit(layers)(x), layers(x))


def test_the_device_is_that_of_the_trace(device, monkeypatch):
    used = []
    attend = clattn.attention.scaled_dot_product_attention

    def watch(*args, **options):
        used.append(options["device"])
        return attend(*args, **options)

    monkeypatch.setattr(clattn.attention, "scaled_dot_product_attention", watch)
    call = jax.jit(lambda q, k, v: clattn.jax.dot_product_attention(q, k, v))
    with clattn.use_device(device):
        call(*QKV).block_until_ready()
    call(*QKV).block_until_ready()
    assert used == [device] * 3  # a check, and two runs


DIFFERENTIATED = ("plain", "causal", "bias", "bias, mask, scale", "window", "lengths, bias, mask")


@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_gradients(first_device, case):
    """Those of query, key, value and bias, beside jax's own, under jit and without."""
    options = dict(CASES[case])
    bias = options.pop("bias", None)
    aim = draw((B, L, HQ, E), seed=4)

    def loss(attend, q, k, v, bias):
        return (attend(q, k, v, bias, **options) * aim).sum()

    arrays = range(3 if bias is None else 4)
    given = (*QKV, bias)
    mine = partial(loss, partial(clattn.jax.dot_product_attention, device=first_device))
    got = jax.value_and_grad(mine, arrays)(*given)
    right = jax.value_and_grad(partial(loss, jax.nn.dot_product_attention), arrays)(*given)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    for again in (
        jax.jit(jax.value_and_grad(mine, arrays)),
        jax.value_and_grad(jax.jit(mine), arrays),
    ):
        for one, other in zip(jax.tree.leaves(again(*given)), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(one, other)


def test_gradients_of_the_residual(first_device):
    """lse = log sum exp(s), so the gradient of a query is the mean of the keys by their weights."""
    attend = partial(clattn.jax.dot_product_attention, device=first_device, scale=1.0)
    key = jnp.array([[0.0], [1.0]])[None, :, None]

    def loss(query):
        return attend(query, key, key, return_residual=True)[1].sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones((1, 1, 1, 1))).item(), 0.731059, rtol=1e-5)


@pytest.mark.parametrize("shape", [(S,), (L, 1), (1, HQ, 1, S), (B, 1, L, S), ()], ids=str)
def test_gradients_of_a_bias_that_broadcasts(first_device, shape):
    bias = draw(shape, seed=5)

    def loss(attend, bias):
        return (attend(*QKV, jnp.broadcast_to(bias, (1, 1, *bias.shape)[-4:])) ** 2).sum()

    got, right = (
        jax.grad(partial(loss, attend))(jnp.asarray(bias))
        for attend in (
            partial(clattn.jax.dot_product_attention, device=first_device),
            jax.nn.dot_product_attention,
        )
    )
    assert got.shape == shape
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def test_vmap_of_gradients(first_device):
    """Each entry has gradients of its own, also of what vmap does not go over."""
    attend = partial(clattn.jax.dot_product_attention, device=first_device)
    queries = jnp.stack([QKV[0], QKV[0] + 1, QKV[0] - 1])
    biases = draw((3, 1, 1, L, S), seed=6)

    def loss(q, k, bias):
        return (attend(q, k, QKV[2], bias) ** 2).sum()

    got = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, 0))(queries, QKV[1], biases)
    assert [array.shape for array in got] == [queries.shape, (3, *QKV[1].shape), biases.shape]
    for n in range(3):
        alone = jax.grad(loss, (0, 1, 2))(queries[n], QKV[1], biases[n])
        for one, other in zip(got, alone, strict=True):
            np.testing.assert_allclose(one[n], other, rtol=1e-5, atol=1e-5)


def test_transformations_between(first_device):
    """Layers of a loop, each computed anew; vmap over what is differentiated alone."""
    ours = partial(clattn.jax.dot_product_attention, device=first_device, is_causal=True)
    _, key, value = (jnp.asarray(array) for array in QKV)

    def layers(attend, query):
        @jax.checkpoint
        def layer(x, _):
            return x + attend(x, key, value, **LENGTHS), None

        return jax.lax.scan(layer, query, None, length=3)[0].sum()

    def jacobian(attend, query):
        return jax.jacrev(lambda x: attend(x, key[:1, :2], value[:1, :2]))(query[:1, :2])

    def of_queries(attend, query):
        mapped = jax.vmap(jax.jit(attend), (0, None, None))
        return jax.grad(lambda x: (mapped(jnp.stack([x, -x]), key, value) ** 2).sum())(query)

    theirs = partial(jax.nn.dot_product_attention, is_causal=True)
    for transformed in (jax.grad(layers, 1), jacobian, of_queries):
        right = partial(transformed, theirs)(QKV[0])
        for wrap in (lambda function: function, jax.jit):
            got = wrap(partial(transformed, ours))(QKV[0])
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=3e-5)


def test_other_derivatives_are_refused():
    def loss(q):
        return clattn.jax.dot_product_attention(q, *QKV[1:]).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(loss)(QKV[0])
    with pytest.raises(ValueError, match=r"[Pp]ure callbacks do not support"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(QKV[0])


def test_what_is_refused():
    q, k, v = QKV
    for wrong, error, words in [
        ({"implementation": "xla"}, ValueError, "implementation is 'xla'"),
        ({"local_window_size": (2, -1)}, ValueError, "local_window_size is .* 0 or more"),
        ({"scale": np.nan}, ValueError, "scale"),
        ({"scale": np.ones(2)}, TypeError, "scale"),
        ({"scale": "1"}, TypeError, "scale"),
        ({"is_causal": "lower_right"}, TypeError, "is_causal must be True or False, got str"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False, got int"),
        ({"return_residual": 1}, TypeError, "return_residual must be True or False, got int"),
        *(
            ({"local_window_size": size}, TypeError, "local_window_size is .* expected an integer")
            for size in [(None, 1), (1,), (1, 2, 3), 1.5, "ab", [[1], [2, 3]], [[1, 2]], True]
        ),
        ({"key": k[:, :, :1], "value": v}, ValueError, "value"),
        ({"mask": BIAS}, ValueError, "mask dtype"),
        ({"bias": MASK}, TypeError, "bias is an array of bool"),
        ({"bias": BIAS.astype(complex)}, TypeError, "bias is an array of complex64"),
        ({"bias": BIAS[:, [0, 0, 0]]}, ValueError, r"heads do not fit.*bias \(2, 3, 5, 7\)"),
        ({"key": k[:, :1], "value": v[:, :1], "mask": MASK}, ValueError, r"mask .* \(2, 4, 5, 1\)"),
        ({"key": k[:, :, :0], "value": v[:, :, :0]}, ValueError, "heads do not fit"),
        ({"query": 2**31}, ValueError, "2147483648"),
        ({"query_seq_lengths": 2**31}, ValueError, "query_seq_lengths.*2147483648"),
        ({"query": np.broadcast_to(np.float32(1), (2**40, 5))}, MemoryError, "memory"),
        ({"key_value_seq_lengths": np.int32([1])}, ValueError, "key_value_seq_lengths"),
        (dict.fromkeys(("query", "key", "value"), np.ones((1, 2, 3, 4), int)), TypeError, "query"),
        ({"device": "no such device"}, ValueError, "no such device"),
    ]:
        arrays = {"query": q, "key": k, "value": v} | wrong
        with pytest.raises(error, match=words):
            clattn.jax.dot_product_attention(**arrays)


def test_traced_options_are_refused():
    for name, value in (("scale", 0.5), ("local_window_size", 1), ("is_causal", True)):
        call = jax.jit(lambda x, name=name: clattn.jax.dot_product_attention(*QKV, **{name: x}))
        with pytest.raises(TypeError, match=f"^{name} "):
            call(value)


def test_functions_of_numpy_name_the_one_for_traced_arrays():
    x = jnp.ones((3, 4))
    for transform in (jax.jit, jax.grad):
        with pytest.raises(ValueError, match=r"query \(.*Tracer\) .*; clattn\.jax\.dot_product"):
            transform(lambda query: clattn.scaled_dot_product_attention(query, x, x).sum())(x)


def test_other_versions_of_jax():
    """One whose function lacks return_residual, as those before 0.8 do; one that is too old."""
    code = """
        import jax, pytest, sys
        theirs = jax.nn.dot_product_attention

        def older(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
                  query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
                  implementation=None):
            return theirs(query, key, value, bias, mask, query_seq_lengths=query_seq_lengths,
                          key_value_seq_lengths=key_value_seq_lengths)

        jax.nn.dot_product_attention = older
        import clattn.jax
        x = jax.numpy.ones((1, 2, 1, 4))
        output, residual = clattn.jax.dot_product_attention(x, x, x, return_residual=True)
        assert (output.shape, residual.shape) == ((1, 2, 1, 4), (1, 2, 1))

        del sys.modules["clattn.jax"]
        jax.__version_info__ = (0, 5, 3)
        with pytest.raises(ImportError, match="jax 0.6 or later"):
            import clattn.jax
    """
    run_python(code)


def test_without_jax():
    code = r"""
        import sys, pytest
        import clattn
        assert "jax" not in sys.modules
        sys.modules["jax"] = None
        with pytest.raises(ImportError, match='pip install "jax>=0.6"'):
            import clattn.jax
    """
    run_python(code)


def test_one_thread_of_jax():
    """The callback sees NumPy's arrays alone: JAX's would wait for the thread that runs it."""
    code = """
        import os
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        )
        import clattn, jax, numpy as np
        q = np.ones((1, 500, 8, 64), np.float32)
        loss = lambda q: (clattn.jax.dot_product_attention(q, q, q) ** 2).sum()
        gradients = jax.jit(jax.value_and_grad(loss))
        for _ in range(100):
            gradients(q)[0].block_until_ready()
    """
    run_python(code)
