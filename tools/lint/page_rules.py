# SPDX-License-Identifier: MIT
"""Rules of README.md and docs/: what pages draw, name and list is what there is."""

import ast
import re
import tomllib
from fnmatch import fnmatch

# A line of a tree: what is left of its name is four characters a level.
LINE = re.compile(r"^(?P<left>(?:│   |    )*(?:├── |└── )?)(?P<name>[\w./]+)(?: |$)")
WAY_LINES = 40  # which fit a screen
ROOMS = r"csrc|kernels|python/clattn|tests|tools|benchmarks|docs|cmake|third_party|\.ci"
# What a page quotes of a file: text, or a diff, whose lines but the added ones stand in the file.
QUOTED = re.compile(r"From `([\w./-]+)`[^`]*:\n\n```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_PATH = re.compile(rf"(?<![\w/.])((?:{ROOMS})/[\w./-]*[\w/])(?![<*\w])")
INSTALLED = re.compile(r"(?:clattn|\.)\[([a-z,]+)\]")
PACKAGE_NAME = re.compile(r"[\w-]+")
ENTRY = re.compile(
    r"^\.\. (?:(?:currentmodule|py:module):: ([\w.]+)|auto\w+:: (\w+))$", re.MULTILINE
)
# Modules that are names of the package too, and a function that is written in its module alone.
SUBMODULES = {"clattn.directml", "clattn.flex", "clattn.onnx", "clattn.openvino"}
IN_ITS_MODULE = {"clattn.flex.explain"}


# ---- drawings ----


def block(tree, page, begin):
    """The first block of a page, not of a language, that begins like this."""
    found = re.search(
        rf"^```\n({re.escape(begin)}.*?)^```$", tree.text(page), re.MULTILINE | re.DOTALL
    )
    return found[1] if found else ""


def drawn(tree, page, top):
    """The paths in the tree of a page that begins with a folder; folders end with a slash."""
    above = []
    for line in block(tree, page, top).splitlines():
        match = LINE.match(line)
        above[len(match["left"]) // 4 :] = [match["name"]]
        yield "".join(above)


def folders(tree, inside):
    return {f"{inside}/{p.name}/" for p in (tree.root / inside).iterdir() if any(p.glob("*.*"))}


def the_tree_of_kernels_is_drawn(tree):
    files = {path for path in drawn(tree, "docs/programs.md", "kernels/") if path[-1] != "/"}
    kernels = tree.files(*(f"kernels/**/*{suffix}" for suffix in (".c", ".cl", ".clh", ".h")))
    for path in sorted(files ^ {tree.name(kernel) for kernel in kernels}):
        yield "docs/programs.md", path


def the_tree_of_rooms_is_drawn(tree):
    """Every room is there; the folders of tests that have the name of a room are not drawn."""
    rooms = {path for path in drawn(tree, "docs/architecture.md", "csrc/") if path[-1] == "/"}
    of_c = folders(tree, "csrc")
    of_tests = folders(tree, "tests") - {path.replace("csrc", "tests") for path in of_c}
    missing = (of_c | folders(tree, "kernels") | of_tests) - rooms - {"tests/__pycache__/"}
    gone = {path for path in rooms if not (tree.root / path).is_dir()}
    for path in sorted(missing | gone):
        yield "docs/architecture.md", path


def the_way_of_a_call_names_files_and_fits_a_screen(tree):
    way = block(tree, "docs/architecture.md", "python/clattn/attention.py")
    files = re.findall(r"(?:csrc|kernels|python)/[\w/]+\.\w+", way)
    if len(files) <= 10 or len(way.splitlines()) > WAY_LINES:
        yield "docs/architecture.md", f"{len(files)} files on {len(way.splitlines())} lines"
    for file in files:
        if not (tree.root / file).exists():
            yield "docs/architecture.md", file


# ---- commands, paths and tools ----


def paths_that_pages_name_exist(tree):
    """A path in words like <name>, or with a star, is a pattern."""
    for page in tree.pages:
        for path in sorted(set(NAMED_PATH.findall(page.read_text(encoding="utf-8")))):
            if not (tree.root / path).exists():
                yield tree.name(page), path


def what_pages_quote_stands_in_the_files(tree):
    """Once: a diff says where its lines go."""
    for page in tree.pages:
        for name, language, text in QUOTED.findall(page.read_text(encoding="utf-8")):
            if language == "diff":
                text = "".join(f"{line[1:]}\n" for line in text.splitlines() if line[:1] != "+")
            path = tree.root / name
            if not path.is_file() or path.read_text(encoding="utf-8").count(text) != 1:
                yield tree.name(page), f"{name}: {text.partition(chr(10))[0].strip()}"


def the_guide_names_every_tool(tree):
    guide = tree.text("docs/contributing.md")
    for path in tree.files("tools/*"):
        if path.suffix in (".py", ".sh") or (path / "__main__.py").exists():
            name = tree.name(path)
            if name not in guide:
                yield "docs/contributing.md", name


def each_command_of_the_readme_is_one_sh_block(tree):
    """A reader, or a machine, looks for it below its heading."""
    parts = re.split(r"^## (.+?)\s*$", tree.text("README.md"), flags=re.MULTILINE)
    sections = list(zip(parts[1::2], parts[2::2], strict=True))
    for title, word in (("Run it", "demo"), ("Test it", "pytest")):
        bodies = [body for heading, body in sections if heading == title]
        fences = [re.findall(r"^```(\w*)[ \t]*$", body, re.MULTILINE) for body in bodies]
        if fences != [["sh", ""]]:
            yield "README.md", f"blocks below {title!r}: {fences}"
        elif word not in bodies[0].partition("```sh\n")[2].partition("\n```")[0]:
            yield "README.md", f"{title!r} has no {word}"


def an_archive_finds_the_tags_that_the_guide_sets(tree):
    tag = re.search(r"`git tag ([^`]+)`", tree.text("docs/contributing.md"))[1]
    pattern = re.search(r"match=([^)]+)\)", tree.text(".git_archival.txt"))[1]
    if not fnmatch(tag.replace("X.Y.Z", "0.1.0"), pattern):
        yield ".git_archival.txt", f"{pattern} does not match {tag}"


# ---- extras ----


def extras(tree):
    return tomllib.loads(tree.text("pyproject.toml"))["project"]["optional-dependencies"]


def pages_install_extras_that_there_are(tree):
    known = extras(tree).keys()
    for page in tree.pages:
        for names in INSTALLED.findall(page.read_text(encoding="utf-8")):
            for name in sorted(set(names.split(",")) - known):
                yield tree.name(page), name


def every_extra_has_its_licences(tree):
    """SECURITY.md's row of an extra names each of its packages."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", tree.text("SECURITY.md"), re.MULTILINE))
    known = extras(tree)
    for extra in sorted(rows.keys() ^ known.keys()):
        yield "SECURITY.md", f"the extra {extra}"
    for extra in sorted(rows.keys() & known.keys()):
        packages = {PACKAGE_NAME.match(need)[0] for need in known[extra]}
        for package in sorted(packages - set(PACKAGE_NAME.findall(rows[extra]))):
            yield "SECURITY.md", f"{package}, of the extra {extra}"


# ---- reference ----


# Words that pages have others for, as readers of the field expect. Laboratory notes keep theirs.
WORDS = {
    r"makers?": "vendor",
    r"weakness(?:es)?": "vulnerability",
    r"whoever": "users who",
    r"shall see": "attends to",
    r"(?:is|are) asked for": "is needed, is loaded",
    r"(?:is|are) mended": "what holds now",
    r"by turns|in quiet minutes": "how it is measured",
    r"in the place of": "instead of",
    r"to the letter": "exactly",
    r"nobody has (?:looked|run)": "what is known",
}


def pages_have_the_words_of_the_field(tree):
    for page in tree.pages:
        if "lab" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        for wrong, right in WORDS.items():
            for found in re.finditer(rf"\b(?:{wrong})\b", text, re.IGNORECASE):
                yield tree.name(page), f"{' '.join(found[0].split())}; {right}"


def entries(tree):
    """The entries of the reference, with their modules."""
    for page in tree.files("docs/reference/*.md"):
        module = None
        for found in ENTRY.finditer(page.read_text(encoding="utf-8")):
            module = found[1] or module
            if found[2]:
                yield f"{module}.{found[2]}"


def public_names(tree, module):
    """What `__all__` of a module names, read without importing the module, but for modules."""
    path = tree.package.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    names = re.search(r"^__all__ = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)[1]
    return {f"{module}.{name}" for name in ast.literal_eval(names)}


def the_reference_has_every_public_name_once(tree):
    found = list(entries(tree))
    modules = {name.rpartition(".")[0] for name in found} - {"clattn.flex"}
    names = set().union(*(public_names(tree, module) for module in modules))
    for name in sorted((names - SUBMODULES) ^ (set(found) - IN_ITS_MODULE)):
        yield "docs/reference", name
    for name in sorted({name for name in found if found.count(name) > 1}):
        yield "docs/reference", f"{name} twice"


PAGE_RULES = [
    the_tree_of_kernels_is_drawn,
    the_tree_of_rooms_is_drawn,
    the_way_of_a_call_names_files_and_fits_a_screen,
    paths_that_pages_name_exist,
    what_pages_quote_stands_in_the_files,
    the_guide_names_every_tool,
    each_command_of_the_readme_is_one_sh_block,
    an_archive_finds_the_tags_that_the_guide_sets,
    pages_install_extras_that_there_are,
    every_extra_has_its_licences,
    the_reference_has_every_public_name_once,
    pages_have_the_words_of_the_field,
]
