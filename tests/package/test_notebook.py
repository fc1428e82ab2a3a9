# SPDX-License-Identifier: MIT
"""The notebooks of docs/ run.

decode.ipynb: its logits are those of its model without a cache. The model learns for a shorter time
than in the notebook, texts are shorter, and times are measured once: nobody reads them.

flex.ipynb compares each of its mods with NumPy itself, and the others what they draw.

The notebooks run on the first device, with short measurements: the tests of KVCache and
flex_attention run on each.
"""

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from references.attention import attention_in
from support.processes import ROOT

NOTEBOOKS = ROOT / "docs" / "notebooks"
DECODE = NOTEBOOKS / "decode.ipynb"
FLEX = NOTEBOOKS / "flex.ipynb"
LONG = NOTEBOOKS / "long.ipynb"
FIRST_STEPS = NOTEBOOKS / "first_steps.ipynb"
MASKS = NOTEBOOKS / "masks.ipynb"
PERFORMANCE = NOTEBOOKS / "performance.ipynb"
FIRST_LINES = "Tyger Tyger, burning bright,\nIn the forests of the night;\n"
SHORTER = {  # lines of the notebooks, and what stands here in their place
    DECODE: {
        "STEPS, BATCH, LENGTH = 120, 4, 128": "STEPS, BATCH, LENGTH = 20, 4, 64",
        "cached, _ = generate(prompt, 300)": "cached, _ = generate(prompt, 100)",
        "NUMBER = 1000": "NUMBER = 100",
        "for _ in range(3)": "for _ in range(1)",
        "REPEATS = 20": "REPEATS = 2",
        "together, _ = generate(padded, 100, counts)": "together, _ = generate(padded, 40, counts)",
    },
    FIRST_STEPS: {
        "LENGTHS = [64, 128, 256, 512, 1024]": "LENGTHS = [64, 128]",
        "ROUNDS = 20": "ROUNDS = 1",
    },
    LONG: {"KEYS = 2**19": "KEYS = 2**12"},
    MASKS: {},
    PERFORMANCE: {
        "LENGTHS = [1, 4, 16, 64, 256]": "LENGTHS = [1]",
        "ROUNDS = 2": "ROUNDS = 1",
        '"bench", "--rows", "llama-decode", "cross", "--rounds", "3"': '"bench", "--list"',
    },
}
SAVE = (
    "np.savez({!r}, weights=weights, alphabet=ALPHABET, prompt=decode(prompt[0]), cached=cached, "
    "prompts=prompts, together=together)"
)


def read(path):
    return nbformat.read(path, as_version=4)


def execute(notebook):
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def shortened(path):
    """The notebook of a path with the lines of SHORTER."""
    notebook = read(path)
    shorter = SHORTER[path]
    missing = set(shorter)
    for cell in notebook.cells:
        for line in [line for line in shorter if cell.cell_type == "code" and line in cell.source]:
            cell.source = cell.source.replace(line, shorter[line])
            missing.discard(line)
    assert not missing, f"not in the notebook: {missing}"
    return notebook


@pytest.fixture
def on_first_device(first_device, tmp_path, monkeypatch):
    """Notebooks run on the first device, with no settings of the user's."""
    monkeypatch.setenv("CLATTN_DEVICE", first_device.platform)
    for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # NumPy's and torch's
        monkeypatch.setenv(threads, "1")  # several spin when tests run side by side
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return first_device


@pytest.fixture
def result(tmp_path, on_first_device):
    """What decode.ipynb leaves."""
    file = tmp_path / "result.npz"
    notebook = shortened(DECODE)
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


def check_prediction(prompt, got, result):
    """Logits (number, V) of the tokens generated after a prompt are those of the whole text."""
    alphabet = list(result["alphabet"])
    tokens = [*(alphabet.index(character) for character in prompt), *got.argmax(axis=-1)]
    new = slice(len(prompt) - 1, -1)
    right = logits_of(tokens, result["weights"], np.dtype("float64"))[new]
    naive = logits_of(tokens, result["weights"], np.dtype("float32"))[new]
    allowed = 2 * np.abs(naive - right).max()
    np.testing.assert_allclose(got, right, rtol=0, atol=allowed)
    np.testing.assert_array_equal(tokens[len(prompt) :], right.argmax(axis=-1))


def test_runs_and_decodes_as_without_a_cache(result):
    check_prediction(str(result["prompt"]), result["cached"][0], result)
    for prompt, logits in zip(result["prompts"], result["together"], strict=True):
        check_prediction(prompt, logits, result)


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


def test_fewer_keys_on_a_cluster(on_first_device):
    """long.ipynb compares rows with NumPy itself."""
    for module in ("distributed", "zarr"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    notebook = shortened(LONG)
    execute(notebook)
    said = "".join(output.get("text", "") for output in outputs_of(notebook.cells))
    assert "100% Completed" in said and "worker 1: " in said
    assert images(notebook.cells) == 1


@pytest.mark.parametrize("path", [FIRST_STEPS, MASKS, PERFORMANCE], ids=lambda path: path.stem)
def test_draws_its_pictures(on_first_device, path):
    if path == FIRST_STEPS:
        pytest.importorskip("torch")
    notebook = shortened(path)
    execute(notebook)
    assert images(notebook.cells) == images(read(path).cells) > 0


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
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
