# SPDX-License-Identifier: MIT
"""Gradients of flex_attention: of query, key, value and sinks, and of what a score_mod captures."""

import threading

import clattn
import numpy as np
import pytest
from clattn import flex_attention, flex_attention_backward, lookup
from references.attention import bfloat16, float32, float64
from references.flex_gradients import flex_gradients
from support.checks import assert_close
from support.data import draw, qkv
from support.flex_gradients import assert_gradient, backward, check_gradients
from support.gradients import FASTEST, TILED
from support.mods import GALLERY
from support.variants import force

where = np.where


@pytest.fixture(params=[FASTEST, TILED])
def kernel(request, monkeypatch):
    """The kernel that is forced."""
    force(monkeypatch, request.param)


def needs_float64(device):
    if not device.float64:
        pytest.skip("the device has no float64")


# ---- the mods that the tests of the forward pass have ----


@pytest.mark.by_turns
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["t5, documents", "alibi, causal"])
def test_gallery(device, name):
    """129 rows and keys are no multiple of a block."""
    score_mod, mask_mod = GALLERY[name]
    got = check_gradients(
        qkv((1, 2), 129, 129), lambda: score_mod, mask_mod=mask_mod, device=device
    )
    assert all(np.isfinite(g).all() for g in got[:3])


@pytest.mark.by_turns
@pytest.mark.usefixtures("kernel")
def test_blocks_and_options(device):
    """A block mask for more rows, grouped heads, offsets, a softcap and sinks, all at once."""
    score_mod, mask_mod = GALLERY["excluding, window"]
    q, k, v = qkv((2, 4), 19, 47, dtype=np.float16)
    k, v = k[:, :2], v[:, :2]
    block_mask = clattn.create_block_mask(mask_mod, None, None, 64, 64, device, 16)
    check_gradients(
        (q, k, v), lambda: score_mod, block_mask=block_mask, enable_gqa=True, softcap=1.5,
        sinks=draw((4,)), query_offset=[3, 30], device=device)  # fmt: skip


def test_without_mods(device):
    """As scaled_dot_product_attention, with the forward pass of the device."""
    arrays, sinks = qkv((2, 3), 5, 7), draw((3,))
    check_gradients(arrays, sinks=sinks, softcap=2.0, device=device)
    output, lse = flex_attention(*arrays, sinks=sinks, return_lse=True, device=device)
    got = flex_attention_backward(output, *arrays, output, lse, sinks=sinks, needs=["key"],
                                  device=device)  # fmt: skip
    assert_gradient(got.key, flex_gradients(output, *arrays, output, sinks=sinks).key, "key")


# ---- captured arrays ----


def each_index(slopes, distances, whole, keys, number):
    """A mod that reads arrays at indexes of each kind."""

    def mod(score, b, h, q_idx, kv_idx):
        near = score * lookup(slopes, h) + np.tanh(lookup(distances, q_idx - kv_idx))
        far = score - lookup(whole, h, q_idx, kv_idx) * lookup(keys, b, -1 - kv_idx)
        return where((q_idx + kv_idx) % 3 > 0, near, far) * number

    return mod


def captured_of(H, L, S, dtype, number=float32):
    return (draw((H,), dtype, 3), draw((L + S - 1,), float32, 4),
            draw((H, L, S), dtype, 5)[:, ::-1], draw((2, S), np.float16, 6),
            np.array(1.25, number))  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.parametrize("dtype", [float64, float32, bfloat16])
def test_captured(device, dtype):
    """Of an index that is h, q_idx - kv_idx, (h, q_idx, kv_idx), from the end; and of a number."""
    if dtype == float64:
        needs_float64(device)
    H, L, S = 2, 5, 6
    captured = captured_of(H, L, S, float64 if dtype == float64 else float32)
    check_gradients(
        qkv((2, H), L, S, dtype=dtype), each_index, captured, softcap=3.0, device=device
    )


@pytest.mark.by_turns
def test_shares_of_rows(device):
    """Of large tables there are few copies: rows that read other elements share one."""
    H, L, S = 3, 150, 70  # 31,500 elements
    captured = captured_of(H, L, S, float32)
    arrays = qkv((2, H), L, S)
    grad_output = draw(arrays[0].shape, seed=9)
    output, got = backward(arrays, grad_output, score_mod=each_index(*captured), captured=captured,
                           device=device)  # fmt: skip
    right, allowed = flex_gradients(
        grad_output, *arrays, output, mod_of=lambda: each_index(*captured)).scores  # fmt: skip
    q_idx, kv_idx = np.ogrid[:L, :S]
    factor = captured[3][:, None, None, ::-1].astype(float64) * -1.25
    factor = factor * ((q_idx + kv_idx) % 3 == 0)
    assert_close(got.captured[2], (right * factor).sum(0), (allowed * abs(factor)).sum(0) + 1e-30)
    by_slope = arrays[0] @ arrays[1].swapaxes(2, 3) / 8**0.5 * 1.25 * ((q_idx + kv_idx) % 3 > 0)
    assert_close(got.captured[0], (right * by_slope).sum((0, 2, 3)),
                 (allowed * (1 + abs(by_slope))).sum((0, 2, 3)))  # fmt: skip
    # the same table, read beside its own place too: rows have elements in common
    table = captured[2]

    def shifted(score, b, h, q_idx, kv_idx):
        return score + lookup(table, h, q_idx, kv_idx) + lookup(table, h, q_idx - 1, kv_idx)

    output, got = backward(arrays, grad_output, score_mod=shifted, captured=(table,), device=device)
    right, allowed = flex_gradients(
        grad_output, *arrays, output, mod_of=lambda: shifted).scores  # fmt: skip
    assert_close(got.captured[0], (right + np.roll(right, -1, 2)).sum(0),
                 (allowed + np.roll(allowed, -1, 2)).sum(0))  # fmt: skip


@pytest.mark.by_turns
def test_several_problems(device):
    """Dimensions that broadcast one by one are several launches, which add to one gradient."""

    def mod_of(by_head, by_entry):
        def mod(score, b, h, q_idx, kv_idx):
            return score * lookup(by_head, h) + lookup(by_entry, b, kv_idx)

        return mod

    q, k, v = draw((2, 1, 3, 2, 4, 8)), draw((1, 2, 3, 2, 5, 8)), draw((2, 2, 1, 2, 5, 8))
    check_gradients((q, k, v), mod_of, (draw((2,)), draw((12, 5))), device=device)


@pytest.mark.by_turns
def test_stacked_tables(device):
    """More than four arrays, of which some share an argument of the kernel."""
    tables = tuple(draw((2, 6), seed=n) for n in range(5))

    def mod_of(*tables):
        def mod(score, b, h, q_idx, kv_idx):
            return score + sum(n * lookup(t, h, kv_idx) for n, t in enumerate(tables, 1))

        return mod

    check_gradients(qkv((2, 2), 5, 6), mod_of, tables, device=device)


def test_same_bits(device):
    """Of ten calls, beside two threads that compute, and of calls with Tensors."""
    captured = captured_of(2, 20, 30, float32)
    arrays = qkv((2, 2), 20, 30)
    grad_output = arrays[2][:, :, :20]
    output, lse = flex_attention(*arrays, each_index(*captured), return_lse=True, device=device)
    done = threading.Event()

    def again(arrays, captured):
        got = flex_attention_backward(grad_output, *arrays, output, lse, each_index(*captured),
                                      captured=captured, device=device)  # fmt: skip
        return (*got[:3], *got.captured)

    wanted = [a.tobytes() for a in again(arrays, captured)]

    def compute():
        while not done.is_set():
            clattn.scaled_dot_product_attention(*arrays, device=device)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert [a.tobytes() for a in again(arrays, captured)] == wanted
    finally:
        done.set()
        for thread in threads:
            thread.join()
    tensors = [tuple(clattn.tensor(a, device) for a in some) for some in (arrays, captured)]
    got = again(*tensors)
    assert all(type(a) is clattn.Tensor and a.device == device for a in got)
    assert [a.numpy().tobytes() for a in got] == wanted


# ---- the cases of other projects ----


@pytest.mark.by_turns
def test_numbers_that_learn(device):
    """One query, 1, and two keys. A table counts before the softcap; a number may multiply."""
    needs_float64(device)
    table, t = np.zeros((1, 2)), np.array(1.0)

    def mod(score, b, h, q_idx, kv_idx):
        return (score * t + t * score) * 0.5 + lookup(table, q_idx, kv_idx)

    def gradients_of(keys, softcap):
        arrays = [np.array(a, float64).reshape(1, 1, -1, 1) for a in ([1], keys, [0, 1])]
        return backward(arrays, np.ones((1, 1, 1, 1)), softcap=softcap, score_mod=mod,
                        captured=(table, t), device=device)[1]  # fmt: skip

    got = gradients_of([0, 2], 1.0)
    np.testing.assert_allclose(got.captured[0], [[-0.199856, 0.014120]], atol=1e-6)
    np.testing.assert_allclose(got.query, [[[[0.028240]]]], atol=1e-6)
    got = gradients_of([0, 1], 0.0)
    assert got.captured[1].shape == ()
    np.testing.assert_allclose(got.captured[1], 0.196612, atol=1e-6)


@pytest.mark.by_turns
def test_what_does_not_matter(device):
    """Zeros for arrays that are read to no end, that a step hides, or that are empty."""
    table, hidden, none = draw((3,)), draw((3,), seed=1), np.zeros((0, 2), float32)

    def mod(score, b, h, q_idx, kv_idx):
        lookup(table, h)
        return where(kv_idx > 90, lookup(none, h, 0), score + np.floor(lookup(hidden, h)))

    for L, S in ((0, 4), (4, 0), (3, 4)):
        q, k, v = qkv((1, 2), L, S)
        lse = np.zeros(q.shape[:-1], float32)
        got = flex_attention_backward(q, q, k, v, q, lse, mod, captured=(table, hidden, none),
                                      device=device)  # fmt: skip
        assert got.query.shape == (1, 2, L, 8) and got.key.shape == (1, 2, S, 8)
        assert [g.shape for g in got.captured] == [(3,), (3,), (0, 2)]
        assert not any(g.any() for g in got.captured)
    assert np.isnan(got.query).all()  # an index outside


@pytest.mark.by_turns
@pytest.mark.usefixtures("kernel")
def test_excluded_and_outside(device):
    """NaN of excluded pairs changes nothing. An index outside is a NaN, which no element gets."""
    needs_float64(device)
    table, allowed = np.zeros(4), np.ones((6, 6), bool)

    def gradients_of(shift, arrays):
        def mod(score, b, h, q_idx, kv_idx):
            return score + lookup(table, q_idx - kv_idx + shift)

        def mask(b, h, q_idx, kv_idx):
            return lookup(allowed, q_idx, kv_idx)

        _, lse = flex_attention(*arrays, mod, mask_mod=mask, return_lse=True, device=device)
        output = np.zeros_like(arrays[0])
        return flex_attention_backward(np.ones_like(output), *arrays, output, lse, mod,
                                       mask_mod=mask, captured=(table,), device=device)  # fmt: skip

    def dS(scores):  # what the weights are times the values, for the output 0
        return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True) * [1, 2]

    x = np.array([[[[1.0], [2.0]]]])
    right = dS(np.array([[1, 2], [2, 4.0]]))
    got = gradients_of(0, (x, x, x)).captured[0]
    np.testing.assert_allclose(got, [right[0, 0] + right[1, 1], right[1, 0], 0, right[0, 1]],
                               rtol=1e-12)  # fmt: skip
    # Row 1 reads elements 4, which is none, and 3; row 0 reads elements 3 and 2.
    got = gradients_of(3, (x, x, x))
    np.testing.assert_array_equal(np.isnan(got.query), [[[[False], [True]]]])
    np.testing.assert_array_equal(np.isnan(got.captured[0]), [False, False, False, True])
    np.testing.assert_allclose(got.captured[0][2], right[0, 1], rtol=1e-12)
    # Every pair is outside: no element gets anything.
    np.testing.assert_array_equal(gradients_of(-9, (x, x, x)).captured[0], np.zeros(4))
    # A mask that excludes the pair.
    allowed[1, 0] = False
    got = gradients_of(3, (x, x, x))
    assert np.isfinite(got.query).all()
    np.testing.assert_allclose(got.captured[0], [0, 0, right[0, 1], right[0, 0] + 2], rtol=1e-12)
    # Excluded: element 3, which is a NaN, all of row 1, all of key 0.
    q, k, v = draw((1, 2, 3, 8), float64), *(draw((2, 1, 2, 5, 8), float64))
    q[:, :, 1], k[:, :, 0], v[:, :, 0], table[3] = np.nan, np.nan, np.nan, np.nan
    allowed[...] = True
    allowed[1], allowed[:, 0], allowed[0, 1], allowed[2, 3] = False, False, False, False
    got = gradients_of(0, (q, k, v))
    assert all(np.isfinite(g).all() for g in (*got[:3], *got.captured))
    assert not got.query[:, :, 1].any() and not got.key[:, :, 0].any() and got.query[:, :, 0].all()
    assert got.captured[0][3] == 0 and got.captured[0][:3].all()


# ---- the derivative of each operation ----

# Functions of a score and of another number, whose derivatives by both are finite.
SMOOTH = {
    "sum": lambda s, x: s + x * 2 - 3 - s * 0.5,
    "product": lambda s, x: s * x * s,
    "quotient": lambda s, x: s / (x + 3) - 2 / (s - 4),
    "powers": lambda s, x: s**3 + x**4 + (s + 4) ** (x / 2) + 2.0**x,
    "negative": lambda s, x: -s - abs(x) * 2 + np.square(-x),
    "where": lambda s, x: where(s > x, s * x, x - s * 3),
    "nested where": lambda s, x: where(s > 0, where(x > 0, s, x), where(x > 1, 1.0, s * x)),
    "extremes": lambda s, x: np.minimum(s, x) * 2 + np.maximum(s * x, 0.5),
    "clip": lambda s, x: np.clip(s, -1, 1) * x + np.clip(s, x, None) + np.clip(x, s, 9.0),
    "exponentials": lambda s, x: np.exp(s) + np.exp2(x) + np.expm1(s * x),
    "logarithms": lambda s, x: np.log(s + 4) + np.log2(x + 5) + np.log1p(s * s),
    "roots": lambda s, x: np.sqrt(s + 4) * np.sqrt(abs(x) + 1),
    "waves": lambda s, x: np.sin(s * x) + np.cos(s - x),
    "tanh": lambda s, x: np.tanh(s * x) * 3,
    "angles": lambda s, x: np.arctan2(s, x) + np.hypot(s, x),
    "rests": lambda s, x: (s + 9) % (x + 4) + np.fmod(s, x + 4) + (s * 9 % 5),
    "steps": lambda s, x: np.floor(s) + np.ceil(x) + np.trunc(s) + np.rint(x) + s // 0.7 + x,
    "comparisons": lambda s, x: (s > x) * 2.0 + np.sign(s) * x + np.where(s < 1, 1, 0) * s,
    "casts": lambda s, x: s.astype(np.int32) * 2 + s.astype(float64) * x,
    "numbers": lambda s, x: np.nan_to_num(s) * 2 + np.isfinite(x) * s + np.reciprocal(x + 5),
    "twice": lambda s, x: (lambda y: y * y + y + np.exp(-y))(s * x + 1),
}


# Of a score and a number, where a derivative has no limit or two of them: (s, x), by s, by x.
EDGES = [
    ("minimum", lambda s, x: np.minimum(s, x), (1, 1), 0.5, 0.5),
    ("maximum", lambda s, x: np.maximum(s, x), (2, 2), 0.5, 0.5),
    ("maximum of NaN", lambda s, x: where(s > 0, 1.0, np.maximum(s, x)), (2, np.nan), 0, 0),
    ("abs", lambda s, x: abs(s) + abs(x) * 3, (0, -1), 0, -3),
    ("low end", lambda s, x: np.clip(s, -1, 1) * x, (-1, 3), 3, -1),
    ("high end", lambda s, x: np.clip(s, -1, 1) * x, (1, 3), 3, 1),
    ("beyond the end", lambda s, x: np.clip(s, -1, 1) * x, (1.5, 3), 0, 1),
    ("root of a branch", lambda s, x: where(s > 0, np.sqrt(s), x), (-1, 2), 0, 1),
    ("root of 0 of a branch", lambda s, x: where(s > 0, np.sqrt(s), x), (0, 2), 0, 1),
    ("quotient of a branch", lambda s, x: where(x != 0, s / x, s * 2), (3, 0), 2, 0),
    ("branch in a branch",
     lambda s, x: where(s > 0, where(x > 0, np.log(x), s) + np.sqrt(s), x * 2), (-2, -3), 0, 2),
    ("a branch behind", lambda s, x: np.exp(where(x > 0, s * np.log(x), s)), (0, -1), 1, 0),
    ("power of 0", lambda s, x: s**x, (0, 2), 0, 0),
    ("power 0", lambda s, x: (s - 1) ** (x - 2), (1, 2), 0, 0),
    ("sign", lambda s, x: np.sign(s) * x, (0, 2), 0, 0),
    ("step", lambda s, x: np.floor(s) + x // 1, (1, 2), 0, 0),
    ("nothing", lambda s, x: 2.0, (1, 2), 0, 0),
]  # fmt: skip


@pytest.mark.by_turns
def test_operations(device):
    """Derivatives by the score and by an element, one operation in each head.

    A row with one key has the weight 1, so the gradient of its score is that of its log-sum-exp.
    """
    needs_float64(device)
    H, L = len(SMOOTH) + len(EDGES), 40
    s, x = draw((H, L), float64), draw((H, L), float64, seed=1)
    operations = [*SMOOTH.values(), *[edge[1] for edge in EDGES]]
    for n, edge in enumerate(EDGES, len(SMOOTH)):
        s[n], x[n] = edge[2]

    def mod(score, b, h, q_idx, kv_idx):
        result = score
        other = lookup(x, h, q_idx)
        for n, operation in enumerate(operations):
            result = where(h == n, operation(score, other), result)
        return result

    one, query = np.ones((1, H, 1, 1)), s[None, ..., None]
    output, grad_lse = np.ones_like(query), np.ones((1, H, L))
    with np.errstate(all="ignore"):
        lse = np.stack([made(s[n], x[n]) + 0 * s[n] for n, made in enumerate(operations)])[None]
    got = flex_attention_backward(output * 0, query, one, one, output, lse, mod, captured=(x,),
                                  grad_lse=grad_lse, scale=1.0, device=device)  # fmt: skip
    by_score, by_element = got.query[0, ..., 0], got.captured[0]
    step = 1e-6
    for n, (name, operation) in enumerate(SMOOTH.items()):

        def difference(ds, dx, n=n, operation=operation):
            up, down = (operation(s[n] + ds * sign, x[n] + dx * sign) for sign in (1, -1))
            return (up - down) / (2 * step)

        for what, mine, right in (
            ("score", by_score[n], difference(step, 0)),
            ("element", by_element[n], difference(0, step)),
        ):
            np.testing.assert_allclose(mine, right, rtol=2e-7, atol=2e-7, err_msg=f"{name}: {what}")
    for n, (name, _, _, *right) in enumerate(EDGES, len(SMOOTH)):
        assert [by_score[n, 0], by_element[n, 0]] == right, name


@pytest.mark.by_turns
def test_functions_of_torch(device):
    """Derivatives as torch has them, far from 0 and at ties, too."""
    needs_float64(device)
    torch = pytest.importorskip("torch")
    fns = torch.nn.functional
    operations = [
        torch.sigmoid, torch.rsqrt, torch.erf, torch.erfc, torch.relu, fns.silu, fns.gelu,
        lambda s: fns.gelu(s, approximate="tanh"), fns.softplus, fns.logsigmoid, fns.elu,
        lambda s: fns.elu(s, alpha=0.5), fns.leaky_relu, lambda s: torch.clamp(s, -1, 1),
        lambda s: torch.clamp(s, min=0), lambda s: torch.remainder(s, 0.75),
        lambda s: torch.where(s > 0, s * 2, s), torch.abs, lambda s: torch.pow(s, 2.5),
        lambda s: torch.maximum(s, -s), lambda s: torch.atan2(s, s + 2),
    ]  # fmt: skip
    values = [-800, -30, -2.25, -1, -0.5, 0, 0.5, 1, 2.25, 30, 800]
    s = torch.tensor(values, dtype=torch.float64)[None, None, :, None]
    s = s.expand(1, len(operations), -1, 1).contiguous()
    one = torch.ones((1, len(operations), 1, 1), dtype=torch.float64)

    def mod(score, b, h, q_idx, kv_idx):
        result = score
        for n, operation in enumerate(operations):
            result = torch.where(h == n, operation(score), result)
        return result

    lse = torch.stack([operation(s[0, n, :, 0]) for n, operation in enumerate(operations)])[None]
    got = flex_attention_backward(torch.zeros_like(s), s, one, one, torch.ones_like(s), lse, mod,
                                  grad_lse=torch.ones_like(lse), scale=1.0,
                                  device=device)  # fmt: skip
    for n, operation in enumerate(operations):
        leaf = s[0, n, :, 0].clone().requires_grad_()
        right = operation(leaf)
        right.sum().backward()
        mine = got.query[0, n, :, 0]
        wanted = torch.where(torch.isfinite(right), leaf.grad, mine)
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-18, equal_nan=True,
                                   msg=lambda text, n=n: f"operation {n}: {text}")  # fmt: skip


@pytest.mark.by_turns
def test_gradients_of_torch(device):
    """A bias made from the query: its gradient goes both ways. A parameter's dtype is kept."""
    torch = pytest.importorskip("torch")
    import clattn.torch

    generator = torch.Generator().manual_seed(0)
    q, k, v, G = (torch.randn((1, 2, 5, 4), generator=generator) for _ in range(4))
    r = torch.randn((4, 5), generator=generator)

    class Double(torch.autograd.Function):
        """The user's own, behind the call."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def gradients_of(attend):
        leaves = [a.clone().requires_grad_() for a in (q, k, v, r)]
        gain = torch.nn.Parameter(torch.tensor(0.75, dtype=torch.bfloat16))
        output, lse = attend(*leaves, gain)
        (Double.apply(output) * G).sum().add(lse.square().sum()).backward()
        return [leaf.grad for leaf in (*leaves, gain)]

    def plainly(q, k, v, r, gain):
        scores = q @ k.mT / 2 * gain + q @ r
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def by_mod(q, k, v, r, gain):
        bias = (q @ r)[0]
        return clattn.torch.flex_attention(
            q, k, v, lambda score, b, h, q_idx, kv_idx: score * gain + bias[h, q_idx, kv_idx],
            return_lse=True, device=device)  # fmt: skip

    right = gradients_of(plainly)
    for attend in (by_mod, torch.compile(by_mod, backend="eager")):
        for got, wanted in zip(gradients_of(attend), right, strict=True):
            assert got.dtype == wanted.dtype and wanted.any()
            tolerance = 1e-2 if wanted.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=1e-5)
    leaf = q.clone().requires_grad_()
    output, _ = by_mod(leaf, k, v, r, 1.0)
    (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


# ---- arguments ----


def test_needs(device):
    arrays = qkv((1, 2), 3, 4)
    all_three = backward(arrays, arrays[0], device=device)[1]
    assert all_three.captured == () and all_three.sinks is None
    for name in ("query", "key", "value"):
        got = backward(arrays, arrays[0], needs=[name], device=device)[1]
        for other in clattn.FlexGradients._fields:
            if other == name:
                np.testing.assert_array_equal(getattr(got, name), getattr(all_three, name))
            else:
                assert getattr(got, other) in (None, ())


def bad(match, error=ValueError, **options):
    return pytest.param(options, error, match, id=match[:40])


TABLE, INTEGERS = draw((2,)), np.arange(2)


def reading(score, b, h, q_idx, kv_idx):
    return score + lookup(TABLE, h) * lookup(INTEGERS, h)


@pytest.mark.parametrize(("options", "error", "match"), [
    bad(r"captured\[0\] is never read by the score_mod.*in reading", captured=[TABLE.copy()]),
    bad(r"captured\[0\] is never read by the score_mod", captured=[TABLE], score_mod=None),
    bad(r"captured\[1\] is among the arrays before", captured=[TABLE, TABLE]),
    bad("captured has 17 arrays; expected at most 16", captured=[TABLE] * 17),
    bad(r"captured\[0\] has dtype int64; expected one of float16", TypeError, captured=[INTEGERS]),
    bad(r"captured\[0\] is of type float; expected an array", TypeError, captured=[0.5]),
    bad("captured is an array; expected a tuple of arrays", TypeError, captured=TABLE),
    bad("needs has 'attn_mask'; expected names of query, key", needs=["attn_mask"]),
    bad("needs must be a collection of names", TypeError, needs="query"),
    bad('needs has "sinks", but sinks is None', needs=["sinks"]),
    bad("mask_mod and block_mask are both given", TypeError, block_mask=1, mask_mod=abs),
])  # fmt: skip
def test_wrong_arguments(device, options, error, match):
    q, k, v = qkv((1, 2), 3, 4)
    lse = np.zeros(q.shape[:-1], float32)
    options = {"score_mod": reading} | options
    with pytest.raises(error, match=f"(?s){match}"):
        flex_attention_backward(q, q, k, v, q, lse, device=device, **options)


def test_wrong_shapes(device):
    output, k, v = qkv((1, 2), 3, 4)
    q, lse = output, np.zeros((1, 2, 3), float32)
    with pytest.raises(ValueError, match=r"grad_output has shape \(1, 2, 3, 7\)"):
        flex_attention_backward(output[..., 1:], q, k, v, output, lse, reading, device=device)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 2\)"):
        flex_attention_backward(output, q, k, v, output, lse[..., 0], reading, device=device)


def test_no_derivative(device, monkeypatch):
    """The message shows the function that has none."""
    from clattn.flex import derivatives

    def wave(score, b, h, q_idx, kv_idx):
        return np.sin(score)

    monkeypatch.delitem(derivatives._RULES, "sin")
    q, k, v = qkv((1, 2), 3, 4)
    with pytest.raises(ValueError, match=r"(?s)score_mod: sin has no derivative.*in wave"):
        flex_attention_backward(q, q, k, v, q, q[..., 0], wave, device=device)
