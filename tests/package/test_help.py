# SPDX-License-Identifier: MIT
"""help() and inspect.signature on everything public, as editors and notebooks show it."""

import importlib
import inspect
import pydoc
import re

import clattn
import pytest
from support.loops import looped

MODULES = (clattn, clattn.directml, clattn.flex, clattn.onnx, clattn.openvino)
OPTIONAL = ("dask", "jax", "mpi", "torch", "transformers")
TYPES = (clattn.BlockMask, clattn.Device, clattn.KVCache, clattn.Tensor)
NOT_CALLED = (clattn.DeviceError, clattn.Tensor)  # Python's exceptions have no signature either


def public_of(module):
    """The public functions and types of a module, with their names."""
    for name in module.__all__:
        if not inspect.ismodule(thing := getattr(module, name)):
            yield f"{module.__name__}.{name}", thing


def public():
    """Those of all modules that need no other package, and the public methods of the types."""
    for module in MODULES:
        yield from public_of(module)
    for kind in TYPES:
        for name, thing in inspect.getmembers(kind):
            if not name.startswith("_") and not inspect.ismemberdescriptor(thing):
                yield f"{kind.__name__}.{name}", thing


THINGS = dict(public())


def check_help(thing):
    said = pydoc.render_doc(thing, renderer=pydoc.plaintext)
    assert inspect.getdoc(thing).splitlines()[0] in said
    if not callable(thing) or thing in NOT_CALLED:
        return
    parameters = set(inspect.signature(thing).parameters) - {"self"}
    described = re.split(r"\n(?:Returns|Raises|Yields)\n", inspect.getdoc(thing))[0]
    described = described.partition("\nParameters\n")[2]
    if described:
        named = re.findall(r"\w+(?=(?:, \w+)* : )|(?<=\*\*)kwargs", described)
        assert set(named) == parameters


@looped("name", list(THINGS))
def test_help(name):
    check_help(THINGS[name])


@pytest.mark.parametrize("package", OPTIONAL)
def test_help_of_what_needs_a_package(package):
    try:
        module = importlib.import_module(f"clattn.{package}")
    except ImportError as error:
        pytest.skip(str(error))
    things = dict(public_of(module))
    assert things
    for thing in things.values():
        check_help(thing)


def test_types_have_their_methods():
    assert {"clattn.tensor", "clattn.onnx.attention", "Tensor.reshape"} <= set(THINGS)
