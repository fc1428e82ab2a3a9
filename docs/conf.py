# SPDX-License-Identifier: MIT
"""Sphinx makes a site of these pages: sphinx-build -W --keep-going -n docs build/site."""

import clattn
import mpi4py

mpi4py.rc.initialize = False  # clattn.mpi is imported for its docstrings, and no rank starts

project = "clattn"
author = "The clattn developers"
project_copyright = author
version = release = clattn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
html_theme = "furo"
html_title = f"clattn {release}"

myst_heading_anchors = 4  # a heading has the anchor that other viewers of Markdown give it
nb_execution_mode = "off"  # notebooks are shown with the outputs that are in them

default_role = "autolink"  # `name` in a docstring is a link if it names something
# Parameters and attributes that have no entry, though something else has their name.
nitpick_ignore = [("py:obj", name) for name in ("array", "comm", "BLOCK_SIZE")]
autodoc_typehints = "none"  # the docstrings have types, with shapes
autosummary_generate = False  # each reference page has its entries below the summary
numpydoc_show_class_members = False

# Links to files outside this folder, and the pages that stand for them.
OUTSIDE = {
    "](../README.md": "](readme.md",
    "](../CHANGELOG.md": "](changelog.md",
    "](../SECURITY.md": "](security.md",
}


def link_inside(app, name, source):
    """Let the links of a page stay on the site."""
    for outside, inside in OUTSIDE.items():
        source[0] = source[0].replace(outside, inside)


def setup(app):
    """Connect what this file adds to Sphinx."""
    app.connect("source-read", link_inside)
