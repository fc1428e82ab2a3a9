"""The problems that ``python -m clattn bench`` measures, and their data."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from clattn._arguments.dtypes import float_dtype

Array = NDArray[Any]
Shape = tuple[int, int, int, int, int, int]  # B, Hq, Hk, L, S, E

LEAST_LENGTH = 16  # of a row that is scaled down

# The sequences of a padded batch begin with padding. This share of each sequence is padding.
PADDED = (0, 0.2, 0.4, 0.56)


@dataclass(frozen=True)
class Row:
    """One attention problem by its sizes.

    `mask`: one for all heads; "padding" and "lowest" are masks of a batch whose sequences are
    padded at the left, bool or with the lowest finite number. `is_causal`: "lower_right" lets
    the last query see all keys. `window`: a query attends to so many keys before its own and to
    none after it; a row with a window is causal. `limit`: what bounds the time: multiply-adds and
    float32's exponentials ("fma"), the same in whole vectors of rows ("scores"), reading keys and
    values where this takes longer ("read"), or matrix units ("product"). `on_device`: the arrays
    lie on the device. `layout`: contiguous heads (B, H, L, E), or views of it: of projections
    (B, L, H, E), of one packed array (B, L, 3, H, E), or of one stacked array (B, L, H, 3, E).
    `door`: the operator that clattn is called by, with arrays as it takes them. `trains`: forward
    and backward pass; the multiply-adds of the backward pass bound its time, whatever `limit` says.
    "backward": the backward pass alone, bound by `limit`.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    mask: Literal["float", "bool", "padding", "lowest"] | None = None
    is_causal: bool | Literal["lower_right"] = False
    window: int | None = None
    limit: Literal["fma", "scores", "read", "product"] = "fma"
    on_device: bool = False
    layout: Literal["heads", "projections", "packed", "stacked"] = "heads"
    door: Literal["torch", "onnx", "directml"] = "torch"
    trains: bool | Literal["backward"] = False

    @property
    def is_grouped(self) -> bool:
        """True if several query heads share a key head."""
        return self.shape[1] != self.shape[2]

    @property
    def is_padded(self) -> bool:
        """True if sequences are padded, and the mask says which keys are seen."""
        return self.mask in ("padding", "lowest")

    @property
    def is_causal_only(self) -> bool:
        """Causal from the first key on; else `Problem.additive_mask` excludes the keys."""
        return self.is_causal is True and self.window is None and not self.is_padded

    @property
    def is_plain(self) -> bool:
        """True if the arrays are contiguous heads, as the function takes them."""
        return self.layout == "heads" and self.door == "torch"

    @property
    def work(self) -> int:
        """What the limit counts: bytes or FLOP."""
        return self.bytes_read if self.limit == "read" else self.flop

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, of all heads."""
        B, Hq, _, L, S, _ = self.shape
        if self.is_padded:
            return Hq * sum(int(self.attended(batch=b).sum()) for b in range(B))
        return Hq * B * (L * S if not self.is_causal else int(self.attended().sum()))

    @property
    def flop(self) -> int:
        """2 · (E + Ev) for each pair, and what the backward pass adds to that."""
        if self.trains == "backward":
            return self.backward_flop
        return self.pairs * 4 * self.shape[-1] + (self.backward_flop if self.trains else 0)

    @property
    def backward_flop(self) -> int:
        """The backward pass's five products: 10 · E for each pair."""
        return self.pairs * 10 * self.shape[-1]

    @property
    def bytes_read(self) -> int:
        """Bytes of all keys and values."""
        B, _, Hk, _, S, E = self.shape
        return 2 * B * Hk * S * E * numpy_dtype(self.dtype).itemsize

    def attended(self, rows: NDArray[np.intp] | None = None, batch: int = 0) -> NDArray[np.bool_]:
        """Return which keys some query rows see, but for a random mask; by default all rows.

        The shape is (rows, S).
        """
        L, S = self.shape[3:5]
        i = (np.arange(L) if rows is None else rows)[:, None]
        j = np.arange(S)
        last = i + (S - L if self.is_causal == "lower_right" else 0)
        seen = np.ones((len(i), S), bool)
        if self.is_causal:
            seen &= j <= last
        if self.window is not None:
            seen &= j >= last - self.window
        if self.is_padded:
            seen &= j >= int(S * PADDED[batch % len(PADDED)])
        return seen

    def parts(self, rows: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.intp], slice]]:
        """Yield places in `rows`, and a range of keys outside of which these rows see none."""
        yield np.arange(len(rows)), slice(None)

    def kept(self, array: Array) -> Array:
        """Return the keys or values that a call reads, of those that are drawn."""
        return array

    def scaled(self: "AnyRow", divisor: int) -> "AnyRow":
        """Return the row with its lengths divided and at most two elements in the batch."""
        B, Hq, Hk, L, S, E = self.shape
        if divisor == 1:
            return self

        def shorter(length: int) -> int:
            return min(length, max(length // divisor, LEAST_LENGTH))

        window = None if self.window is None else shorter(self.window)
        return replace(self, shape=(min(B, 2), Hq, Hk, shorter(L), shorter(S), E), window=window)

    def bias(self, rows: NDArray[np.intp]) -> Array | None:
        """Return what is added to the scores of some query rows, (Hq, rows, S), or None."""
        return None

    def bias_by_slope(self, rows: NDArray[np.intp]) -> Array | None:
        """Return the derivative of `bias` by the slope of a head, (rows, S), or None."""
        return None


AnyRow = TypeVar("AnyRow", bound=Row)


@functools.cache
def pairs_in(row: Row, rows: int) -> int:
    """Return how many pairs of a query and a key vectors of so many query rows compute.

    A vector computes a key for all its rows if one of them attends to the key.
    """
    B, Hq, _, L, S, _ = row.shape
    seen = np.zeros((-(-L // rows) * rows, S), bool)
    seen[:L] = row.attended()
    return B * Hq * rows * int(seen.reshape(-1, rows, S).any(axis=1).sum())


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name; bfloat16 is that of ml_dtypes."""
    return np.dtype(float_dtype(name))


def _model(name: str, shape: Shape, **options: Any) -> Row:
    return Row(name, shape, **{"layout": "projections", **options})


_LLAMA = (1, 32, 8, 1024, 1024, 128)
_PADDED = (4, 12, 12, 512, 512, 64)
_EIGHT_HEADS = (1, 8, 8, 2048, 2048, 64)
_WIDE_HEADS = (1, 32, 32, 1024, 1024, 128)


def _few(rows: int) -> Shape:
    return (1, 32, 8, rows, 4096, 128)


# Attention as models call it, on views of projections, of packed and of stacked arrays.
MODEL_ROWS = (
    _model("llama", _LLAMA, is_causal=True),
    _model("llama-f16", _LLAMA, dtype="float16", is_causal=True),
    _model("llama-bf16", _LLAMA, dtype="bfloat16", is_causal=True),
    _model("gpt2", (2, 12, 12, 1024, 1024, 64), is_causal=True, layout="packed"),
    _model("padding", _PADDED, mask="padding", is_causal=True),
    _model("padding-lowest", _PADDED, mask="lowest", is_causal=True),
    _model("vit", (4, 16, 16, 577, 577, 64)),
    _model("diffusion", (2, 8, 8, 1024, 1024, 80)),
    _model("diffusion-cross", (2, 8, 8, 1024, 77, 80)),
    _model("llama-decode", _few(1), limit="read"),
    _model("llama-decode-f16", _few(1), dtype="float16", limit="read"),
    _model("llama-9", _few(9), is_causal="lower_right"),
    _model("llama-16", _few(16), is_causal="lower_right"),
    _model("llama-64", _few(64), is_causal="lower_right"),
    _model("whisper-cross", (1, 12, 12, 1, 1500, 64), limit="read"),
    _model("onnx", _EIGHT_HEADS, door="onnx"),
    _model("onnx-E128", _WIDE_HEADS, door="onnx"),
    _model("directml", _EIGHT_HEADS, door="directml", layout="stacked"),
    _model("directml-E128", _WIDE_HEADS, door="directml", layout="stacked"),
)

_PREFILL = (1, 8, 8, 2048, 2048, 64)
_DECODE = (1, 32, 32, 1, 4096, 128)
_DECODE_GQA = (1, 32, 8, 1, 4096, 128)

ROWS = (
    *MODEL_ROWS,
    Row("plain", _PREFILL),
    Row("E=128", (1, 8, 8, 2048, 2048, 128)),
    Row("float-mask", _PREFILL, mask="float"),
    Row("bool-mask", _PREFILL, mask="bool"),
    Row("batch", (4, 12, 12, 512, 512, 64)),
    Row("cross", (1, 8, 8, 256, 2048, 64)),
    Row("causal", _PREFILL, is_causal=True),
    Row("window", (1, 8, 8, 4096, 4096, 64), is_causal=True, window=256),
    Row("short", (1, 12, 12, 128, 128, 64)),
    Row("short-batch", (8, 12, 12, 64, 64, 64)),
    Row("odd", (3, 5, 5, 77, 77, 80)),
    Row("tiny", (1, 8, 8, 16, 16, 64)),
    Row("decode", _DECODE, limit="read"),
    Row("decode-gqa", _DECODE_GQA, limit="read"),
    Row("decode-batch", (8, 32, 8, 1, 2048, 128), limit="read"),
    Row("decode-4", (1, 32, 8, 4, 4096, 128), limit="read"),
    Row("decode-8", (1, 32, 8, 8, 4096, 128), limit="read"),
    Row("float16", _PREFILL, "float16"),
    Row("float16-decode", _DECODE, "float16", limit="read"),
    Row("float16-gqa", _DECODE_GQA, "float16", limit="read"),
    Row("bfloat16", _PREFILL, "bfloat16"),
    Row("bfloat16-causal", _PREFILL, "bfloat16", is_causal=True),
    Row("bfloat16-decode", _DECODE, "bfloat16", limit="read"),
    Row("bfloat16-gqa", _DECODE_GQA, "bfloat16", limit="read"),
    Row("float64", _PREFILL, "float64"),
)


def _train(name: str, shape: Shape, **options: Any) -> Row:
    return Row(f"train-{name}", shape, **options, trains=True)


# Rows of training, `--rows train`; FLEX_TRAIN_ROW of flex.py belongs to them.
SDPA_TRAIN_ROWS = (
    _train("plain", _PREFILL),
    _train("causal", _PREFILL, is_causal=True),
    _train("batch", (4, 12, 12, 512, 512, 64)),
    _train("E=128", (1, 8, 8, 2048, 2048, 128)),
    _train("float16", _PREFILL, dtype="float16"),
    _train("bfloat16", _PREFILL, dtype="bfloat16"),
    _train("gpt2", (2, 12, 12, 1024, 1024, 64), is_causal=True, layout="packed"),
    _train("llama", _LLAMA, is_causal=True, layout="projections"),
    _train("vit", (4, 16, 16, 577, 577, 64), layout="projections"),
    _train("bert", (16, 12, 12, 128, 128, 64), mask="padding", layout="projections"),
    _train("float-mask", (1, 8, 8, 1024, 1024, 64), mask="float"),
)


def _prefill(name: str, shape: Shape, dtype: str = "float16") -> Row:
    # Matrix units multiply half types.
    return Row(name, shape, dtype, limit="fma" if dtype == "float32" else "product", on_device=True)


def _decode(name: str, shape: Shape, dtype: str = "float16") -> Row:
    return Row(name, shape, dtype, limit="read", on_device=True)


def _and_causal(row: Row) -> tuple[Row, Row]:
    return row, replace(row, name=f"{row.name}-causal", is_causal=True)


_LONG = _prefill("f16-E128", (1, 16, 16, 8192, 8192, 128))
_SHORT = _prefill("f16-E128-2k", (4, 16, 16, 2048, 2048, 128))

# The rows of `--gpu`: large problems on arrays of the device. Keys and values of a decode row
# are 256 MiB; those of decode-64M are 64 MiB.
GPU_ROWS = (
    *_and_causal(_LONG),
    *_and_causal(_SHORT),
    *_and_causal(_prefill("f16-E64", (1, 32, 32, 8192, 8192, 64))),
    _prefill("f16-E64-2k", (4, 32, 32, 2048, 2048, 64)),
    *_and_causal(_prefill("bf16-E128", (1, 16, 16, 8192, 8192, 128), "bfloat16")),
    *_and_causal(_prefill("bf16-E64", (1, 32, 32, 8192, 8192, 64), "bfloat16")),
    _prefill("f16-E80-2k", (4, 16, 16, 2048, 2048, 80)),
    _prefill("f16-E256-2k", (4, 8, 8, 2048, 2048, 256)),
    _prefill("f16-gqa", (1, 32, 8, 4096, 4096, 128)),
    replace(_LONG, name="f16-window", is_causal=True, window=1024),
    replace(_SHORT, name="f16-bool-mask", mask="bool"),
    *_and_causal(_prefill("f32-E64", (2, 16, 16, 4096, 4096, 64), "float32")),
    _prefill("f32-E128", (1, 16, 16, 4096, 4096, 128), "float32"),
    _decode("decode-f16", (2, 32, 32, 1, 8192, 128)),
    _decode("decode-f16-gqa", (8, 32, 8, 1, 8192, 128)),
    _decode("decode-f16-gqa-8", (8, 64, 8, 1, 8192, 128)),
    _decode("decode-bf16-gqa", (8, 32, 8, 1, 8192, 128), "bfloat16"),
    _decode("decode-64M", (1, 32, 8, 1, 16384, 128)),
    _decode("decode-f16-gqa-4", (8, 32, 8, 4, 8192, 128)),
    _decode("decode-f32", (2, 32, 32, 1, 4096, 128), "float32"),
    # The same problem again with arrays of the host shows what transfers cost.
    replace(_SHORT, name="f16-E128-2k-host", on_device=False),
)

# What a reader calls the rows of `--rows calls`, which docs/performance.md shows.
TITLES = {
    "llama": "Llama 3 8B, prompt of 1,024 tokens",
    "gpt2": "GPT-2, 2 x 1,024 tokens",
    "padding": "4 texts padded to 512 tokens",
    "vit": "ViT-L, 4 pictures",
    "diffusion": "Stable Diffusion, 1,024 pixels",
    "llama-decode": "Llama 3 8B, decoding at 4,096 tokens",
    "float16-decode": "decoding at 4,096 tokens, float16",
    "tiny": "16 tokens",
    "f16-E128-causal": "prompt of 8,192 tokens",
    "f16-gqa": "4,096 tokens, 32/8 heads",
    "f16-window": "8,192 tokens, window of 1,024",
    "f16-bool-mask": "4 x 2,048 tokens, bool mask",
    "f32-E64": "2 x 4,096 tokens, float32",
    "decode-f16-gqa": "decoding at 8,192 tokens, batch of 8",
    "decode-64M": "decoding at 16,384 tokens",
}

# What a reader calls the rows of `--rows serve`, which docs/serve.md shows.
SERVE_TITLES = {
    "serve-prompts": "64 prompts",
    "serve-decode": "a row for each of 64 sequences",
    "serve-decode-groups": "the same, 8/2 heads",
    "serve-mixed": "56 single rows and 8 prompts of up to 128 rows",
    "serve-pages-16": "8 rows over pages of 16 keys",
    "serve-pages-64": "over pages of 64 keys",
    "serve-pages-256": "over pages of 256 keys",
    "serve-int8-E64": "int8, 8 heads of 64",
    "serve-int8-E128": "int8, 8 heads of 128",
    "serve-int8-groups": "int8, 32/8 heads of 128",
    "serve-float8-E64": "float8_e4m3fn, 8 heads of 64",
    "serve-float8-E128": "float8_e4m3fn, 8 heads of 128",
    "serve-float8-groups": "float8_e4m3fn, 32/8 heads of 128",
}

# What a reader calls the rows of `--rows train`, which docs/train.md shows.
TRAIN_TITLES = {
    "train-plain": "2,048 tokens, 8 heads of 64",
    "train-causal": "the same, causal",
    "train-batch": "4 x 512 tokens, 12 heads of 64",
    "train-E=128": "2,048 tokens, 8 heads of 128",
    "train-float16": "2,048 tokens, float16",
    "train-bfloat16": "2,048 tokens, bfloat16",
    "train-gpt2": "GPT-2, 2 x 1,024 tokens",
    "train-llama": "Llama 3 8B, 1,024 tokens",
    "train-vit": "ViT-L, 4 pictures",
    "train-bert": "BERT, 16 texts padded to 128 tokens",
    "train-float-mask": "1,024 tokens, a float mask without gradient",
    "train-alibi": "`flex_attention`, 1,024 tokens, ALiBi with gradient",
}


@dataclass(frozen=True)
class Problem:
    """A row with its data: query (B, Hq, L, E), key and value (B, Hk, S, E), mask (L, S).

    A mask of padded sequences is (B, 1, L, S), a bool one without causality (B, 1, 1, S).
    """

    row: Row
    query: Array
    key: Array
    value: Array
    mask: Array | None

    @cached_property
    def additive_mask(self) -> Array | None:
        """The mask for a peer without windows: a window becomes numbers to add; (L, S).

        So does a causal mask that is aligned to the lower right.
        """
        if self.row.window is None and self.row.is_causal != "lower_right":
            return self.mask
        return np.where(self.row.attended(), 0, -np.inf).astype(self.query.dtype)

    @cached_property
    def grad_output(self) -> Array:
        """The gradient of the output, (B, Hq, L, E), which lies in memory as the row's layout."""
        B, Hq, _, L, _, E = self.row.shape
        shape = (B, Hq, L, E) if self.row.layout == "heads" else (B, L, Hq, E)
        grad = np.random.default_rng(1).standard_normal(shape, np.float32).astype(self.query.dtype)
        return grad if self.row.layout == "heads" else grad.swapaxes(1, 2)


def draw(row: Row) -> Problem:
    """Return a row with standard normal numbers; a bool mask attends to 70 % of the keys."""
    B, Hq, Hk, L, S, E = row.shape
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(row.dtype))

    def projection(heads: int, length: int) -> Array:
        return normal(B, length, heads, E).swapaxes(1, 2)

    if row.layout == "heads":
        query, key, value = normal(B, Hq, L, E), normal(B, Hk, S, E), normal(B, Hk, S, E)
    elif row.layout == "projections":
        query, key, value = projection(Hq, L), projection(Hk, S), projection(Hk, S)
    else:
        query, key, value = _parts(normal(B, L, 3, Hq, E), row)
    return Problem(row, query, row.kept(key), row.kept(value), _draw_mask(row, rng))


def contiguous(problem: Problem) -> Problem:
    """Return the same problem on contiguous copies, for clattn's function."""
    copy = np.ascontiguousarray
    row = replace(problem.row, layout="heads", door="torch")
    return Problem(row, copy(problem.query), copy(problem.key), copy(problem.value), problem.mask)


def _parts(array: Array, row: Row) -> tuple[Array, Array, Array]:
    """Return query, key and value as views of a packed or a stacked array."""
    if row.layout == "stacked":
        B, L, _, H, E = array.shape
        array = array.reshape(B, L, H, 3, E).swapaxes(2, 3)
    return (
        array[:, :, 0].swapaxes(1, 2),
        array[:, :, 1].swapaxes(1, 2),
        array[:, :, 2].swapaxes(1, 2),
    )


def _draw_mask(row: Row, rng: np.random.Generator) -> Array | None:
    B, L, S = row.shape[0], row.shape[3], row.shape[4]
    dtype = numpy_dtype(row.dtype)
    if row.is_padded:
        seen = np.stack([row.attended(batch=b) for b in range(B)])[:, None]
        if row.mask == "padding":  # without causality the same for all queries
            return seen if row.is_causal else np.ascontiguousarray(seen[:, :, :1])
        return np.where(seen, 0, np.finfo(np.float32).min).astype(dtype)
    if row.mask == "bool":
        return rng.random((L, S)) < 0.7
    return rng.standard_normal((L, S), np.float32).astype(dtype) if row.mask else None
