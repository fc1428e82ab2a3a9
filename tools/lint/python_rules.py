# SPDX-License-Identifier: MIT
"""Rules of Python files: which modules of the package may import which, and where modules are.

import-linter cannot tell `from clattn import _core` from `import clattn`, because `_core` is no
Python file.
"""

import ast
import re

from lint.common import circle

# Folders of python/clattn. A module in one imports from its own folder and from those named here.
# All modules outside these folders and _commands are public, and import nothing from _commands.
BELOW = {
    "_arguments": {"_core"},
    "_caches": {"_core", "_arguments"},
    "_host": {"_core", "_arguments"},
    "_parts": {"_core", "_arguments", "attention", "gradients", "varlen", "flex"},
    "flex": {"_core", "_arguments"},
}
# clattn.show_config prints what the command `doctor` prints. __main__ starts the command line.
ABOVE_COMMANDS = {"__init__", "__main__"}
CLASSES = {"Device", "Tensor", "DeviceError"}  # of _core


def imports_of(path):
    """What a module imports of clattn, for type checkers too: flex.graph.Node; "": clattn."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        split = (name.partition(".") for name in found)
        yield from (rest for package, _, rest in split if package == "clattn")


def imports_go_one_way_between_rooms_of_the_package(tree):
    for path in tree.modules:
        inside = path.relative_to(tree.package).with_suffix("").parts[0]
        found = {name.partition(".")[0] for name in imports_of(path)} - CLASSES
        wrong = set()
        if inside in BELOW:
            wrong = found - BELOW[inside] - {inside}
        elif inside not in {"_commands", *ABOVE_COMMANDS}:
            wrong = found & {"_commands"}
        for name in sorted(wrong):
            yield tree.name(path), f"imports {name or 'clattn'}"


def imports_form_no_circle_inside_flex(tree):
    """The package itself imports the names that users call, and is below nothing."""
    files = {path.stem: path for path in (tree.package / "flex").glob("*.py")}
    del files["__init__"]
    graph = {
        name: {other.split(".")[1] for other in imports_of(path) if other.startswith("flex.")}
        for name, path in files.items()
    }
    if found := circle(graph):
        yield "python/clattn/flex", found


def paths_of_modules_come_from_outside(tree):
    """From PYTHONPATH, which a tool sets for its children, or from `pythonpath` of pytest."""
    for path in tree.files("tools/**/*.py", "tests/**/*.py", "benchmarks/**/*.py"):
        text = path.read_text(encoding="utf-8")
        for found in re.findall(r"^\s*(sys\.path(?:\.\w+|\[:))", text, re.MULTILINE):
            yield tree.name(path), found


def a_check_says_what_it_compares(tree):
    """check_attention, check_onnx, ...: nobody has to look where `check` comes from."""
    plain = re.compile(
        r"^def check\(|^\s*from \S+ import .*(?:\bcheck\b|\bcheck_\w+ as \w+)", re.MULTILINE
    )
    for path in tree.files("tools/**/*.py", "tests/**/*.py", "benchmarks/**/*.py"):
        text = path.read_text(encoding="utf-8")
        for found in plain.findall(text):
            yield tree.name(path), found.strip()


PYTHON_RULES = [
    imports_go_one_way_between_rooms_of_the_package,
    imports_form_no_circle_inside_flex,
    paths_of_modules_come_from_outside,
    a_check_says_what_it_compares,
]
