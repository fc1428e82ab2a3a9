# SPDX-License-Identifier: MIT
"""Every operator with arrays of other libraries, in all arguments and in each alone."""

import clattn
import numpy as np
import pytest
from support.data import sdpa
from support.foreign import LIBRARIES, TORCH, same
from support.loops import looped
from support.tensors import CALLS, DECIDES, Call, openvino, torch_like

SCALARS = {"attention_mask": np.array(0, "f4"), "scale": np.array(0.3, "f4")}


class Attend(Call):
    """A call of KVCache.append, then one of attend, with the arrays of both."""

    def run(self, change=lambda name, array: array, device=None):
        given = {name: change(name, array) for name, array in self.arrays.items()}
        cache = clattn.KVCache(2, 3, 40, 8, device=device)
        cache.append(given["key"], given["value"], given["counts"])
        return {"result": cache.attend(given["query"], given["attn_mask"])}


DOORS = CALLS | {
    "openvino, scalars": openvino()._replace(arrays=openvino().arrays | SCALARS),
    "cache": Attend("", "query", torch_like().arrays | {"counts": np.array([33, 4])}, {}),
}
EACH = pytest.mark.parametrize("library", LIBRARIES, ids=str)
EVERY_DOOR = looped("door", DOORS.values(), ids=DOORS)


def has(library, door):
    """Whether the library has such arrays."""
    arrays = door.arrays.values()
    flat = library.name in ("ctypes", "memoryview") and any(a.ndim == 0 for a in arrays)
    return not flat and all(a.dtype in library.dtypes for a in arrays)


@EACH
@EVERY_DOOR
def test_every_door(device, library, door):
    """All results of a call are the query's library's."""
    if not has(library, door):
        return  # the library has no such arrays
    right = door.run(device=device)
    got = door.run(lambda _, a: library.of(a), device)
    assert got.keys() == right.keys()
    for name, result in got.items():
        library.check(result, right[name])


@EVERY_DOOR
def test_every_argument_alone(device, door):
    """The query, under whatever name, settles what results are; the others do not."""
    right = door.run(device=device)
    for name in door.arrays:
        got = door.run(lambda n, a: TORCH.of(a) if n == name else a, device)  # noqa: B023
        for result, array in got.items():
            decides = name == DECIDES.get(door.name, {}).get(result, door.query)
            assert (type(array) is TORCH.kind()) == decides, f"{result} with {name} of torch"
            same(array, right[result])


# ---- tensors that need gradients ----


def needing(array):
    return TORCH.of(array.copy()).requires_grad_()


@EVERY_DOOR
def test_gradients_are_refused(device, door):
    """In every argument: by name, with the advice; detached it is taken."""
    torch = pytest.importorskip("torch")
    for name, array in door.arrays.items():
        if array.dtype.kind != "f":
            continue
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(ValueError, match=rf"\b{name}") as caught:
                door.run(lambda n, a: needing(a) if n == name else a, device)  # noqa: B023
            assert ".detach()" in str(caught.value), f"{name}: {caught.value}"
        door.run(lambda n, a: needing(a).detach() if n == name else a, device)  # noqa: B023


def test_gradients_of_other_tensors(device):
    """Results of calculations, parameters, out; and where an array is copied."""
    torch = pytest.importorskip("torch")
    plain = torch.ones(3, 4)
    product = torch.ones(3, 4, requires_grad=True) * 2
    for needs in (product, torch.nn.Parameter(torch.ones(3, 4))):
        for name, arguments in (("query", (needs, plain, plain)), ("value", (plain, plain, needs))):
            with pytest.raises(ValueError, match=rf"\b{name}\b.*\.detach\(\)"):
                sdpa(*arguments, device=device)
        with pytest.raises(ValueError, match=r"\barray\b.*\.detach\(\)"):
            clattn.tensor(needs, device=device)
        with pytest.raises(ValueError, match=r"\bout\b.*\.detach\(\)"):
            sdpa(plain, plain, plain, device=device, out=needs)
    assert (product == 2).all()
