# SPDX-License-Identifier: MIT
"""What single operations of mods compute, number by number.

Each head has an operation of its own, all of them in one program. A mask leaves one key to each
row: the log-sum-exp is then the score as the mod made it. Scores are multiples of 1/4, which every
kernel computes exactly.
"""

import math

import clattn
import numpy as np
import pytest
from references.attention import eps, float32, float64
from references.flex import ULPS, positions
from support.mods import lookup, where
from support.variants import force, takes_cpu_kernels

L, S, E = 21, 23, 16
INT, LONG = np.int32, np.int64
FLAGS = np.arange(12).reshape(4, 3) % 5 < 2
WIDE = np.array([[2**40 + 3, -(2**35)], [-7, 0]])[:, ::-1]

THREE = list(np.arange(12, dtype=np.int32).reshape(3, 4))


def number(kv_idx):
    """Small integers of both signs; rarely 0."""
    return kv_idx % 9 - 4


def lowest(kv_idx):
    """The lowest int, or 0."""
    return kv_idx % 2 * -(2**31)


def wide(q_idx, kv_idx):
    return (q_idx - kv_idx).astype(LONG) * 2**33 + kv_idx


def torch_s(name, function):
    """A function that torch has and NumPy lacks: a symbol's method, or what numbers become."""

    def of(x, *more, **options):
        method = getattr(x, name, None)
        if method is None:
            return np.vectorize(function, otypes=[float64])(x, *more)
        return method(*more, **options)

    return of


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def cubic(x):
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def odd(s, k):
    """Scores, infinities and NaN."""
    return where(k % 4 == 0, np.inf, where(k % 4 == 1, -np.inf, where(k % 4 == 2, np.nan, s)))


# Functions of (score, h, q_idx, kv_idx) whose results are exact in float32, or rounded once.
EXACT = {
    # of int
    "+": lambda s, h, q, k: q + number(k),
    "-": lambda s, h, q, k: q - k,
    "*": lambda s, h, q, k: (q - k) * number(k),
    "- x": lambda s, h, q, k: -(q * k),
    "//": lambda s, h, q, k: (q - k) // number(k),
    "// 3": lambda s, h, q, k: (q - k) // 3,
    "// -3": lambda s, h, q, k: (q - k) // -3,
    "//, numbers first": lambda s, h, q, k: 100 // (number(k) - q),
    "%": lambda s, h, q, k: (q - k) % number(k),
    "% 5": lambda s, h, q, k: (q - k) % 5,
    "% -5": lambda s, h, q, k: (q - k) % -5,
    "**": lambda s, h, q, k: number(k) ** (q % 5),
    "** 3": lambda s, h, q, k: (q - k) ** 3,
    "minimum": lambda s, h, q, k: np.minimum(q, k),
    "maximum": lambda s, h, q, k: np.maximum(q, number(k)),
    "clip": lambda s, h, q, k: np.clip(q - k, -3, 5),
    "abs": lambda s, h, q, k: abs(q - k),
    "sign": lambda s, h, q, k: np.sign(q - k),
    "<<": lambda s, h, q, k: (q - k) << (k % 8),
    ">>": lambda s, h, q, k: (q - k) * 1000 >> (k % 8),
    "<< far": lambda s, h, q, k: (q - k) << (k * 3),
    ">> far": lambda s, h, q, k: (q - k) * 1000 >> (k * 3),
    "&": lambda s, h, q, k: q & k,
    "|": lambda s, h, q, k: q | (k - 9),
    "^": lambda s, h, q, k: q ^ ~k,
    "wraps": lambda s, h, q, k: (q * 2**20) * (k * 2**11 + 1) >> 8,
    "lowest // -1": lambda s, h, q, k: lowest(k) // (q % 3 - 1),
    "lowest % -1": lambda s, h, q, k: lowest(k) % (q % 3 - 1),
    # of long
    "long +": lambda s, h, q, k: wide(q, k) + 2**42 >> 20,
    "long //": lambda s, h, q, k: wide(q, k) // number(k) >> 12,
    "long // long": lambda s, h, q, k: wide(q, k) // -(2**31),
    "long %": lambda s, h, q, k: wide(q, k) % (2**22 + 7 * k),
    "long **": lambda s, h, q, k: (k % 7 - 3).astype(LONG) ** (q % 8),
    "long minimum": lambda s, h, q, k: np.minimum(wide(q, k), wide(k, q)) >> 20,
    "long maximum": lambda s, h, q, k: np.maximum(wide(q, k), 2**34) >> 20,
    "long abs": lambda s, h, q, k: abs(wide(q, k)) >> 20,
    "long sign": lambda s, h, q, k: np.sign(wide(q, k)),
    "long - x": lambda s, h, q, k: -wide(q, k) >> 20,
    "long <<": lambda s, h, q, k: (k.astype(LONG) << 40) >> 38,
    "long ^": lambda s, h, q, k: (wide(q, k) ^ ~wide(k, q)) & 0xFFFFF,
    "long <": lambda s, h, q, k: where(wide(q, k) < 2**34, q, k),
    "long ==": lambda s, h, q, k: where(wide(q, k) == k, q + 30, k),
    "long to int": lambda s, h, q, k: (wide(q, k) // 2**33).astype(INT) * 3,
    "long where": lambda s, h, q, k: where(q > k, wide(q, k), -k.astype(LONG)) >> 20,
    "long lowest // -1": lambda s, h, q, k: lowest(k).astype(LONG) * 2**32 // (q % 3 - 1),
    "long lowest % -1": lambda s, h, q, k: lowest(k).astype(LONG) * 2**32 % (q % 3 - 1),
    # of bool
    "bools": lambda s, h, q, k: where((q > k) ^ (k % 2 == 0) & ~(q == 3) | (k == q), 2, -7),
    "bools compared": lambda s, h, q, k: where((q > k) <= (k % 3 > 0), q, k),
    "bools equal": lambda s, h, q, k: where((q > k) == (k % 3 > 0), q, k),
    "where of bools": lambda s, h, q, k: where(where(q > 5, k > 7, q < k), 1, 2),
    "bool to int": lambda s, h, q, k: (q > k).astype(INT) * 5 - (k == 2),
    "bool to long": lambda s, h, q, k: (q > k).astype(LONG) * 2**35 >> 30,
    "bool to real": lambda s, h, q, k: s * (q > k) + (q <= k),
    "int to bool": lambda s, h, q, k: where((q - k).astype(bool), 3, 4),
    "long to bool": lambda s, h, q, k: where(wide(q, q - q).astype(bool), 3, 4),
    "real to bool": lambda s, h, q, k: where(s.astype(bool), 3, 4),
    "comparisons": lambda s, h, q, k: (q < k) + 2 * (q <= k) + 4 * (q > k) + 8 * (q != k),
    # of real
    "real +": lambda s, h, q, k: s + k - 0.5,
    "real *": lambda s, h, q, k: s * (q - k),
    "real /": lambda s, h, q, k: s / np.exp2(number(k)),
    "real //": lambda s, h, q, k: s // 0.75,
    "real // -x": lambda s, h, q, k: s // (number(k) * 0.5 + 0.25),
    "real // inf": lambda s, h, q, k: s // where(k % 2 == 0, np.inf, -np.inf),
    "inf // real": lambda s, h, q, k: where(k % 2 == 0, np.inf, s) // (number(k) * 0.5 + 0.25),
    "real %": lambda s, h, q, k: s % 0.75,
    "real % -x": lambda s, h, q, k: s % (number(k) * 0.25),
    "real minimum": lambda s, h, q, k: np.minimum(s, k * 0.125),
    "real maximum": lambda s, h, q, k: np.maximum(-s, 0),
    "real abs": lambda s, h, q, k: abs(s - k),
    "real sign": lambda s, h, q, k: np.sign(s),
    "floor": lambda s, h, q, k: np.floor(s * 0.5),
    "sqrt": lambda s, h, q, k: np.sqrt(k * k + (q % 2) * 0.0),
    "real compared": lambda s, h, q, k: (s < 0) + 2 * (s <= 1) + 4 * (s >= q) + 8 * (s == 0),
    "real to int": lambda s, h, q, k: s.astype(INT) * 3,
    "real to long": lambda s, h, q, k: (s * 2.0**33).astype(LONG) >> 20,
    "-inf": lambda s, h, q, k: where(k % 2 == 0, -np.inf, s),
    "NaN": lambda s, h, q, k: np.minimum(s, where(k % 2 == 0, np.nan, 1.0)),
    "inf": lambda s, h, q, k: where(1.0 / (k % 3 - 1.0) == np.inf, s, -s),
    "ceil": lambda s, h, q, k: np.ceil(s * 0.7),
    "trunc": lambda s, h, q, k: np.trunc(s * 0.7),
    "round": lambda s, h, q, k: np.round(s * 2),
    "rint of halves": lambda s, h, q, k: np.rint(number(k) * 0.5),
    "ceil of int": lambda s, h, q, k: np.ceil(q) + np.trunc(k) + np.round(h),
    "fmod": lambda s, h, q, k: np.fmod(s, number(k) * 0.25),
    "fmod of int": lambda s, h, q, k: np.fmod(q - k, number(k)),
    "isnan": lambda s, h, q, k: where(np.isnan(odd(s, k)), 3, k),
    "isinf": lambda s, h, q, k: where(np.isinf(odd(s, k)), 3, k),
    "isfinite": lambda s, h, q, k: where(np.isfinite(odd(s, k)), 3, k),
    "isnan of int": lambda s, h, q, k: np.isnan(q) + 2 * np.isinf(k) + 4 * np.isfinite(h),
    "nan_to_num": lambda s, h, q, k: np.nan_to_num(odd(s, k), nan=2.5, posinf=9.0, neginf=-8.0),
    "nan_to_num 0": lambda s, h, q, k: np.nan_to_num(where(k % 4 == 2, np.nan, s)),
    "isin": lambda s, h, q, k: where(np.isin(k, np.array([3, 8, 21])), s, k),
    "isin of none": lambda s, h, q, k: where(np.isin(k - q, [], invert=True), s, k),
    "ones_like": lambda s, h, q, k: np.ones_like(q, dtype=float32) / 4 + np.zeros_like(s, int),
    "relu": lambda s, h, q, k: torch_s("relu", lambda x: max(x, 0))(s),
    "leaky_relu": lambda s, h, q, k: torch_s("leaky_relu", lambda x, a: max(x, x * a))(s, 0.25),
    # tables, and what depends on the row or the key alone
    "of a row": lambda s, h, q, k: q // 4 % 3 - 2,
    "of a key": lambda s, h, q, k: where(k > 6, k // -4, 2),
    "of arrays that share": lambda s, h, q, k: (
        lookup(THREE[0], q % 4) + lookup(THREE[1], k % 4) * lookup(THREE[2], (q + k) % 4)),
    "flag of a row": lambda s, h, q, k: where(lookup(FLAGS, q % 4, -1 - h % 3), s, k),
    "flag of a key": lambda s, h, q, k: where(lookup(FLAGS, k % 4, 1), q, k),
    "flag": lambda s, h, q, k: where(lookup(FLAGS, (q - k) % 4, k % 3), q, k),
    "element of a row": lambda s, h, q, k: lookup(WIDE, q % 2, 1) >> 20,
    "element": lambda s, h, q, k: lookup(WIDE, q % 2, -1 - (k % 2).astype(LONG)) >> 15,
}  # fmt: skip

ROUNDED = {
    "/": lambda s, h, q, k: (q - k) / (k + 3),
    "exp": lambda s, h, q, k: np.exp(s * 0.25),
    "exp2": lambda s, h, q, k: np.exp2(s * 0.375),
    "log": lambda s, h, q, k: np.log(k + q * 40.0),
    "log2": lambda s, h, q, k: np.log2(abs(s) + 1.7),
    "sin": lambda s, h, q, k: np.sin(s),
    "cos": lambda s, h, q, k: np.cos((q - k) * 0.25),
    "tanh": lambda s, h, q, k: np.tanh(s * 0.2),
    "tanh of little": lambda s, h, q, k: np.tanh(s * 1e-3),
    "root": lambda s, h, q, k: np.sqrt(abs(s) + k),
    "power": lambda s, h, q, k: (abs(s) + 0.7) ** (0.3 * number(k)),
    "expm1": lambda s, h, q, k: np.expm1(s * 0.01),
    "log1p": lambda s, h, q, k: np.log1p(s * s * 0.01),
    "atan2": lambda s, h, q, k: np.arctan2(s, number(k)),
    "hypot": lambda s, h, q, k: np.hypot(s, q - k),
    "reciprocal": lambda s, h, q, k: np.reciprocal(s - 0.375),
    "rsqrt": lambda s, h, q, k: torch_s("rsqrt", lambda x: x**-0.5)(s * s + 0.5),
    "erf": lambda s, h, q, k: torch_s("erf", math.erf)(s * 0.25),
    "erfc": lambda s, h, q, k: torch_s("erfc", math.erfc)(s * 0.25),
    "sigmoid": lambda s, h, q, k: torch_s("sigmoid", sigmoid)(s),
    "silu": lambda s, h, q, k: torch_s("silu", lambda x: x * sigmoid(x))(s),
    "gelu": lambda s, h, q, k: torch_s("gelu", lambda x: x * math.erfc(-x / 2**0.5) / 2)(s * 0.25),
    "gelu by tanh": lambda s, h, q, k: torch_s("gelu", lambda x: x * sigmoid(2 * cubic(x)))(
        s * 0.25, approximate="tanh"
    ),
    "softplus": lambda s, h, q, k: torch_s("softplus", lambda x: math.log1p(math.exp(x)))(s),
    "log_sigmoid": lambda s, h, q, k: torch_s("log_sigmoid", lambda x: -math.log1p(math.exp(-x)))(
        s
    ),
    "elu": lambda s, h, q, k: torch_s("elu", lambda x: x if x > 0 else math.expm1(x))(s),
    "exp of a row": lambda s, h, q, k: np.exp(-0.125 * q),
    "tanh of a key": lambda s, h, q, k: np.tanh(k / 9),
}
OPERATIONS = EXACT | ROUNDED

# What is allowed in units in the last place, beside ULPS: OpenCL C's bounds of the functions. In
# gelu, an argument that is off by n units moves erfc(z) and exp(z) by up to 2 * z**2 * n and z * n;
# z**2 is at most 2, and the other z at most 4.
MORE_ULPS = {
    "power": 16,
    "erf": 16,
    "erfc": 16,
    "atan2": 6,
    "silu": 6,
    "softplus": 7,
    "gelu": 16 + 4 + 2,
    "gelu by tanh": 4 * 4 + 3 + 2,
}
H = len(OPERATIONS)


def each_operation(score, b, h, q_idx, kv_idx):
    result = score
    for n, operation in enumerate(OPERATIONS.values()):
        result = where(h == n, operation(score, h, q_idx, kv_idx), result)
    return result


def one_key(shift):
    return lambda b, h, q_idx, kv_idx: (q_idx * 5 + h + shift) % S == kv_idx


def quarters():
    """Queries and keys whose products with 1/4 are scores, and these."""
    rng = np.random.default_rng(5)
    q = rng.integers(-2, 3, (1, H, L, E)).astype(float32)
    k = rng.integers(-2, 3, (1, H, S, E)).astype(float32)
    return q, k, np.matmul(q.astype(float64), k.swapaxes(2, 3)) / 4


def scores_by(kernel, device):
    """{shift: scores as the mod makes them, of shape (H, L)} by a kernel."""
    q, k, _ = quarters()
    with pytest.MonkeyPatch.context() as patch:
        force(patch, kernel)
        return {
            shift: clattn.flex_attention(
                q, k, k, each_operation, scale=0.25, mask_mod=one_key(shift), return_lse=True,
                device=device)[1][0]
            for shift in (0, 7, 11)
        }  # fmt: skip


def wanted(shift):
    """The same of NumPy, (H, L)."""
    scores = quarters()[2]
    place = positions(scores.shape)
    with np.errstate(all="ignore"):
        made = [
            np.broadcast_to(operation(scores, *place[1:]), scores.shape)[0, n]
            for n, operation in enumerate(OPERATIONS.values())
        ]
    chosen = one_key(shift)(*place)[0]
    return np.stack([m.astype(float64)[c] for m, c in zip(made, chosen, strict=True)])


# Single scores, rows in lanes, keys in lanes. A hundred operations are one program.
@pytest.mark.by_turns
@pytest.mark.parametrize("kernel_name", ["reference", "cpu", "decode_cpu"])
def test_operations(device, kernel_name):
    """As NumPy's. All kernels give the same numbers, to the last rounding."""
    if not takes_cpu_kernels(device) and kernel_name != "reference":
        pytest.skip(f"{kernel_name} is for CPUs")
    most = {name: 0 if name in EXACT else ULPS for name in OPERATIONS} | MORE_ULPS
    for shift, got in scores_by(kernel_name, device).items():
        right = wanted(shift)
        for n, (name, ulps) in enumerate(most.items()):
            near = right[n].astype(float32)
            allowed = ulps * eps(float32)
            same = np.isclose(got[n], near, rtol=allowed, atol=0, equal_nan=True)
            assert same.all(), f"{name}: {got[n][~same]}, expected {right[n][~same]}"
