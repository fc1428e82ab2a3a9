"""The rows of ``python -m clattn bench --gpu``: large problems, on arrays of the device."""

from dataclasses import replace

from clattn.bench.rows import Row

LEAST_LENGTH = 16  # of a row that is scaled down


def _prefill(name: str, shape: tuple[int, int, int, int, int, int], dtype: str) -> Row:
    # Half types are what matrix units multiply.
    halves = dtype != "float32"
    return Row(name, shape, dtype, limit="product" if halves else "fma", on_device=True)


def _decode(name: str, shape: tuple[int, int, int, int, int, int], dtype: str) -> Row:
    return Row(name, shape, dtype, limit="read", on_device=True)


_LONG_128 = _prefill("f16-E128", (1, 16, 16, 8192, 8192, 128), "float16")
_LONG_64 = _prefill("f16-E64", (1, 32, 32, 8192, 8192, 64), "float16")
_BRAIN_128 = _prefill("bf16-E128", (1, 16, 16, 8192, 8192, 128), "bfloat16")
_BRAIN_64 = _prefill("bf16-E64", (1, 32, 32, 8192, 8192, 64), "bfloat16")
_SINGLE_64 = _prefill("f32-E64", (2, 16, 16, 4096, 4096, 64), "float32")
_SHORT = _prefill("f16-E128-2k", (4, 16, 16, 2048, 2048, 128), "float16")

# Keys and values of the decode rows: 256 MiB, of decode-64M the 64 MiB that its name says.
GPU_ROWS = (
    _LONG_128,
    replace(_LONG_128, name="f16-E128-causal", is_causal=True),
    _SHORT,
    replace(_SHORT, name="f16-E128-2k-causal", is_causal=True),
    _LONG_64,
    replace(_LONG_64, name="f16-E64-causal", is_causal=True),
    _prefill("f16-E64-2k", (4, 32, 32, 2048, 2048, 64), "float16"),
    _BRAIN_128,
    replace(_BRAIN_128, name="bf16-E128-causal", is_causal=True),
    _BRAIN_64,
    replace(_BRAIN_64, name="bf16-E64-causal", is_causal=True),
    _prefill("f16-E80-2k", (4, 16, 16, 2048, 2048, 80), "float16"),
    _prefill("f16-E256-2k", (4, 8, 8, 2048, 2048, 256), "float16"),
    _prefill("f16-gqa", (1, 32, 8, 4096, 4096, 128), "float16"),
    replace(_LONG_128, name="f16-window", is_causal=True, window=1024),
    replace(_SHORT, name="f16-bool-mask", mask="bool"),
    _SINGLE_64,
    replace(_SINGLE_64, name="f32-E64-causal", is_causal=True),
    _prefill("f32-E128", (1, 16, 16, 4096, 4096, 128), "float32"),
    _decode("decode-f16", (2, 32, 32, 1, 8192, 128), "float16"),
    _decode("decode-f16-gqa", (8, 32, 8, 1, 8192, 128), "float16"),
    _decode("decode-f16-gqa-8", (8, 64, 8, 1, 8192, 128), "float16"),
    _decode("decode-bf16-gqa", (8, 32, 8, 1, 8192, 128), "bfloat16"),
    _decode("decode-64M", (1, 32, 8, 1, 16384, 128), "float16"),
    _decode("decode-f16-gqa-4", (8, 32, 8, 4, 8192, 128), "float16"),
    _decode("decode-f32", (2, 32, 32, 1, 4096, 128), "float32"),
    # The same problem again with arrays of the host: what transfers cost.
    replace(_SHORT, name="f16-E128-2k-host", on_device=False),
)


def scaled(row: Row, divisor: int) -> Row:
    """Return the row with one element of a batch and its lengths divided."""
    B, Hq, Hk, L, S, E = row.shape
    if divisor == 1:
        return row

    def shorter(length: int) -> int:
        return min(length, max(length // divisor, LEAST_LENGTH))

    window = None if row.window is None else shorter(row.window)
    return replace(row, shape=(min(B, 2), Hq, Hk, shorter(L), shorter(S), E), window=window)
