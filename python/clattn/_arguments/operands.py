"""The arrays of a call of attention, as functions hand them on that treat them alike."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DIMENSIONS", "FACTORS", "Operands"]

# Query, key and value, which have one dtype; a kernel multiplies them.
FACTORS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Operands:
    """The arrays of a call of `clattn.scaled_dot_product_attention`; None: not given.

    Metadata have the last dimensions of each; those before them broadcast.
    """

    query: Any = field(metadata={"last": "Hq L E"})
    key: Any = field(metadata={"last": "Hk S E"})
    value: Any = field(metadata={"last": "Hk S Ev"})
    attn_mask: Any = field(default=None, metadata={"last": "Hq L S"})
    sinks: Any = field(default=None, metadata={"last": "Hq"})

    def given(self) -> dict[str, Any]:
        """Return the arrays by their names, without the optional ones that are not given."""
        named = {name: getattr(self, name) for name in DIMENSIONS}
        return {name: a for name, a in named.items() if a is not None or name in FACTORS}

    def map(self, change: Callable[[Any], Any], *names: str) -> Operands:
        """Return the operands with some of them changed, all by default."""
        given = self.given()
        return replace(self, **{name: change(given[name]) for name in names or given})

    def cut(self, dimension: str, part: slice) -> Operands:
        """Return views of a part of a dimension, of each operand that has it."""
        views = {}
        for name, array in self.given().items():
            if dimension in DIMENSIONS[name]:
                after = DIMENSIONS[name][::-1].index(dimension)  # dimensions behind it
                views[name] = array[(..., part, *[slice(None)] * after)]
        return replace(self, **views)


# The last dimensions of each operand, by its name.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    one.name: tuple(one.metadata["last"].split()) for one in fields(Operands)
}
