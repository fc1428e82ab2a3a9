from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NoReturn, Protocol, SupportsIndex, final

import numpy as np
from numpy.typing import DTypeLike

from clattn._arguments.arrays import Array, ArrayT, DeviceLike
from clattn._arguments.options import Window

# text, has_score, has_mask, numbers, tables
_Mods = tuple[str, bool, bool, tuple[float, ...], tuple[Array, ...]]

__version__: str
MOST_HEAD_SIZE: int

class DeviceError(RuntimeError): ...
class SettingError(ValueError): ...

@final
class Device:
    @property
    def name(self) -> str: ...
    @property
    def vendor(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def driver_version(self) -> str: ...
    @property
    def c_version(self) -> str: ...
    @property
    def type(self) -> Literal["gpu", "accelerator", "cpu"]: ...
    @property
    def compute_units(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def max_allocation(self) -> int: ...
    @property
    def local_memory(self) -> int: ...
    @property
    def float_width(self) -> int: ...
    @property
    def float64(self) -> bool: ...
    @property
    def float16(self) -> bool: ...
    @property
    def memory_mode(self) -> Literal["svm", "host", "copy"]: ...
    @property
    def nvidia_capability(self) -> int: ...
    @property
    def usable(self) -> bool: ...
    @property
    def reason(self) -> str | None: ...
    def _repr_html_(self) -> str: ...
    def __copy__(self) -> Device: ...
    def __deepcopy__(self, memo: dict[int, Any], /) -> Device: ...
    @staticmethod
    def from_pyopencl(queue: Any, /) -> Device: ...

@final
class Tensor:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def device(self) -> Device: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def T(self) -> Tensor: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    def __getitem__(self, key: Any, /) -> Tensor: ...
    def __contains__(self, element: object, /) -> NoReturn: ...
    def __bool__(self) -> NoReturn: ...
    def __copy__(self) -> Tensor: ...
    def __deepcopy__(self, memo: dict[int, Any], /) -> Tensor: ...
    def __reduce__(self) -> NoReturn: ...
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...
    def reshape(self, *shape: int | Sequence[int]) -> Tensor: ...
    def transpose(self, *axes: int | Sequence[int]) -> Tensor: ...
    def to(self, device: DeviceLike | None, /) -> Tensor: ...
    def numpy(self) -> np.ndarray: ...
    def _repr_html_(self) -> str: ...
    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

device_override: ContextVar[Device]
base_and_sum: object
only_check: object
_end: object  # the capsule that waits for calls when the interpreter ends

def tunables() -> tuple[list[str], dict[str, dict[str, list[int]]]]: ...
def tune(device: Device, class_: str, variant: str, knobs: dict[str, int], /) -> None: ...
def tuned(device: Device, /) -> list[tuple[str, str, dict[str, int]]]: ...
def kernels_identity() -> str: ...
def force(kernel: str = "", local_memory: str = "", trials: str = "", /) -> None: ...
def lacks(device: Device, /) -> dict[str, str]: ...
def is_known(device: Device, /) -> bool: ...
def fast_variants(device: Device, dtype: str, /) -> list[str]: ...
def try_variant(
    device: Device,
    what: str,
    word: str,
    dtype: str,
    value_dtype: str,
    head_size: int,
    v_head_size: int,
    anew: bool,
    /,
) -> str | None: ...
def tensor(array: Array, device: DeviceLike | None, /) -> Tensor: ...
def host_array(array: Array, name: str, /) -> np.ndarray: ...
def synchronize(device: DeviceLike | None, /) -> None: ...
def memory_stats(device: DeviceLike | None, /) -> dict[str, int]: ...
def empty_cache(device: DeviceLike | None, /) -> None: ...
def empty(shape: Sequence[int], dtype: DTypeLike, device: DeviceLike | None, /) -> Tensor: ...

class _Hold(Protocol):
    def __enter__(self) -> _Hold: ...
    def __exit__(self, *raised: object) -> None: ...

# Of KVCache and PagedKVCache: csrc/python/cache.h.
@final
class Cache:
    def __new__(
        cls,
        codes: int,
        head_size: int,
        v_head_size: int,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
        key_offset: Tensor | None,
        value_offset: Tensor | None,
        /,
    ) -> Cache: ...
    def count_rows(self, key: Array, value: Array, /) -> int: ...
    def write_rows(self, key: Array, value: Array, places: np.ndarray, /) -> None: ...
    def copy_rows(self, moves: np.ndarray, /) -> None: ...
    def hold(self, word: str, name: str, /) -> _Hold: ...
    def append(self, key: Array, value: Array, counts: np.ndarray | None, /) -> None: ...
    def attend(
        self,
        query: Array,
        *,
        attn_mask: Array | None,
        is_causal: bool,
        scale: float | None,
        window: Window,
        softcap: float,
        return_lse: bool,
        out: Array | None,
        mods: _Mods | None,
    ) -> Any: ...
    def truncate(self, n: int | np.ndarray, /) -> None: ...
    def reorder(self, indices: np.ndarray, /) -> None: ...
    def copy_from(self, cache: Cache, /) -> None: ...
    def renew_lock(self) -> None: ...
    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...
    @property
    def key_scale(self) -> Tensor | None: ...
    @property
    def value_scale(self) -> Tensor | None: ...
    @property
    def key_offset(self) -> Tensor | None: ...
    @property
    def value_offset(self) -> Tensor | None: ...
    @property
    def length(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...

def all_devices() -> list[Device]: ...
def find_device(device: DeviceLike | None, /) -> Device: ...
def libraries() -> list[bytes]: ...
def loader_of(path: bytes, /) -> bytes | None: ...
def loader() -> bytes | None: ...
def after_fork() -> None: ...
def adopt_queue(queue: int, /) -> Device: ...
def adopt_buffer(
    device: Device,
    buffer: int,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DTypeLike,
    owner: object,
    name: str,
    /,
) -> Tensor: ...
def set_default_device(device: DeviceLike | None, /) -> None: ...
def built_programs() -> tuple[int, float]: ...

# For tests: the kernels that this thread has launched since it asked last, in their order, device
# by device; of each the name, the macros and the number of work-groups. Probes and trials count
# too. A device remembers the last 256 kernels that any thread has launched.
def launched() -> list[tuple[str, dict[str, int], int]]: ...
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    softcap: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    device: DeviceLike | None = None,
    sinks: Array | None = None,
    query_offset: int | np.ndarray = 0,
    return_weights: bool = False,
    layout: str = "BHLE",
    mods: _Mods | None = None,
    block_mask: tuple[Tensor, int, int, tuple[int, int], bool, bool] | None = None,
) -> Any: ...
def scaled_dot_product_attention_backward(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    softcap: float = 0.0,
    seed: int | None = None,
    out: tuple[Array | None, ...] | None = None,
    device: DeviceLike | None = None,
    sinks: Array | None = None,
    query_offset: int | np.ndarray = 0,
    layout: str = "BHLE",
    mods: _Mods | None = None,
    block_mask: tuple[Tensor, int, int, tuple[int, int], bool, bool] | None = None,
    grad_output: Array | None = None,
    output: Array | None = None,
    lse: Array | None = None,
    grad_lse: Array | None = None,
    needs: tuple[bool, ...] | None = None,
    captured: tuple[tuple[Any, int, tuple[int, ...], int], ...] | None = None,
) -> tuple[Any, ...]: ...
def varlen_attn(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    softcap: float = 0.0,
    seed: int | None = None,
    out: Array | None = None,
    device: DeviceLike | None = None,
    sinks: Array | None = None,
    query_offset: int | np.ndarray = 0,
    layout: str = "BHLE",
    mods: _Mods | None = None,
    block_mask: tuple[Tensor, int, int, tuple[int, int], bool, bool] | None = None,
    return_lse: bool = False,
    cu_seq_q: np.ndarray | None = None,
    cu_seq_k: np.ndarray | None = None,
    seqused_k: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    heads_first: bool = False,
    rows_are_last: bool = False,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
    key_offset: Array | None = None,
    value_offset: Array | None = None,
    value_size: int = 0,
    code: str | None = None,
) -> Any: ...
def find_blocks(
    mods: _Mods,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    block_rows: int,
    block_keys: int,
    device: DeviceLike | None,
    /,
) -> Tensor: ...
def onnx_attention(
    Q: Array,
    K: Array,
    V: Array,
    attn_mask: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    nonpad_kv_seqlen: Array | None,
    is_causal: int,
    kv_num_heads: int | None,
    q_num_heads: int | None,
    *,
    qk_matmul_output_mode: int,
    scale: float | None,
    softcap: float,
    softmax_precision: int | None,
    left_window_size: int,
    right_window_size: int,
    opset: int,
    pre_errata: bool,
    return_qk: bool,
    device: DeviceLike | None,
) -> tuple[Any, ...]: ...
def onnx_tensor_scatter(
    past_cache: ArrayT,
    update: Array,
    write_indices: Array | None,
    axis: int,
    mode: str,
    device: DeviceLike | None,
    /,
) -> ArrayT: ...
def openvino_scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    attention_mask: Array | np.generic | None,
    scale: float | Array | np.generic | None,
    causal: bool,
    device: DeviceLike | None,
) -> ArrayT: ...
def diagonal_matrix(
    input_or_shape: Array | Sequence[int],
    *,
    value: float,
    begin: int,
    end: int,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    device: DeviceLike | None = None,
) -> Any: ...
def eye(
    n: int, m: int | None, dtype: DTypeLike | None, device: DeviceLike | None, /
) -> np.ndarray: ...
def tril(input: ArrayT, diagonal: int, out: Array | None, /) -> ArrayT: ...
def triu(input: ArrayT, diagonal: int, out: Array | None, /) -> ArrayT: ...
def directml_diagonal_matrix1(
    input: Array | None,
    sizes: Sequence[int] | None,
    dtype: DTypeLike | None,
    value: float,
    diagonal_fill_begin: int,
    diagonal_fill_end: int,
    device: DeviceLike | None,
    /,
) -> Any: ...
def directml_diagonal_matrix(
    input: Array | None,
    sizes: Sequence[int] | None,
    dtype: DTypeLike | None,
    value: float,
    offset: int,
    device: DeviceLike | None,
    /,
) -> Any: ...
def directml_multihead_attention(
    query: Array | None,
    key: Array | None,
    value: Array | None,
    stacked_query_key: Array | None,
    stacked_key_value: Array | None,
    stacked_query_key_value: Array | None,
    bias: Array | None,
    mask: Array | None,
    relative_position_bias: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    *,
    mask_type: str,
    scale: float,
    mask_filter_value: float,
    head_count: int,
    return_present: bool,
    device: DeviceLike | None,
) -> tuple[Any, ...]: ...
