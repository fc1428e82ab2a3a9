# SPDX-License-Identifier: MIT
"""The files of a checkout, and what the rules have in common."""

from pathlib import Path


class Tree:
    """The files of a checkout, by their kind."""

    def __init__(self, root):
        self.root = Path(root)
        self.c_sources = self.files("csrc/**/*.[ch]", "kernels/**/*.h")
        self.kernels = self.files("kernels/**/*.cl")
        self.kernel_texts = self.files("kernels/**/*.cl", "kernels/**/*.clh")
        self.package = self.root / "python" / "clattn"
        self.modules = self.files("python/clattn/**/*.py")
        self.pages = self.files("*.md", "docs/**/*.md")

    def files(self, *patterns):
        return sorted({path for pattern in patterns for path in self.root.glob(pattern)})

    def name(self, path):
        """The path from the root, with slashes."""
        return path.relative_to(self.root).as_posix()

    def text(self, name):
        return (self.root / name).read_text(encoding="utf-8")


def circle(graph):
    """A circle in a graph, which has the names below each name: a -> b -> a. None without one."""
    done = set()

    def visit(node, above):
        if node in above:
            return " -> ".join([*above[above.index(node) :], node])
        if node not in done:
            for below in sorted(graph.get(node, ())):
                if found := visit(below, [*above, node]):
                    return found
            done.add(node)
        return None

    return next(filter(None, (visit(node, []) for node in sorted(graph))), None)
