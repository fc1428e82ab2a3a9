# SPDX-License-Identifier: MIT
"""docs/notebooks/decode.ipynb runs, and its logits are those of its model without a cache."""

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from references.attention import attention_in
from support.helpers import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "decode.ipynb"
FIRST_LINES = "Tyger Tyger, burning bright,\nIn the forests of the night;\n"
SAVE = (
    "np.savez({!r}, weights=weights, alphabet=ALPHABET, prompt=decode(prompt[0]), cached=cached, "
    "prompts=prompts, together=together)"
)


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture
def result(device, tmp_path, monkeypatch):
    """What the notebook leaves after a run on the device."""
    monkeypatch.setenv("CLATTN_DEVICE", device.platform)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # its threads spin when tests run side by side
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # no settings of the user's
    notebook = read()
    saved = tmp_path / "result.npz"
    notebook.cells.append(nbformat.v4.new_code_cell(SAVE.format(str(saved))))
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert f"{device.compute_units} compute units, {device.platform}" in str(notebook.cells)
    with np.load(saved, allow_pickle=True) as arrays:
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


def test_is_committed_with_the_outputs_of_one_run():
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if "name" in output} == {"stdout"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any(FIRST_LINES in output.get("text", "").replace("|", "") for output in outputs)
    assert NOTEBOOK.stat().st_size < 300_000
