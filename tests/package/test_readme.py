# SPDX-License-Identifier: MIT
"""The README's two commands stand where a reader, or a machine, looks for them.

The example on the first screen prints the output that the README shows below it.
"""

import re

import clattn
import pytest
from support.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title):
    """What stands below a heading, up to the next heading of its level (code may hold a #)."""
    parts = re.split(r"^## (.+?)\s*$", README, flags=re.MULTILINE)
    sections = zip(parts[1::2], parts[2::2], strict=True)
    found = [body for heading, body in sections if heading == title]
    assert len(found) == 1, f"'## {title}' stands {len(found)} times"
    return found[0]


@pytest.mark.parametrize(("title", "word"), [("Run it", "demo"), ("Test it", "pytest")])
def test_each_command_is_one_sh_block(title, word):
    body = section(title)
    fences = re.findall(r"^```(\w*)[ \t]*$", body, flags=re.MULTILINE)
    assert fences == ["sh", ""]
    block = re.search(r"^```sh\n(.+?)^```", body, flags=re.MULTILINE | re.DOTALL).group(1)
    assert word in block


def test_the_example_prints_what_is_shown(first_device, capsys):
    screen = README.partition("\n## ")[0]
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", screen, re.DOTALL).groups()
    with clattn.use_device(first_device):
        exec(code, {})
    assert capsys.readouterr().out == shown
