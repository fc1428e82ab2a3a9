# SPDX-License-Identifier: MIT
"""The example on the README's first screen prints the output that the README shows below it."""

import re

import clattn
from support.processes import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_is_shown(first_device, capsys):
    screen = README.partition("\n## ")[0]
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", screen, re.DOTALL).groups()
    with clattn.use_device(first_device):
        exec(code, {})
    assert capsys.readouterr().out == shown
