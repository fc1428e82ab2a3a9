# SPDX-License-Identifier: MIT
"""The README's two commands stand where a reader, or a machine, looks for them."""

import re

import pytest
from support.helpers import ROOT


def section(title):
    """What stands below a heading, up to the next heading of its level (code may hold a #)."""
    text = (ROOT / "README.md").read_text()
    parts = re.split(r"^## (.+?)\s*$", text, flags=re.MULTILINE)
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
