"""What `clattn.KVCache` and `clattn.PagedKVCache` share: their sizes, and how rows are kept."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from clattn._arguments.integers import head_size_of, size
from clattn._caches.rows import kept_as, make_core, scales_of

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import DTypeLike

    from clattn import _core
    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._core import Device, Tensor

__all__ = ["Cache", "renew_locks"]


class Cache:
    """Keys and values in pages: Tensors (num_pages, Hk, page_size, …) of a device."""

    __slots__ = ("__weakref__", "_kept", "_sizes", "_state")

    _state: _core.Cache
    _kept: str | np.dtype[Any]
    _sizes: tuple[int, int]

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None,
        dtype: DTypeLike,
        key_scale: float | Array,
        value_scale: float | Array,
        device: DeviceLike | None,
    ) -> None:
        heads = size(num_kv_heads, "num_kv_heads", 1)
        head_size = head_size_of(head_size, "head_size")
        v_head_size = head_size if v_head_size is None else head_size_of(v_head_size, "v_head_size")
        self._sizes = head_size, v_head_size
        self._kept = kept = kept_as(dtype)
        scales = (
            scales_of(key_scale, "key_scale", heads, kept),
            scales_of(value_scale, "value_scale", heads, kept),
        )
        self._state = make_core((num_pages, heads, page_size), self._sizes, kept, scales, device)
        _alive.add(self)

    def _renew_locks(self) -> None:
        """Make locks anew in a forked child, where those who held them do not exist."""
        self._state.renew_lock()

    def _shown(self, rows: Tensor) -> Tensor:
        """Return what the properties below show of rows (num_pages, Hk, page_size, …)."""
        return rows

    def _shown_scales(self, scales: Tensor | None) -> Tensor | None:
        """Return the same of scales: those of float8 belong to no rows."""
        return scales if scales is None or scales.ndim == 1 else self._shown(scales)

    @property
    def key(self) -> Tensor:
        """The keys, a view of the same memory, or their codes; shapes are in the class's notes."""
        return self._shown(self._state.key)

    @property
    def value(self) -> Tensor:
        """The values, or their codes: as `key`."""
        return self._shown(self._state.value)

    @property
    def key_scale(self) -> Tensor | None:
        """The scales of keys, float32; None where keys are no codes."""
        return self._shown_scales(self._state.key_scale)

    @property
    def value_scale(self) -> Tensor | None:
        """The scales of values: as `key_scale`."""
        return self._shown_scales(self._state.value_scale)

    @property
    def key_offset(self) -> Tensor | None:
        """What is added to a code of "int4" times its scale, of the shape of `key_scale`."""
        return self._shown_scales(self._state.key_offset)

    @property
    def value_offset(self) -> Tensor | None:
        """What is added to a value: as `key_offset`."""
        return self._shown_scales(self._state.value_offset)

    @property
    def num_kv_heads(self) -> int:
        """The number of key and value heads, Hk."""
        return self._state.key.shape[1]

    @property
    def head_size(self) -> int:
        """The size of a key, E."""
        return self._sizes[0]

    @property
    def v_head_size(self) -> int:
        """The size of a value, Ev."""
        return self._sizes[1]

    @property
    def dtype(self) -> str | np.dtype[Any]:
        """How keys and values are kept: a float dtype, or the word for codes."""
        return self._kept

    @property
    def device(self) -> Device:
        """The device that holds keys and values."""
        return self._state.key.device

    def _show(self, **sizes: Any) -> str:
        """Return a text of the sizes, those of a subclass first, of dtype and device."""
        known = sizes | {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "v_head_size": self.v_head_size,
            "dtype": self.dtype,
            "device": f"'{self.device.type}: {self.device.name}'",
        }
        shown = ", ".join(f"{name}={value}" for name, value in known.items())
        return f"clattn.{type(self).__name__}({shown})"


_alive: weakref.WeakSet[Cache] = weakref.WeakSet()


def renew_locks() -> None:
    """Make the locks of all caches anew, in a forked child."""
    for cache in _alive:
        cache._renew_locks()
