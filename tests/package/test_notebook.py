# SPDX-License-Identifier: MIT
"""The notebooks of docs/ run.

decode.ipynb: its logits are those of its model without a cache. Texts are shorter here than in the
notebook, and times are measured once: nobody reads them.

flex.ipynb compares each of its mods with NumPy itself.

The notebooks run on the first device: the tests of KVCache and flex_attention run on each.
"""

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from references.attention import attention_in
from support.helpers import ROOT

DECODE = ROOT / "docs" / "notebooks" / "decode.ipynb"
FLEX = ROOT / "docs" / "notebooks" / "flex.ipynb"
FIRST_LINES = "Tyger Tyger, burning bright,\nIn the forests of the night;\n"
SHORTER = {  # lines of the notebook, and what stands here in their place
    "cached, _ = generate(prompt, 300)": "cached, _ = generate(prompt, 100)",
    "NUMBER = 1000": "NUMBER = 100",
    "for _ in range(3)": "for _ in range(1)",
    "REPEATS = 20": "REPEATS = 2",
    "together, _ = generate(padded, 100, counts)": "together, _ = generate(padded, 40, counts)",
}
SAVE = (
    "np.savez({!r}, weights=weights, alphabet=ALPHABET, prompt=decode(prompt[0]), cached=cached, "
    "prompts=prompts, together=together)"
)


def read(path):
    return nbformat.read(path, as_version=4)


def execute(notebook):
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def shortened(notebook):
    missing = set(SHORTER)
    for cell in notebook.cells:
        for line in [line for line in SHORTER if cell.cell_type == "code" and line in cell.source]:
            cell.source = cell.source.replace(line, SHORTER[line])
            missing.discard(line)
    assert not missing, f"not in the notebook: {missing}"
    return notebook


@pytest.fixture
def on_first_device(first_device, tmp_path, monkeypatch):
    """Notebooks run on the first device, with no settings of the user's."""
    monkeypatch.setenv("CLATTN_DEVICE", first_device.platform)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # its threads spin when tests run side by side
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return first_device


@pytest.fixture
def result(tmp_path, on_first_device):
    """What decode.ipynb leaves."""
    file = tmp_path / "result.npz"
    notebook = shortened(read(DECODE))
    notebook.cells.append(nbformat.v4.new_code_cell(SAVE.format(str(file))))
    execute(notebook)
    device = f"{on_first_device.compute_units} compute units, {on_first_device.platform}"
    assert device in str(notebook.cells)
    with np.load(file, allow_pickle=True) as arrays:
        return {name: array[()] for name, array in arrays.items()}


def rms_norm(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def logits_of(text, weights, dtype):
    """The logits (L, V) of what follows each token of a text (L,), all at once, in `dtype`."""
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    distance = np.arange(len(text))[:, None] - np.arange(len(text))
    bias = (-(2.0 ** -(np.arange(8) / 2))[:, None, None] * distance).astype(dtype)
    layers = (weights[name] for name in ("query", "key", "value", "output", "up", "down"))
    x = weights["embedding"][text]
    for *projections, output, up, down in zip(*layers, strict=True):
        normed = rms_norm(x)
        heads = [(normed @ w).reshape(len(text), -1, 16).swapaxes(0, 1) for w in projections]
        context, _ = attention_in(dtype, *heads, attn_mask=bias, is_causal=True, enable_gqa=True)
        x = x + context.swapaxes(0, 1).reshape(len(text), -1) @ output
        x = x + np.maximum(rms_norm(x) @ up, 0) @ down
    return rms_norm(x) @ weights["logits"]


def check(prompt, got, result):
    """Logits (number, V) of the tokens generated after a prompt, and the text that they give."""
    alphabet = list(result["alphabet"])
    tokens = [*(alphabet.index(character) for character in prompt), *got.argmax(axis=-1)]
    new = slice(len(prompt) - 1, -1)
    right = logits_of(tokens, result["weights"], np.dtype("float64"))[new]
    naive = logits_of(tokens, result["weights"], np.dtype("float32"))[new]
    allowed = 2 * np.abs(naive - right).max()
    np.testing.assert_allclose(got, right, rtol=0, atol=allowed)
    np.testing.assert_array_equal(tokens[len(prompt) :], right.argmax(axis=-1))
    return "".join(alphabet[token] for token in tokens)


def test_runs_and_decodes_as_without_a_cache(result):
    assert check(str(result["prompt"]), result["cached"][0], result).startswith(FIRST_LINES)
    for prompt, logits in zip(result["prompts"], result["together"], strict=True):
        check(prompt, logits, result)


def outputs_of(cells):
    return [output for cell in cells for output in cell.get("outputs", [])]


def images(cells):
    return sum("image/png" in output.get("data", {}) for output in outputs_of(cells))


def draws_each_entry(notebook):
    """Below each heading there is one cell of code, which draws one picture."""
    text, code = ([c for c in notebook.cells if c.cell_type == t] for t in ("markdown", "code"))
    entries = sum(cell.source.startswith("## ") for cell in text)
    return [images([cell]) for cell in code[-entries:]] == [1] * entries


def test_gallery_agrees_with_numpy(on_first_device):
    notebook = read(FLEX)
    execute(notebook)
    assert draws_each_entry(notebook)


@pytest.mark.parametrize("path", [DECODE, FLEX], ids=lambda path: path.stem)
def test_is_committed_with_the_outputs_of_one_run(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = outputs_of(cells)
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if "name" in output} == {"stdout"}
    assert path.stat().st_size < 400_000


def test_committed_pictures_and_text():
    cells = read(DECODE).cells
    assert images(cells) == 2
    assert any(FIRST_LINES in o.get("text", "").replace("|", "") for o in outputs_of(cells))
    assert draws_each_entry(read(FLEX))
