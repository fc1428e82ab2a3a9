# SPDX-License-Identifier: MIT
"""Rules of C and OpenCL C: docs/architecture.md and docs/contributing.md.

A folder of csrc/ is a room. Includes go one way between rooms, and form no circle inside one.
"""

import re

from lint.common import circle

# The rooms whose headers a room may include, besides its own.
BELOW = {
    "base": set(),
    "opencl": {"base"},
    "attention": {"base", "opencl"},
    "diagonal": {"base", "opencl"},
    "pages": {"base", "opencl"},
    "doors": {"base", "opencl", "attention", "diagonal", "pages"},
    "python": {"base", "opencl", "attention", "diagonal", "pages", "doors"},
}
# Headers of the functions of several files.
TABLES = ("csrc/python/methods.h", "csrc/base/platform.h")
# Folders whose texts have at most LINES lines.
SHORT = ("csrc", "kernels", "python", "tests", "tools", "benchmarks", "cmake")
SUFFIXES = (".c", ".h", ".cl", ".clh", ".py", ".pyi", ".cmake", ".txt")
LINES = 600

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
FUNCTION = re.compile(r"^(static )?[^\n]*\n(ca_\w+)\(", re.MULTILINE)
FAST = re.compile(
    r"-(?:cl-fast-relaxed-math|cl-finite-math-only|cl-unsafe-math|ffast-math|ffinite-math)"
)
ATTRIBUTE = re.compile(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)")
KERNEL = re.compile(r"\b(?:__)?kernel\s+(?:\w+(?:\([^()]*\))?\s+)*?void\s+(\w+)")


def room(tree, path):
    """The folder of csrc/; None for headers that kernels share with the host."""
    inside = path.relative_to(tree.root)
    return inside.parts[1] if inside.parts[0] == "csrc" else None


def code_of(path):
    """The file without comments and the inside of strings (an include keeps its name)."""
    lines = COMMENT.sub("", path.read_text(encoding="utf-8")).splitlines()
    return "\n".join(n if n.lstrip().startswith("#") else STRING.sub('""', n) for n in lines)


def includes(path):
    """[(is it a system header, name)]"""
    found = INCLUDE.findall(COMMENT.sub("", path.read_text(encoding="utf-8")))
    return [(mark == "<", file) for mark, file in found]


def own_includes(path):
    """The project's headers that a file includes, as they are written: opencl/launch.h."""
    return [file for system, file in includes(path) if not system]


def calls(tree, pattern, *, except_in):
    """Each match of a pattern in the C of other rooms than `except_in`."""
    for path in tree.c_sources:
        if room(tree, path) != except_in:
            for match in pattern.finditer(code_of(path)):
                yield tree.name(path), match[0].strip()


def rooms_are_those_of_the_rules(tree):
    found = {room(tree, path) for path in tree.c_sources}
    for name in sorted(map(str, found ^ {None, *BELOW})):
        yield "csrc", f"the room {name} is not in the rules, or has no files"


def an_include_names_a_file_from_the_root(tree):
    for path in tree.c_sources:
        for included in own_includes(path):
            if not any((folder / included).exists() for folder in (tree.root / "csrc", tree.root)):
                yield tree.name(path), included


def includes_go_one_way_between_rooms(tree):
    for path in tree.c_sources:
        own = room(tree, path)
        if own in BELOW:
            for included in own_includes(path):
                if included.partition("/")[0] not in {own, *BELOW[own], "kernels"}:
                    yield tree.name(path), included


def includes_form_no_circle_inside_a_room(tree):
    """A file and its header are one: device.c and device.h."""
    for inside in BELOW:
        graph = {}
        for path in tree.c_sources:
            if room(tree, path) == inside:
                below = {i.rpartition(".")[0] for i in own_includes(path)}
                own = f"{inside}/{path.stem}"
                graph.setdefault(own, set()).update(below - {own})
        if found := circle(graph):
            yield f"csrc/{inside}", found


def what_a_file_offers_is_in_its_own_header(tree):
    """Else a circle of calls would show in no include."""
    tables = "".join(code_of(tree.root / table) for table in TABLES)
    for path in tree.c_sources:
        if path.suffix == ".c":
            header = path.with_suffix(".h")
            declared = tables + (code_of(header) if header.exists() else "")
            for static, function in FUNCTION.findall(code_of(path)):
                if not static and not re.search(rf"\b{function}\(", declared):
                    yield tree.name(path), function


def only_python_and_opencl_include_their_headers(tree):
    """Python.h and numpy, and the headers of OpenCL, which are the system's."""
    for path in tree.c_sources:
        for system, header in includes(path):
            of_python = header == "Python.h" or header.startswith("numpy/")
            of_opencl = header.startswith(("CL/", "OpenCL/"))
            if (of_python and room(tree, path) != "python") or (
                of_opencl and not (system and room(tree, path) == "opencl")
            ):
                yield tree.name(path), header


def only_convert_calls_numpy(tree):
    for name, call in calls(tree, re.compile(r"\bPyArray_\w+\s*\("), except_in=()):
        if not name.startswith("csrc/python/convert"):
            yield name, call


def no_python_below_the_python_layer(tree):
    yield from calls(tree, re.compile(r"\bPy[A-Z_]\w*\s*\(|\bPyObject\b"), except_in="python")


def no_opencl_above_the_opencl_layer(tree):
    """clEnqueue... and the like; the loader's table of functions is the one way in."""
    names = re.compile(r"\bcl[A-Z]\w+\s*\(|\bcl_(?:int|mem|kernel|event)\b")
    yield from calls(tree, names, except_in="opencl")


def nothing_exits_aborts_or_prints(tree):
    """But a process that ends, in platform.c."""
    names = re.compile(r"\b(?:exit|_exit|abort|printf|fprintf|puts|perror|assert)\s*\(")
    for name, call in calls(tree, names, except_in=()):
        if (name, call) != ("csrc/base/platform.c", "_exit("):
            yield name, call


def no_file_is_longer_than_600_lines(tree):
    for path in tree.files(*(f"{folder}/**/*" for folder in SHORT)):
        if path.suffix in SUFFIXES:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LINES:
                yield tree.name(path), f"{lines} lines"


def files_open_with_their_licence(tree):
    for path in [*tree.c_sources, *tree.kernel_texts]:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        if "SPDX-License-Identifier: MIT" not in first:
            yield tree.name(path), first.strip()


def strict_mathematics(tree):
    """No fast-math or finite-math flag: masks are infinities, and NaN has to show."""
    for path in [*tree.c_sources, *tree.kernel_texts, tree.root / "CMakeLists.txt"]:
        for flag in FAST.findall(path.read_text(encoding="utf-8")):
            yield tree.name(path), flag


def a_program_has_one_kernel_that_is_named_after_it(tree):
    """kernels/attention/cpu.cl holds attention_cpu; a *.clh is a part of programs."""
    for path in tree.kernel_texts:
        kernels = KERNEL.findall(ATTRIBUTE.sub("", code_of(path)))
        named = "_".join(path.relative_to(tree.root / "kernels").with_suffix("").parts)
        if kernels != ([named] if path.suffix == ".cl" else []):
            yield tree.name(path), ", ".join(kernels) or "no kernel"


def includes_of_a_kernel_stand_at_the_top(tree):
    """No text is spliced into the middle of another file: each stands alone."""
    for path in tree.files("kernels/**/*.cl", "kernels/**/*.clh", "kernels/**/*.h"):
        text = path.read_text(encoding="utf-8")
        code = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        begun = continues = False
        for line in code.splitlines():
            if begun and re.match(r'\s*#\s*include\s*"', line):
                yield tree.name(path), line.strip()
            directive = continues or re.match(r"\s*#", line)
            continues = bool(directive) and line.endswith("\\")  # a macro of several lines
            begun = begun or bool(line.strip() and not directive)


C_RULES = [
    rooms_are_those_of_the_rules,
    an_include_names_a_file_from_the_root,
    includes_go_one_way_between_rooms,
    includes_form_no_circle_inside_a_room,
    what_a_file_offers_is_in_its_own_header,
    only_python_and_opencl_include_their_headers,
    only_convert_calls_numpy,
    no_python_below_the_python_layer,
    no_opencl_above_the_opencl_layer,
    nothing_exits_aborts_or_prints,
    no_file_is_longer_than_600_lines,
    files_open_with_their_licence,
    strict_mathematics,
    a_program_has_one_kernel_that_is_named_after_it,
    includes_of_a_kernel_stand_at_the_top,
]
