# SPDX-License-Identifier: MIT
"""Rules of commands: those that pages and messages name are there, and install what there is."""

import re
import shlex
import tomllib

# Code in a page: blocks of a shell, and words between backquotes that begin like a command.
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(
    r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:sudo |[./\w]*/bin/)?"
    r"(?:python[\d.]*|pip|apt-get|pytest|dask|mpirun|taskset|tools/\w+\.sh|\.ci/run) [^`]+)`"
)
PLACEHOLDER = re.compile(r"^(?:…|[A-Z]+|<.*>|.*\*.*|\$.*)$")

# Programs that are looked at no further.
PROGRAMS = {
    ".", "basedpyright", "cat", "cd", "cmake", "cp", "dask", "docker", "git", "ln", "mkdir",
    "mpirun", "mypy", "pip-audit", "podman", "pre-commit", "pytest", "ruff", "sphinx-build",
    "taskset", "usermod",
}  # fmt: skip
MODULES = {"clattn", "mypy.stubtest", "pip", "pytest", "sphinx", "venv"}
# Packages of Debian 12, and of PyPI beside those of pyproject.toml.
DEBIAN = {
    "clang-16", "cmake", "cppcheck", "debootstrap", "g++", "gcc", "gcc-mingw-w64-x86-64",
    "intel-opencl-icd", "libc6-dev", "libclc-16", "mesa-opencl-icd", "ninja-build",
    "ocl-icd-opencl-dev", "oclgrind", "openmpi-bin", "pocl-opencl-icd", "python3-dev",
    "python3-venv", "qemu-user-static", "valgrind",
}  # fmt: skip
PYPI = {
    "atheris", "auditwheel", "build", "cibuildwheel", "cmake", "jupyterlab", "ninja",
    "scikit-build-core", "setuptools-scm", "torch", "twine", "ziglang",
}  # fmt: skip

INSTALLED = re.compile(r"pip install(?: -\S+)* [\"']?(clattn|\.)(?=[\[\"'\s`,;:]|$)", re.MULTILINE)
OF_AN_INDEX = re.compile(r"clattn\[[a-z,]+\]")
RELEASES = re.compile(r"^#+ Releases?$", re.MULTILINE)  # the page for those who release


# ---- what the pages say ----


def commands(text):
    """The commands in a page, as lists of words."""
    lines = []
    for block in SHELL.findall(text):
        lines += lines_of(block.replace("\\\n", " "))
    for line in [*lines, *(found.replace("\n", " ") for found in INLINE.findall(text))]:
        words = shlex.split(line, comments=True)
        while words:
            end = next((n for n, word in enumerate(words) if word in {"&&", "|", ";"}), len(words))
            one, words = words[:end], words[end + 1 :]
            while one and (re.match(r"[A-Z_]+=", one[0]) or one[0] in {"sudo", "time", "nice"}):
                del one[0]
            if one:
                yield one


def lines_of(block):
    """The lines of a block; one goes on where a quotation is open."""
    line = ""
    for part in block.splitlines():
        line += part
        try:
            shlex.split(line, comments=True)
        except ValueError:
            line += "\n"
            continue
        yield line
        line = ""
    assert not line, f"a quotation has no end: {line}"


def project(tree):
    return tomllib.loads(tree.text("pyproject.toml"))


def packages(needs):
    return {re.match(r"[\w.-]+", need)[0] for need in needs}


def wrong_packages(words, project):
    """What a command of pip names that is not there."""
    known = project["project"]["optional-dependencies"]
    on_index = PYPI | packages(project["build-system"]["requires"])
    on_index |= packages(need for needs in known.values() for need in needs) | {"numpy"}
    takes_value = {"--target", "--find-links", "--only-binary", "--no-binary", "-r", "--python"}
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-") or before in takes_value or PLACEHOLDER.match(word):
            continue
        if found := re.fullmatch(r"(?:clattn|\.)(?:\[([a-z,]+)\])?", word):
            yield from (f"the extra {x}" for x in (found[1] or "cpu").split(",") if x not in known)
        elif packages([word]) - on_index:
            yield f"pip install {word}"


def wrong(tree, words, project):
    """What of a command there is not."""
    program, *rest = words
    name = program.rpartition("/")[2]
    if re.fullmatch(r"python[\d.]*", name):
        if rest[:1] == ["-m"]:
            if rest[1] not in MODULES:
                yield f"python -m {rest[1]}"
            elif rest[1] == "pytest":
                yield from wrong_paths(tree, rest[2:])
        elif rest and not rest[0].startswith("-"):
            yield from wrong_paths(tree, rest[:1])
    elif name == "pip":
        yield from wrong_packages(rest[1:], project) if rest[:1] == ["install"] else ()
    elif name == "apt-get":
        for word in rest[1:]:
            if not word.startswith("-") and word not in DEBIAN and not PLACEHOLDER.match(word):
                yield f"apt-get install {word}"
    elif name == "pytest":
        yield from wrong_paths(tree, rest)
    elif "/" in program and "/bin/" not in program:
        yield from wrong_paths(tree, [program])
    elif name not in PROGRAMS:
        yield program


def wrong_paths(tree, words):
    """The words that look like paths of the checkout and are none."""
    for word in words:
        path = word.partition("::")[0]
        is_path = re.match(r"(?:tests|tools|benchmarks|docs|\.ci)/", path)
        if is_path and not any(tree.root.glob(re.sub(r"\{.*?\}|<.*?>", "*", path))):
            yield path


def pages_name_commands_that_there_are(tree):
    """tests/package/test_docs.py runs those of clattn and of the tools, as far as their --help."""
    of_project = project(tree)
    for page in tree.pages:
        for words in commands(page.read_text(encoding="utf-8")):
            for what in wrong(tree, words, of_project):
                yield tree.name(page), f"{what}, in {shlex.join(words)}"


# ---- where clattn is installed from ----


def source(tree):
    """What docs/install.md installs first: "." for a checkout, "clattn" from a release on."""
    return re.search(
        r'^pip install "([^"\[]+)\[cpu\]"$', tree.text("docs/install.md"), re.MULTILINE
    )[1]


def everything_installs_from_where_the_page_says(tree):
    """From a release on, that page changes, and this rule names all other places."""
    there = source(tree)
    notebooks = tree.files("docs/**/*.ipynb")
    for path in [*tree.pages, *notebooks, *tree.modules, *tree.c_sources]:
        text = path.read_text(encoding="utf-8").replace('\\"', '"')
        develops = tree.name(path) == "README.md" or RELEASES.search(text)
        found = set() if develops and there != "." else set(INSTALLED.findall(text))
        if there == "." and not RELEASES.search(text):
            found |= set(OF_AN_INDEX.findall(text))
        elif there == ".":
            found -= {"clattn"}
        for name in sorted(found - {there}):
            yield tree.name(path), f"{name} is installed, not {there}"


def messages_name_the_packages_of_extras(tree):
    """Without the markers of platforms."""
    known = project(tree)["project"]["optional-dependencies"]
    table = re.search(
        r"^_PACKAGES = (\{.*?^\})$",
        tree.text("python/clattn/_host/extras.py"),
        re.MULTILINE | re.DOTALL,
    )[1]
    for extra, listed in re.findall(r'"(\w+)": \[(.*?)\],$', table, re.MULTILINE):
        needs = [need.partition(";")[0].strip() for need in known.get(extra, [])]
        if re.findall(r'"([^"]+)"', listed) != needs:
            yield "python/clattn/_host/extras.py", f"the extra {extra} needs {needs}"
    said = " ".join(sorted(packages(known["cpu"]), reverse=True))
    if f"pip install {said} " not in tree.text("csrc/python/runtime.c"):
        yield "csrc/python/runtime.c", f"the extra cpu needs {said}"


# ---- what is proven ----


def both_tables_of_what_is_proven_are_the_same(tree):
    tables = {
        name: re.findall(
            r"^\| device \| driver \| proven .*?(?=^$)", tree.text(name), re.MULTILINE | re.DOTALL
        )
        for name in ("README.md", "docs/devices.md")
    }
    if [len(found) for found in tables.values()] != [1, 1] or len(
        set(map(tuple, tables.values()))
    ) != 1:
        yield "README.md", "its table is not that of docs/devices.md"


COMMAND_RULES = [
    pages_name_commands_that_there_are,
    everything_installs_from_where_the_page_says,
    messages_name_the_packages_of_extras,
    both_tables_of_what_is_proven_are_the_same,
]
