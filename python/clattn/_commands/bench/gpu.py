"""The rows of ``bench --gpu``: forward calls, backward passes, sequences, pages and codes."""

from collections.abc import Sequence

from clattn import Device
from clattn._commands.bench import contest
from clattn._commands.bench.peers import Call
from clattn._commands.bench.rows import GPU_ROWS, Problem, Row
from clattn._commands.bench.serving import ServeRow, gpu_row, serve_calls
from clattn._commands.bench.training import backward_call


def _backward(name: str, heads: int, E: int, dtype: str = "float16") -> list[Row]:
    shape = (1, heads, heads, 4096, 4096, E)
    row = {"dtype": dtype, "limit": "product", "on_device": True, "trains": "backward"}
    return [
        Row(f"backward-{name}{word}", shape, is_causal=bool(word), **row)  # type: ignore[arg-type]
        for word in ("", "-causal")
    ]


# As much work as the forward rows of (4, 16, 4096, E) and (4, 32, 4096, E).
BACKWARD_ROWS = (
    *_backward("f16-E128", 64, 128),
    *_backward("f16-E64", 128, 64),
    *_backward("bf16-E128", 64, 128, "bfloat16"),
    *_backward("bf16-E64", 128, 64, "bfloat16"),
)

# Prompts of 32,768 tokens in all, and the last 512 rows of sequences whose other keys are cached.
_PROMPTS = tuple(
    (n, n) for n in (8192, 6144, 4096, 4096, 3072, 2048, 2048, 1024, 1024, 512, 256, 256)
)
_CHUNKS = ((512, 8192),) * 8
# A row each: of sequences of 16 to 8,192 keys, and of equal ones.
_STEPS = tuple((1, round(16 * 512 ** (n / 63))) for n in range(64))
_EQUAL = ((1, 8192),) * 8
_HEADS, _SMALL_HEADS, _GROUPS = (16, 16, 128), (32, 32, 64), (32, 8, 128)
PAGE_SIZES = 16, 64, 256


def _codes(name: str, code: str) -> ServeRow:
    """Return a row whose codes have about as many bytes as the float16 keys of _EQUAL."""
    return gpu_row(name, ((1, 8192),) * 16, _GROUPS, limit="read", page_size=64, code=code)


SEQUENCE_ROWS = (
    gpu_row("ragged-f16-E128", _PROMPTS, _HEADS, limit="product"),
    gpu_row("ragged-f16-E64", _PROMPTS, _SMALL_HEADS, limit="product"),
    gpu_row("ragged-bf16-gqa", _PROMPTS, _GROUPS, limit="product", dtype="bfloat16"),
    *(gpu_row(f"ragged-pages-{size}", _CHUNKS, _GROUPS, limit="product", page_size=size)
      for size in PAGE_SIZES),
    gpu_row("decode-ragged", _STEPS, _GROUPS, limit="read"),
    *(gpu_row(f"decode-pages-{size}", _EQUAL, _GROUPS, limit="read", page_size=size)
      for size in PAGE_SIZES),
    _codes("decode-int8", "int8"),
    _codes("decode-float8", "float8_e4m3fn"),
)  # fmt: skip

ALL_GPU_ROWS: Sequence[Row] = (*GPU_ROWS, *BACKWARD_ROWS, *SEQUENCE_ROWS)


def gpu_calls(problem: Problem, device: Device) -> tuple[Call, dict[str, Call]]:
    """Return clattn's call of a row for GPUs, and those that it stands beside."""
    if isinstance(problem.row, ServeRow):
        return serve_calls(problem, device)
    if problem.row.trains:
        return backward_call(problem, device), {}
    return contest.clattn_calls(problem, device)
