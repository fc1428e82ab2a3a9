# SPDX-License-Identifier: MIT
"""tools/lint finds what breaks each of its rules, planted into a copy of the checkout."""

import contextlib
import io
import shutil

import pytest
from lint.command import RULES, main
from support.processes import ROOT

COPIED = ("csrc", "kernels", "python", "docs", "tests", "tools", "benchmarks", "cmake",
          "third_party", ".ci")  # fmt: skip
LEFT_OUT = shutil.ignore_patterns("__pycache__", "site", "*.ipynb", "*.png")

# What is put at the end of a file, and the finding. A file that does not exist is made.
PLANTED = [
    ("csrc/novel/a.c", "", "csrc: the room novel"),
    ("csrc/base/fold.c", '#include "fold.h"', "csrc/base/fold.c: fold.h (an include names"),
    ("csrc/base/fold.c", '#include "opencl/info.h"', "csrc/base/fold.c: opencl/info.h"),
    ("csrc/base/fold.h", '#include "base/status.h"', ""),
    ("csrc/base/status.h", '#include "base/fold.h"', "csrc/base: base/fold -> base/status"),
    ("csrc/base/fold.c", "int\nca_hidden(void)\n{\n}", "csrc/base/fold.c: ca_hidden (what a file"),
    ("csrc/base/fold.c", "#include <Python.h>", "csrc/base/fold.c: Python.h (only"),
    ("csrc/base/fold.c", "#include <CL/cl.h>", "csrc/base/fold.c: CL/cl.h (only"),
    ("csrc/opencl/cache.c", '#include "CL/cl.h"', "csrc/opencl/cache.c: CL/cl.h (only"),
    ("csrc/python/cache.c", "PyArray_NDIM(x);", "csrc/python/cache.c: PyArray_NDIM( (only"),
    ("csrc/base/fold.c", "PyErr_Clear();", "csrc/base/fold.c: PyErr_Clear( (no python"),
    ("csrc/base/fold.c", "clFinish(queue);", "csrc/base/fold.c: clFinish( (no opencl"),
    ("csrc/base/fold.c", "cl_mem buffer;", "csrc/base/fold.c: cl_mem (no opencl"),
    ("csrc/base/fold.c", 'printf("x");', "csrc/base/fold.c: printf( (nothing exits"),
    ("csrc/base/fold.c", "_exit(status);", "csrc/base/fold.c: _exit( (nothing exits"),
    ("tests/long.py", "\n" * 600, "tests/long.py: 601 lines (no file"),
    ("kernels/support/bare.clh", "int x;", "kernels/support/bare.clh: int x; (files open"),
    ("CMakeLists.txt", "# -ffast-math", "CMakeLists.txt: -ffast-math (strict"),
    ("kernels/probe/two.cl", "kernel void probe_2(void) {}", "kernels/probe/two.cl: probe_2"),
    ("kernels/support/view.clh", '#include "kernels/a.clh"',
     'kernels/support/view.clh: #include "kernels/a.clh" (includes of a kernel'),
    ("kernels/probe/two.cl", "", "docs/programs.md: kernels/probe/two.cl (the tree of k"),
    ("csrc/novel/a.c", "", "docs/architecture.md: csrc/novel/ (the tree of r"),
    ("python/clattn/_arguments/options.py", "import clattn", "options.py: imports clattn"),
    ("python/clattn/_host/html.py", "from clattn import flex", "html.py: imports flex"),
    ("python/clattn/cache.py", "import clattn._commands.main", "cache.py: imports _commands"),
    ("python/clattn/flex/names.py", "import clattn.flex.compile", "flex: compile -> "),
    ("tests/novel.py", "def check(x): pass", "tests/novel.py: def check( (a check says"),
    ("tests/alias.py", "from a import check_a as b", "alias.py: from a import check_a as b (a"),
    ("tools/novel_paths.py", "sys.path.append('x')", "sys.path.append (paths of modules"),
    ("docs/design.md", "`tools/none.py`", "docs/design.md: tools/none.py (paths"),
    ("docs/design.md", "From `csrc/base/fold.c`:\n\n```c\nint none;\n```",
     "docs/design.md: csrc/base/fold.c: int none; (what pages"),
    ("docs/cache.md", "From `csrc/base/fold.c`, changed:\n\n```diff\n none\n+int x;\n```",
     "docs/cache.md: csrc/base/fold.c: none (what pages"),
    ("docs/masks.md", "From `csrc/base/fold.c`:\n\n```c\n}\n```",
     "docs/masks.md: csrc/base/fold.c: } (what pages"),
    ("tools/novel.py", "", "docs/contributing.md: tools/novel.py (the guide"),
    ("tools/novel/__main__.py", "", "docs/contributing.md: tools/novel (the guide"),
    ("README.md", "## Run it\n", "README.md: blocks below 'Run it'"),
    ("README.md", "clattn[none]", "README.md: none (pages install"),
    ("README.md", "`pip install clattn`", "README.md: clattn is installed, not . (everything"),
    ("docs/masks.md", "by the makers", "docs/masks.md: makers; vendor (pages have"),
    ("docs/masks.md", "`python -m none`", "docs/masks.md: python -m none, in python"),
    ("docs/masks.md", "```sh\npython tools/a.py && none\n```", "docs/masks.md: tools/a.py, in"),
    ("docs/cache.md", "```sh\npython tools/a.py && none\n```", "docs/cache.md: none, in none"),
    ("docs/masks.md", "```sh\nX=1 pip install no-such\n```", "pip install no-such, in"),
    ("docs/masks.md", "```sh\napt-get install none\n```", "docs/masks.md: apt-get install none"),
    ("docs/masks.md", '`pip install ".[absent]"`', "docs/masks.md: the extra absent, in"),
    ("docs/masks.md", "`pytest tests/a.py::test_b`", "docs/masks.md: tests/a.py, in pytest"),
    ("python/clattn/novel.py", '"pip install clattn"', "python/clattn/novel.py: clattn is in"),
    ("SECURITY.md", "| `none` | pytest |", "SECURITY.md: the extra none (every"),
    ("docs/reference/attention.md", ".. autofunction:: novel", "reference: clattn.flex.novel"),
]  # fmt: skip
# What is replaced in a file.
CHANGED = [
    ("docs/architecture.md", "csrc/attention/problem.c", "csrc/attention/none.c",
     "(the way of a call"),
    (".git_archival.txt", "match=", "match=v", ".git_archival.txt: v"),
    ("python/clattn/_host/extras.py", '"jax>=0.6"', '"jax"', "extras.py: the extra jax needs"),
    ("csrc/python/runtime.c", "intel-opencl-rt ", "", "runtime.c: the extra cpu needs"),
    ("docs/devices.md", "| NVIDIA H100", "| NVIDIA H", "README.md: its table is not that"),
]  # fmt: skip


@pytest.fixture(scope="module")
def status_and_lines(tmp_path_factory):
    """The exit status and the output for a copy of the checkout with all these faults."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=LEFT_OUT)
    for path in [*ROOT.glob("*.*"), ROOT / ".git_archival.txt"]:
        if path.is_file():
            shutil.copy(path, root)
    for name, text, _ in PLANTED:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    for name, before, after, _ in CHANGED:
        path = root / name
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = main(root)
    return status, said.getvalue().splitlines()


@pytest.mark.parametrize("wrong", [*(row[2] for row in PLANTED if row[2]),
                                   *(row[3] for row in CHANGED)])  # fmt: skip
def test_a_planted_fault_is_found(status_and_lines, wrong):
    assert any(wrong in line for line in status_and_lines[1])


def test_each_rule_has_a_planted_fault(status_and_lines):
    status, (*lines, last) = status_and_lines
    assert status == 1
    assert last == f"lint: {len(RULES)} rules, {len(lines)} findings"
    told = {line.rpartition(" (")[2].rstrip(")") for line in lines}
    assert told == {rule.__name__.replace("_", " ") for rule in RULES}
