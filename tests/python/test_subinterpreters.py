# SPDX-License-Identifier: MIT
"""clattn in sub-interpreters: refused in words, whichever kind it is; the main one goes on."""

import importlib
import sys
import sysconfig

import pytest
from support.processes import run_python

NAME = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
try:
    importlib.import_module(NAME)
except ImportError:
    pytest.skip(f"this Python has no module {NAME}", allow_module_level=True)

# Before Python 3.13, `create` takes whether to isolate; afterwards, the name of a configuration.
# A failed import leaves nothing that a second one could find.
CODE = """
import sys, importlib
interpreters = importlib.import_module(sys.argv[1])
isolated = sys.argv[2] == "isolated"
own = interpreters.create(sys.argv[2]) if sys.version_info >= (3, 13) else interpreters.create(
    isolated=isolated)
said = []
for _ in range(2):
    try:
        done = interpreters.run_string(own, "import clattn")
    except interpreters.RunFailedError as error:
        said.append(str(error))
    else:
        said.append(done and f"{done.type.__name__}: {done.msg}")
interpreters.destroy(own)
print(*said, sep="\\n")
import clattn, numpy as np
ones = np.ones((1, 1, 2, 8), np.float32)
assert (clattn.scaled_dot_product_attention(ones, ones, ones) == 1).all()
"""


@pytest.mark.parametrize("kind", ["legacy", "isolated"])
@pytest.mark.parametrize("first", ["import clattn", "import numpy", ""])
def test_sub_interpreters_are_refused(first, kind):
    """A DLPack deleter, which asks for the main interpreter, stood still in them."""
    env = {} if first else {"PYTHONDONTWRITEBYTECODE": "1"}  # a process of its own, without NumPy
    said = run_python(first + CODE, NAME, kind, env=env).stdout.splitlines()
    assert len(said) == 2 and all("ImportError" in line for line in said), said
    isolated = kind == "isolated" and sys.version_info >= (3, 12)
    by_python = isolated or sysconfig.get_config_var("Py_GIL_DISABLED")  # before clattn can
    words = "does not support loading in subinterpreters" if by_python else "in a sub-interpreter"
    assert all("clattn" in line and words in line for line in said), said
