# SPDX-License-Identifier: MIT
"""Checks the project's own rules, which no linter knows, on the text of its files.

    python tools/lint

It needs Python alone, and takes a second. Each line of output names a file and what is wrong there;
then the exit status is 1. `c_rules.py`, `python_rules.py`,
`page_rules.py` and `command_rules.py` have the rules.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # run as a folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lint.c_rules import C_RULES
from lint.command_rules import COMMAND_RULES
from lint.common import Tree
from lint.page_rules import PAGE_RULES
from lint.python_rules import PYTHON_RULES

RULES = [*C_RULES, *PYTHON_RULES, *PAGE_RULES, *COMMAND_RULES]


def findings(root):
    """What breaks a rule in a checkout, as lines: `file: what is wrong (the rule)`."""
    tree = Tree(root)
    for rule in RULES:
        for place, wrong in rule(tree):
            yield f"{place}: {wrong} ({rule.__name__.replace('_', ' ')})"


def main(root):
    """Prints the findings, and returns the exit status."""
    found = list(findings(root))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"lint: {len(RULES)} rules, {len(found)} findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
