# SPDX-License-Identifier: MIT
"""help() and inspect.signature on everything public, as editors and notebooks show it."""

import inspect
import pydoc
import re

import clattn
from support.loops import looped

MODULES = (clattn, clattn.directml, clattn.flex, clattn.onnx, clattn.openvino)
TYPES = (clattn.BlockMask, clattn.Device, clattn.KVCache, clattn.Tensor)
NOT_CALLED = (clattn.DeviceError, clattn.Tensor)  # Python's exceptions have no signature either


def public():
    """The public functions and types, and the public methods of the types, with their names."""
    for module in MODULES:
        for name in module.__all__:
            if not inspect.ismodule(thing := getattr(module, name)):
                yield f"{module.__name__}.{name}", thing
    for kind in TYPES:
        for name, thing in inspect.getmembers(kind):
            if not name.startswith("_") and not inspect.ismemberdescriptor(thing):
                yield f"{kind.__name__}.{name}", thing


THINGS = dict(public())


@looped("name", list(THINGS))
def test_help(name):
    thing = THINGS[name]
    said = pydoc.render_doc(thing, renderer=pydoc.plaintext)
    assert inspect.getdoc(thing).splitlines()[0] in said
    if not callable(thing) or thing in NOT_CALLED:
        return
    parameters = set(inspect.signature(thing).parameters) - {"self"}
    described = re.split(r"\n(?:Returns|Raises|Yields)\n", inspect.getdoc(thing))[0]
    described = described.partition("\nParameters\n")[2]
    if described:
        assert set(re.findall(r"\w+(?=(?:, \w+)* : )", described)) == parameters


def test_types_have_their_methods():
    assert {"clattn.tensor", "clattn.onnx.attention", "Tensor.reshape"} <= set(THINGS)
