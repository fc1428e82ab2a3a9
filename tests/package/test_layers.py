# SPDX-License-Identifier: MIT
"""The rules of design.md that can be read off the sources as text.

A folder of csrc/ is a room. Includes go one way between rooms, and form no circle inside one.
"""

import ast
import re

import pytest
from support.helpers import ROOT

# The rooms whose headers a room may include, besides its own.
BELOW = {
    "base": set(),
    "opencl": {"base"},
    "attention": {"base", "opencl"},
    "diagonal": {"base", "opencl"},
    "doors": {"base", "opencl", "attention", "diagonal"},
    "python": {"base", "opencl", "attention", "diagonal", "doors"},
}
C_SOURCES = sorted([*ROOT.glob("csrc/**/*.[ch]"), *ROOT.glob("kernels/**/*.h")])
KERNELS = sorted(ROOT.glob("kernels/**/*.cl"))
KERNEL_TEXTS = sorted([*KERNELS, *ROOT.glob("kernels/**/*.clh")])
TEXTS = sorted(
    path
    for folder in ("csrc", "kernels", "python", "tests", "tools", "benchmarks", "cmake")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".c", ".h", ".cl", ".clh", ".py", ".pyi", ".cmake", ".txt")
)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


def name(path):
    return str(path.relative_to(ROOT))


def each(paths):
    """Make a rule for a path a test of all these files, which names every file that fails."""

    def make_test(rule):
        def test():
            failed = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    failed.append(f"{name(path)}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return make_test


def room(path):
    """The folder of csrc/; None for headers that kernels share with the host."""
    inside = path.relative_to(ROOT)
    return inside.parts[1] if inside.parts[0] == "csrc" else None


def code_of(path):
    """The file without comments and the inside of strings (an include keeps its name)."""
    text = COMMENT.sub("", path.read_text())
    lines = text.splitlines()
    return "\n".join(n if n.lstrip().startswith("#") else STRING.sub('""', n) for n in lines)


def includes(path):
    """[(is it a system header, name)]"""
    found = INCLUDE.findall(COMMENT.sub("", path.read_text()))
    return [(mark == "<", file) for mark, file in found]


def own_includes(path):
    """The project's headers that a file includes, as they are written: opencl/launch.h."""
    return [file for system, file in includes(path) if not system]


def test_there_is_something_to_look_at():
    assert {room(p) for p in C_SOURCES} == {None, *BELOW}
    assert ROOT / "kernels" / "attention" / "reference.cl" in KERNELS


@each(C_SOURCES)
def test_an_include_names_a_file_from_the_root(path):
    for included in own_includes(path):
        assert (ROOT / "csrc" / included).exists() or (ROOT / included).exists(), included


@each([p for p in C_SOURCES if room(p)])
def test_includes_go_one_way_between_rooms(path):
    for included in own_includes(path):
        other = included.partition("/")[0]
        allowed = {room(path), *BELOW[room(path)], "kernels"}
        assert other in allowed, f"{name(path)} includes {included}"


def refuse_circles(graph):
    """`graph` has the names below each name."""
    done = set()

    def visit(node, above):
        assert node not in above, " -> ".join([*above, node])
        if node not in done:
            for below in sorted(graph.get(node, ())):
                visit(below, [*above, node])
            done.add(node)

    for node in sorted(graph):
        visit(node, [])


@pytest.mark.parametrize("inside", BELOW)
def test_includes_form_no_circle_inside_a_room(inside):
    """A file and its header are one: device.c and device.h."""
    graph = {}
    for path in C_SOURCES:
        if room(path) == inside:
            below = {i.rpartition(".")[0] for i in own_includes(path)}
            own = f"{inside}/{path.stem}"
            graph.setdefault(own, set()).update(below - {own})
    refuse_circles(graph)


# Headers of the functions of several files.
TABLES = {"csrc/python/methods.h", "csrc/base/platform.h"}


@each([p for p in C_SOURCES if p.suffix == ".c"])
def test_what_a_file_offers_is_in_its_own_header(path):
    """Else a circle of calls would show in no include."""
    offered = [
        m[2]
        for m in re.finditer(r"^(static )?[^\n]*\n(ca_\w+)\(", code_of(path), re.MULTILINE)
        if not m[1]
    ]
    header = path.with_suffix(".h")
    declared = code_of(header) if header.exists() else ""
    declared += "".join(code_of(ROOT / table) for table in TABLES)
    missing = [function for function in offered if not re.search(rf"\b{function}\(", declared)]
    assert not missing, f"{name(path)}: {missing}"


@each(C_SOURCES)
def test_who_may_include_which_system_header(path):
    for system, header in includes(path):
        if header == "Python.h" or header.startswith("numpy/"):
            assert room(path) == "python", f"{path.name} includes {header}"
        if header.startswith(("CL/", "OpenCL/")):
            assert system and room(path) == "opencl", f"{path.name} includes {header}"


@each(C_SOURCES)
def test_only_convert_calls_numpy(path):
    calls = re.findall(r"\bPyArray_\w+\s*\(", code_of(path))
    assert not calls or name(path).startswith("csrc/python/convert"), calls


@each(C_SOURCES)
def test_no_python_below_the_python_layer(path):
    if room(path) != "python":
        assert not re.findall(r"\bPy[A-Z_]\w*\s*\(|\bPyObject\b", code_of(path))


@each(C_SOURCES)
def test_no_opencl_above_the_opencl_layer(path):
    """clEnqueue... and the like; the loader's table of functions is the one way in."""
    if room(path) != "opencl":
        assert not re.findall(r"\bcl[A-Z]\w+\s*\(|\bcl_(?:int|mem|kernel|event)\b", code_of(path))


@each(C_SOURCES)
def test_nothing_exits_aborts_or_prints(path):
    names = "exit|_exit|abort|printf|fprintf|puts|perror|assert"
    code = code_of(path).replace("_exit(status)", "")  # of a process that ends, in platform.c
    calls = re.findall(rf"\b(?:{names})\s*\(", code)
    assert not calls, calls


@each(TEXTS)
def test_no_file_is_longer_than_600_lines(path):
    assert len(path.read_text().splitlines()) <= 600


@each([*C_SOURCES, *KERNEL_TEXTS])
def test_files_open_with_their_licence(path):
    assert "SPDX-License-Identifier: MIT" in path.read_text().splitlines()[0]


@each([*C_SOURCES, *KERNEL_TEXTS, ROOT / "CMakeLists.txt"])
def test_strict_mathematics(path):
    """No fast-math or finite-math flag: masks are infinities, and NaN has to show."""
    flags = "cl-fast-relaxed-math|cl-finite-math-only|cl-unsafe-math|ffast-math|ffinite-math"
    assert not re.findall(rf"-(?:{flags})", path.read_text())


@each(KERNEL_TEXTS)
def test_a_program_has_one_kernel_that_is_named_after_it(path):
    """kernels/attention/cpu.cl holds attention_cpu; a *.clh is a part of programs."""
    code = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", code_of(path))
    kernels = re.findall(r"\b(?:__)?kernel\s+(?:\w+(?:\([^()]*\))?\s+)*?void\s+(\w+)", code)
    named = "_".join(path.relative_to(ROOT / "kernels").with_suffix("").parts)
    assert kernels == ([named] if path.suffix == ".cl" else [])


# Folders of python/clattn. A module in one imports from its own folder and from those named here.
# All modules outside these folders and _commands are public, and import nothing from _commands.
PYTHON_BELOW = {
    "_arguments": {"_core"},
    "_host": {"_core", "_arguments"},
    "_parts": {"_core", "_arguments", "attention"},
    "flex": {"_core", "_arguments"},
}
# clattn.show_config prints what the command `doctor` prints. __main__ starts the command line.
ABOVE_COMMANDS = {"__init__", "__main__"}


def modules_of(path):
    """What a module imports of clattn, for type checkers too: flex.graph.Node; "": clattn."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        split = (name.partition(".") for name in found)
        yield from (rest for package, _, rest in split if package == "clattn")


def imports_of(path):
    """Names under clattn that a module imports: _core, flex; "": clattn itself."""
    return (name.partition(".")[0] for name in modules_of(path))


PYTHON_PACKAGE = ROOT / "python" / "clattn"


@each(sorted(PYTHON_PACKAGE.rglob("*.py")))
def test_imports_go_one_way_between_rooms_of_the_package(path):
    inside = path.relative_to(PYTHON_PACKAGE).with_suffix("").parts[0]
    classes = {"Device", "Tensor", "DeviceError"}  # of _core
    found = set(imports_of(path)) - classes
    if inside in PYTHON_BELOW:
        assert found <= PYTHON_BELOW[inside] | {inside}, f"{name(path)} imports {sorted(found)}"
    elif inside not in {"_commands", *ABOVE_COMMANDS}:
        assert "_commands" not in found, name(path)


def test_imports_form_no_circle_inside_flex():
    """The package itself imports the names that users call, and is below nothing."""
    files = {path.stem: path for path in (PYTHON_PACKAGE / "flex").glob("*.py")}
    del files["__init__"]
    graph = {
        name: {other.split(".")[1] for other in modules_of(path) if other.startswith("flex.")}
        for name, path in files.items()
    }
    assert graph["symbols"] >= {"graph", "names"} and graph["graph"] <= set(files)
    refuse_circles(graph)
