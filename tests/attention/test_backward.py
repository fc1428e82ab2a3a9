# SPDX-License-Identifier: MIT
"""The gradients of scaled_dot_product_attention, against float64 NumPy."""

import functools

import clattn
import numpy as np
import pytest
from references import attention, dropout
from references.attention import DTYPES, compute_dtype, float16, float32, float64
from references.gradients import NAMES, backward_in
from support.data import draw, qkv, sdpa
from support.gradients import FASTEST, MMA, REFERENCE, TILED, backward, check_backward, grads
from support.layouts import negative_rows, sliced
from support.loops import looped
from support.variants import force

INF, NAN = np.inf, np.nan

pytestmark = pytest.mark.usefixtures("kernel")


@pytest.fixture(params=[FASTEST, REFERENCE, TILED])
def kernel(request):
    """The kernel that is forced. Those that are slow on CPUs run on one of them."""
    if "device" not in request.fixturenames:
        return None
    force(request.getfixturevalue("monkeypatch"), request.param)
    return request.param


# For tests that ask `dtype_of` for a dtype.
with_mma = pytest.mark.parametrize("kernel", [FASTEST, REFERENCE, TILED, MMA], indirect=True)


def dtype_of(kernel):
    """The dtype of most calls: a half type where the kernel takes no other."""
    return float16 if kernel == "mma" else float32


# For tests that tell little of a kernel's products, and would build many programs of tiled.
without_tiled = pytest.mark.parametrize("kernel", [FASTEST, REFERENCE], indirect=True)


def assert_same(got, right):
    """The same bits of the gradients of query, key and value."""
    for one, other in zip(got[:3], right[:3], strict=True):
        np.testing.assert_array_equal(one, other)


# --- the oracle itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"softcap": 1.5},
        {"window": (2, 1), "is_causal": "lower_right"},
        {"dropout_p": 0.4, "seed": 3},
    ],
)
def test_the_oracle_is_the_slope_of_the_forward_pass(options):
    """Central differences of sum(G O) + sum(g lse), in long double."""
    wide = np.dtype(np.longdouble)
    q, k, v = (a.astype(float64) for a in qkv((2, 2), L=4, S=5, E=3, Ev=2, dtype=float64))
    mask, sinks = draw((2, 1, 5), float64, 1), draw((2,), float64, 2)
    G, g = draw((2, 2, 4, 2), float64, 3), draw((2, 2, 4), float64, 4)
    exact = backward_in(wide, G, q, k, v, grad_lse=g, attn_mask=mask, sinks=sinks, **options)
    operands = {"query": q, "key": k, "value": v, "attn_mask": mask, "sinks": sinks}

    def loss(**changed):
        given = operands | changed
        arrays = [given.pop(n) for n in ("query", "key", "value")]
        if "dropout_p" in options:
            output, steps, _ = dropout.steps_in(wide, *arrays, **given, **options)
        else:
            steps = attention.steps_in(wide, *arrays, **given, **options)
            output = steps.result
        lse = steps.lse
        return (G * output).sum() + (np.where(np.isfinite(lse), lse, 0) * g).sum()

    step = wide.type(1e-6)
    for name, gradient in exact.gradients._asdict().items():
        for index in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = operands[name].astype(wide)
                moved[index] += sign * step
                ends.append(loss(**{name: moved}))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(slope - gradient[index]) < 1e-9, (name, index)


# --- options ---------------------------------------------------------------------------

SHAPES = {
    "one": dict(lead=(1, 1), L=1, S=1, E=1),
    "odd": dict(lead=(2, 3), L=17, S=33, E=7, Ev=5),
    "blocks": dict(lead=(1, 2), L=131, S=129, E=65, Ev=130),
    "blocks of keys": dict(lead=(2, 2), L=71, S=433, E=24, Ev=40),
    "parts of a head": dict(lead=(1, 1), L=40, S=401, E=64),
    "wide": dict(lead=(1, 3), L=35, S=250, E=256),
    "wider": dict(lead=(1, 1), L=3, S=5, E=257, Ev=3),
}


@pytest.mark.by_turns
@without_tiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(device, dtype, shape):
    arrays = qkv(**SHAPES[shape], dtype=dtype)
    G = grads(*arrays)
    check_backward(G, *arrays, device=device)
    wide = compute_dtype(dtype)
    check_backward(G, *arrays, device=device, is_causal=True,
                   grad_lse=draw(G.shape[:-1], wide, 9))  # fmt: skip


@with_mma
def test_lengths_about_those_of_tiles(device, kernel):
    for L in (1, 15, 17, 65, 129):
        for S in (1, 15, 17, 65, 129):
            q, k, v = qkv((1, 1), L=L, S=S, E=3, Ev=5, dtype=dtype_of(kernel))
            check_backward(grads(q, k, v), q, k, v, device=device, is_causal="lower_right")
            if L == 129:
                check_backward(grads(q, k, v), q, k, v, device=device, window=(9, 5))


OPTIONS = {
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window": (3, 2)},
    "window of one": {"is_causal": True, "window": (0, 0)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.3},
    "offset": {"is_causal": True, "query_offset": 9},
    "no keys first": {"is_causal": True, "query_offset": -5},
    "offsets": {"is_causal": True, "query_offset": [4, -3]},
    "dropout": {"dropout_p": 0.3, "seed": 11},
    "all": {"is_causal": True, "window": (9, 9), "softcap": 3.0, "dropout_p": 0.5, "seed": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(device, options, kernel):
    q, k, v = qkv((2, 4), L=19, S=35, E=16, Ev=12)
    G, g = grads(q, k, v), draw((2, 4, 19), float32, 8)
    sinks = draw((4,), float32, 4)
    masks = [draw((1, 1, 19, 35), seed=2), draw((2, 1, 1, 35), seed=3) > -1, None]
    for mask in masks if kernel != "tiled" or options == OPTIONS["causal"] else masks[:1]:
        given = options | {"sinks": sinks, "grad_lse": g}
        check_backward(G, q, k, v, device=device, attn_mask=mask, **given)
    if kernel != "tiled" or options == OPTIONS["softcap"]:  # each is three programs of tiled
        check_backward(G, q, k, v, device=device, **options)


@without_tiled
@pytest.mark.parametrize(
    "shape", [(), (1,), (35,), (19, 1), (19, 35), (4, 1, 35), (2, 1, 19, 35), (2, 4, 1, 1)], ids=str
)
@pytest.mark.by_turns
def test_masks_that_broadcast(device, shape):
    q, k, v = qkv((2, 4), L=19, S=35, E=8)
    for dtype in DTYPES:
        check_backward(grads(q, k, v), q, k, v, device=device, attn_mask=draw(shape, dtype, 6))


@without_tiled
def test_a_mask_of_any_strides(device):
    q, k, v = qkv((1, 1), L=5, S=5, E=4)
    wide = draw((1, 1, 5, 8))
    for mask in (
        wide[..., 1:6],
        wide[..., 5:0:-1],
        wide[..., ::-1, :5],
        wide[..., :5].swapaxes(2, 3),
    ):
        check_backward(grads(q, k, v), q, k, v, device=device, attn_mask=mask)


@with_mma
def test_grouped_heads(device, kernel):
    for E, Ev, options in (
        (2, 5, {}),
        (5, 2, {}),
        (2, 5, {"is_causal": True, "softcap": 1.0, "sinks": draw((6,))}),
    ):
        shapes = (2, 6, 9, E), (2, 2, 12, E), (2, 2, 12, Ev), (2, 6, 9, Ev)
        q, k, v, G = (draw(s, dtype_of(kernel), n) for n, s in enumerate(shapes))
        check_backward(G, q, k, v, device=device, enable_gqa=True, **options)


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 5, 3), (1, 6, 3), (1, 6, 2)],
        [(2, 1, 5, 3), (1, 4, 6, 3), (6, 2)],
        [(2, 2, 1, 2, 4, 3), (2, 1, 3, 1, 5, 3), (1, 2, 3, 2, 5, 2)],
        [(3, 1, 2, 1, 2, 4, 3), (1, 2, 1, 2, 1, 5, 3), (5, 2)],
    ],
    ids=str,
)
@pytest.mark.by_turns
def test_operands_that_broadcast(device, shapes, kernel):
    """Gradients are summed over what broadcasts. Many dimensions take several launches."""
    for dtype in (float32,) if kernel == "tiled" else (float32, float64):
        q, k, v = (draw(shape, dtype, n) for n, shape in enumerate(shapes))
        mask = draw((*[1] * (q.ndim - 2), 1, k.shape[-2]), dtype, 5)
        check_backward(grads(q, k, v), q, k, v, device=device, attn_mask=mask)
        check_backward(grads(q, k, v), q, k, v, device=device, dropout_p=0.3, seed=1)


@without_tiled
def test_layout(device):
    q, k, v = qkv((2, 4), L=9, S=12, E=8, Ev=6)
    G = grads(q, k, v)
    rows_first = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in (q, k, v)]
    right, _ = backward(G, q, k, v, device=device, is_causal=True)
    output, lse = sdpa(*rows_first, device=device, is_causal=True, return_lse=True, layout="BLHE")
    got = clattn.scaled_dot_product_attention_backward(
        G.swapaxes(1, 2), *rows_first, output, lse, is_causal=True, layout="BLHE", device=device
    )
    assert all(one.flags.c_contiguous for one in got[:3])
    assert_same([one.swapaxes(1, 2) for one in got[:3]], right)


def test_strides(device):
    """Zero, negative and sliced ones give the bits of the contiguous call."""
    q, k, v = qkv((2, 2), L=9, S=12, E=8)
    G = np.broadcast_to(np.float32(0.5), (2, 2, 9, 8))
    g = np.broadcast_to(np.float32(-1.0), (2, 2, 9))
    right, output = backward(G.copy(), q, k, v, device=device, grad_lse=g.copy())
    _, lse = sdpa(q, k, v, device=device, return_lse=True)
    for lay in (
        lambda a: a,
        sliced,
        negative_rows,
        lambda a: a.swapaxes(1, 2).copy().swapaxes(1, 2),
    ):
        arrays = [lay(a) for a in (q, k, v, output)]
        spread = lay(np.ascontiguousarray(lse[..., None]))[..., 0]
        got = clattn.scaled_dot_product_attention_backward(
            G, *arrays, spread, grad_lse=g, device=device
        )
        assert_same(got, right)


def test_rows_that_lie_far_apart(device, tmp_path):
    """Beyond 2^31 elements: as a layer's part of a wide concatenation."""
    q, k, v = qkv((1, 1), L=6, S=5, E=8)
    G, step = grads(q, k, v), 1 << 29
    wide = np.memmap(tmp_path / "sparse", float32, "w+", shape=(5 * step + 8,))
    far = np.lib.stride_tricks.as_strided(np.asarray(wide), G.shape, (0, 0, 4 * step, 4))
    far[...] = G
    output, lse = sdpa(q, k, v, device=device, return_lse=True)
    options = {"output": output, "lse": lse, "device": device}
    right = clattn.scaled_dot_product_attention_backward(G, q, k, v, **options)
    try:
        got, refused = clattn.scaled_dot_product_attention_backward(far, q, k, v, **options), ""
    except MemoryError as error:
        got, refused = right, str(error)
    assert not refused or "allocates at once" in refused
    assert_same(got, right)


@without_tiled
def test_needs(device):
    """Any subset, one alone included, has the bits of all."""
    q, k, v = qkv((1, 2), L=5, S=6, E=4)
    options = {"attn_mask": draw((5, 6)), "sinks": draw((2,))}
    G = grads(q, k, v)
    every, _ = backward(G, q, k, v, device=device, **options)
    for name in NAMES:
        got, _ = backward(G, q, k, v, device=device, needs=[name], **options)
        for own, one, other in zip(NAMES, got, every, strict=True):
            if own == name:
                np.testing.assert_array_equal(one, other)
            else:
                assert one is None
    nothing, _ = backward(G, q, k, v, device=device, needs=())
    assert nothing == clattn.AttentionGradients()


@pytest.mark.parametrize(("needs", "S"), [((), 6), (["key"], 0), (["value"], 6)])
def test_what_the_forward_pass_gave_stays(device, needs, S):
    """Whatever is asked for: `output` is not written to."""
    q, k, v = qkv((1, 2), L=5, S=S, E=4)
    output, lse = np.ones((1, 2, 5, 4), np.float32), np.ones((1, 2, 5), np.float32)
    clattn.scaled_dot_product_attention_backward(
        output, q, k, v, output, lse, needs=needs, device=device
    )
    assert (output == 1).all() and (lse == 1).all()


@without_tiled
@pytest.mark.parametrize(
    ("L", "S", "E", "Ev"), [(0, 3, 2, 2), (3, 0, 2, 2), (3, 4, 0, 2), (3, 4, 2, 0)]
)
def test_empty(device, L, S, E, Ev):
    """Gradients that nothing adds to are zeros, also those of a mask that broadcasts."""
    q, k, v = qkv((2, 2), L=L, S=S, E=E, Ev=Ev)
    options = {"sinks": draw((2,)), "grad_lse": draw((2, 2, L), seed=3)}
    for shape in ((1, 1), (2, 1, 1, S), (L, 1)):
        mask = draw(shape)
        check_backward(grads(q, k, v), q, k, v, device=device, attn_mask=mask, **options)
    tensors = [clattn.tensor(a, device=device) for a in (grads(q, k, v), q, k, v, draw((1, 1)))]
    got, _ = backward(*tensors[:4], device=device, attn_mask=tensors[4], needs=["attn_mask"])
    assert got.attn_mask.numpy().item() == 0 or min(L, S) > 0


@without_tiled
def test_an_empty_batch(device):
    """What broadcasts over a batch without entries has a gradient of zeros."""
    q, k, v = draw((0, 2, 3, 4)), draw((1, 2, 5, 4)), draw((2, 5, 4))
    got, _ = backward(draw((0, 2, 3, 4)), q, k, v, device=device)
    assert got.query.size == 0
    assert not got.key.any()
    assert not got.value.any()


@without_tiled
def test_out(device):
    q, k, v = qkv((2, 2), L=9, S=12, E=8)
    G = grads(q, k, v)
    right, output = backward(G, q, k, v, device=device)
    _, lse = sdpa(q, k, v, device=device, return_lse=True)
    out = clattn.AttentionGradients(
        np.full_like(q, NAN), np.full(k.shape[::-1], NAN, float32).T, None
    )
    got = clattn.scaled_dot_product_attention_backward(
        G, q, k, v, output, lse, out=out, device=device
    )
    assert got.query is out.query
    assert got.key is out.key
    assert_same(got, right)
    on_device = functools.partial(clattn.tensor, device=device)
    for of_inputs, of_out in ((np.array, on_device), (on_device, np.array)):
        arrays, made = map(of_inputs, (G, q, k, v, output, lse)), of_out(k)
        got = clattn.scaled_dot_product_attention_backward(
            *arrays, out=(None, made, None, None, None), device=device
        )
        assert got.key is made
        assert_same([np.array(one) for one in got[:3]], right)


@without_tiled
def test_tensors(device):
    """Tensors in, Tensors out, with the bits of arrays."""
    q, k, v = qkv((2, 2), L=9, S=12, E=8)
    G = grads(q, k, v)
    options = {"attn_mask": draw((9, 12)), "sinks": draw((2,))}
    right, _ = backward(G, q, k, v, device=device, **options)
    tensors = [clattn.tensor(a, device=device) for a in (G, q, k, v)]
    mask = clattn.tensor(options["attn_mask"], device=device)
    got, _ = backward(*tensors, device=device, attn_mask=mask, sinks=options["sinks"],
                      needs=NAMES)  # fmt: skip
    for one, other in zip(got[:4], right[:4], strict=True):
        assert isinstance(one, clattn.Tensor)
        np.testing.assert_array_equal(one.numpy(), other)
    np.testing.assert_array_equal(got.sinks, right.sinks)


@without_tiled
def test_sinks_of_more_dimensions(device):
    """Their gradient has their shape, and the bits of that of (Hq,)."""
    q, k, v = qkv((2, 3), L=4, S=5, E=8)
    G, sinks = grads(q, k, v), draw((3,))
    right = check_backward(G, q, k, v, device=device, sinks=sinks).sinks
    for shape in ((1, 3), (3, 1), (1, 3, 1, 1)):
        got = backward(G, q, k, v, device=device, sinks=sinks.reshape(shape))[0].sinks
        np.testing.assert_array_equal(got, right.reshape(shape))


# --- numbers that go wrong elsewhere -----------------------------------------------------


def one_head(q, k, v, G, *, device, g=None, dtype=float32, **options):
    """One head with E = Ev = 1 and scale 1."""
    q, k, v, G = (np.array(a, dtype).reshape(1, -1, 1) for a in (q, k, v, G))
    g = None if g is None else np.array(g, compute_dtype(dtype)).reshape(1, -1)
    got, output = backward(G, q, k, v, device=device, grad_lse=g, scale=1.0, **options)
    return [None if a is None else a.astype(float64).ravel() for a in got], output


def close(got, right):
    np.testing.assert_allclose(got, right, rtol=2e-6, atol=2e-6)


def test_a_mask_alone(device):
    got, _ = one_head(
        [1], [0, np.log(3)], [0, 4], [1], device=device, attn_mask=np.zeros((1, 2), float32),
        needs=["attn_mask"],
    )  # fmt: skip
    close(got[3], [-0.75, 0.75])
    assert got[0] is got[1] is got[2] is None


def test_a_mask_of_two_equal_entries(device):
    """Its gradient is the sum of theirs."""
    q, k, v = (np.array([a, a], float32).reshape(2, 1, -1, 1)
               for a in ([1], [0, np.log(3)], [0, 4]))  # fmt: skip
    got, _ = backward(np.ones_like(q), q, k, v, device=device, scale=1.0,
                      attn_mask=np.zeros((1, 1, 1, 2), float32), needs=["attn_mask"])  # fmt: skip
    assert got.attn_mask.shape == (1, 1, 1, 2)
    close(got.attn_mask.ravel(), [-1.5, 1.5])


def test_a_sink(device):
    for g, d_query, d_sink in (([1], 1.124282, -0.124282), (None, 0.393224, -0.393224)):
        got, output = one_head([1], [1], [2], [1], device=device, g=g, sinks=np.zeros(1, float32))
        close(output.ravel(), [1.462117])
        close(np.concatenate([got[0], got[1], got[4]]), [d_query, d_query, d_sink])


def test_a_sink_of_a_row_without_a_key(device):
    for keys, mask in (([], None), ([3], np.array([False]))):
        got, output = one_head([1], keys, keys, [NAN], device=device, g=[1], attn_mask=mask,
                               sinks=np.array([0.5], float32))  # fmt: skip
        assert not output.any()
        close(got[4], [1])
        close(got[0], [0])
        assert not np.concatenate(got[1:3]).any()


def test_the_gradient_of_the_lse_alone(device):
    got, _ = one_head([1], [0, 1], [5, 7], [0], device=device, g=[1])
    close(got[0], [0.731059])
    close(got[1], [0.268941, 0.731059])
    assert not got[2].any()


def test_one_key(device):
    """Its weight is 1, whatever the score is: no gradient reaches query and key."""
    got, _ = one_head([-2.5], [3], [7], [1], device=device)
    assert not np.concatenate(got[:2]).any()
    close(got[2], [1])


@looped("low", [np.finfo(float32).min, -1e9, -1e6, -1e4])
def test_weights_of_huge_scores_sum_to_one(device, low):
    mask = np.full((1, 2), low, float32)
    got, _ = one_head([1], [0, 0], [0, 4], [3], device=device, attn_mask=mask)
    close(got[2], [1.5, 1.5])
    close(got[3], [-3, 3])
    got, _ = one_head([1], [0, 0], [0, 4], [3], device=device, attn_mask=mask,
                      sinks=np.array([low], float32))  # fmt: skip
    close(got[2], [1, 1])
    close(got[3], [-4 / 3, 8 / 3])


@with_mma
def test_large_scores_of_many_keys(device, kernel):
    """A float has no room for the logarithm of the sum of their weights."""
    q, k, v = qkv((1, 2), L=40, S=433, E=16, dtype=dtype_of(kernel))
    q += 30
    k = k / 10 + 30
    for options in ({}, {"is_causal": True, "sinks": draw((2,))}):
        check_backward(grads(q, k, v), q, k, v, device=device, **options)


def test_large_scores(device):
    got, output = one_head([1], [-60000], [3], [2], device=device)
    assert output.ravel().tolist() == [3]
    assert [a.tolist() for a in got[:3]] == [[0], [0], [2]]


@pytest.mark.parametrize("options", [
    {"attn_mask": np.array([True, False])}, {"attn_mask": np.array([0, -INF], float32)},
    {"is_causal": True}, {"window": (0, 0)},
], ids=["bool", "float", "causal", "window"])  # fmt: skip
def test_excluded_keys_may_hold_anything(device, options):
    for spoilt in (NAN, INF, -INF):
        got, _ = one_head([1], [2, spoilt], [3, spoilt], [5], device=device, **options)
        assert [a.tolist() for a in got[:3]] == [[0], [0, 0], [5, 0]]


def test_blocks_of_keys_that_hold_nan(device):
    """Each row excludes some keys of its blocks. What they hold changes nothing."""
    q, k, v = qkv((2, 2), L=70, S=433, E=16)
    mask = draw((70, 433)) > -0.5
    mask[:, 50:150] = mask[:, 300:310] = mask[40:, 400:] = False
    options = {"attn_mask": mask, "device": device, "grad_lse": draw((2, 2, 70), seed=2)}
    right, _ = backward(grads(q, k, v), q, k, v, **options)
    k[..., 50:150, :], v[..., 300:310, :] = NAN, INF
    got, _ = backward(grads(q, k, v), q, k, v, **options)
    for one, other in zip(got[:3], right[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert not got.key[..., 50:150, :].any()
    assert not got.value[..., 300:310, :].any()


ROW_3_EXCLUDED = np.tri(6, 9) * [[1], [1], [1], [0], [1], [1]] > 0


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"is_causal": True, "query_offset": -2}, [0, 1]), ({"attn_mask": ROW_3_EXCLUDED}, [3])],
    ids=["causal", "mask"],
)
def test_rows_without_a_key_add_nothing(device, options, rows):
    """Whatever their query and the gradient of their output are."""
    q, k, v = qkv((1, 2), L=6, S=9, E=4)
    G, g = grads(q, k, v), draw((1, 2, 6), seed=4)
    right, _ = backward(G, q, k, v, grad_lse=g, device=device, **options)
    for array in (G, q, g):
        array[:, :, rows] = NAN
    got, _ = backward(G, q, k, v, grad_lse=g, device=device, **options)
    assert_same(got, right)


def test_attended_nans_stay_visible(device):
    q, k, v = qkv((1, 1), L=5, S=5, E=4)
    q[0, 0, 3, 0] = NAN
    got, _ = backward(grads(q, k, v), q, k, v, device=device, is_causal=True)
    assert np.isnan(got.query[0, 0, 3]).all()
    assert np.isfinite(np.delete(got.query, 3, axis=2)).all()
    assert np.isnan(got.key[0, 0, :4]).all()
    assert np.isfinite(got.key[0, 0, 4]).all()


def test_softcaps_of_one_process(device):
    for cap, slopes in ((1.0, [-0.199856, 0.014120]), (2.0, None)):
        mask = np.zeros((1, 2), float32)
        got, _ = one_head([1], [0, 2], [0, 1], [1], device=device, softcap=cap, attn_mask=mask)
        s = cap * np.tanh(np.array([0, 2]) / cap)
        p = np.exp(s) / np.exp(s).sum()
        at_scores = p * (np.array([0, 1]) - p[1])
        at_products = at_scores * (1 - np.tanh(np.array([0, 2]) / cap) ** 2)
        close(got[3], at_scores)
        close(got[1], at_products)
        close(got[0], [(at_products * [0, 2]).sum()])
        if slopes:
            close(got[1], slopes)


def test_dropping_everything(device):
    got, output = one_head([1, 2], [0, 2], [3, 1], [1, 1], device=device, dropout_p=1.0, seed=1,
                           sinks=np.zeros(1, float32))  # fmt: skip
    assert not output.any()
    assert not np.concatenate([got[n] for n in (0, 1, 2, 4)]).any()


@with_mma
def test_the_same_bits(device, kernel):
    q, k, v = qkv((2, 4), L=65, S=130, E=32, dtype=dtype_of(kernel))
    mask = draw((130,))
    first, _ = backward(grads(q, k, v), q, k, v, device=device, attn_mask=mask)
    for _ in range(2 if kernel in ("tiled", "mma") else 10):
        again, _ = backward(grads(q, k, v), q, k, v, device=device, attn_mask=mask)
        assert_same(again, first)
        np.testing.assert_array_equal(again.attn_mask, first.attn_mask)


@without_tiled
def test_entries_of_a_batch_do_not_mix(device):
    q, k, v = qkv((2, 16), L=20, S=20, E=256)
    k, v = k[:, :2], v[:, :2]
    options = {"enable_gqa": True, "is_causal": True, "device": device}
    G = draw((2, 16, 20, 256))
    both, _ = backward(G, q, k, v, **options)
    for b in range(2):
        alone, _ = backward(*(a[b : b + 1] for a in (G, q, k, v)), **options)
        assert_same([one[b : b + 1] for one in both[:3]], alone)
