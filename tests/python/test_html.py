# SPDX-License-Identifier: MIT
"""The tables that notebooks show for a Device and a Tensor."""

from html.parser import HTMLParser
from types import SimpleNamespace

import clattn
import numpy as np
from clattn._host import html


class Reader(HTMLParser):
    """The texts of a page by the innermost tag that holds them, and the tags left open."""

    def __init__(self, html):
        super().__init__()
        self.open, self.texts = [], {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1], []).append(data)


def texts(html):
    reader = Reader(html)
    assert not reader.open
    return reader.texts


def test_a_device(device):
    found = texts(device._repr_html_())
    title, *labels = found["th"]
    assert title == f"clattn.Device {device.type}"
    row = dict(zip(labels, found["td"], strict=True))
    assert row["name"] == device.name
    assert row["platform"] == device.platform
    assert row["compute units"] == str(device.compute_units)
    assert ("float64" in row["dtypes"]) == device.float64


def test_a_tensor_with_its_elements_if_they_are_few(device):
    few = clattn.tensor(np.arange(6, dtype=np.int16).reshape(2, 3), device)
    found = texts(few._repr_html_())
    row = dict(zip(found["th"][1:], found["td"], strict=True))
    assert row["shape"] == "(2, 3)"
    assert row["dtype"] == "int16"
    assert row["memory"] == "12 bytes"
    assert device.name in row["device"]
    assert found["pre"] == [repr(few)]
    assert "pre" not in texts(clattn.tensor(np.zeros(101), device)._repr_html_())


def test_texts_of_drivers_are_escaped():
    name = '<b>"A & B"</b>'
    stand_in = SimpleNamespace(
        type="cpu", name=name, platform=name, driver_version=name,
        compute_units=2, memory=3 << 30, float64=False,
    )  # fmt: skip
    assert texts(html.of_device(stand_in))["td"] == [
        name, name, name, "2", "3.0 GiB", "float32, float16, bfloat16",
    ]  # fmt: skip
