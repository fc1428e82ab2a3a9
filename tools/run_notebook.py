# SPDX-License-Identifier: MIT
"""Run a notebook and write its new outputs into it, without times of day."""

import argparse
import base64
import io
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image
from rich.progress import Progress


def smaller(picture):
    """A PNG in base64 with 256 colours, which needs less than half the space."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    file = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = nbformat.read(path, as_version=4)
    with Progress(transient=True) as bar:
        task = bar.add_task(path.stem, total=len(notebook.cells))
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": path.parent}},  # helpers.py lies there
            on_cell_complete=lambda cell, cell_index: bar.update(task, completed=cell_index + 1),
        )
        client.execute()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = smaller(output.data["image/png"])
        if "text" in output:
            output.text = output.text.replace("\x1b[2K\r", "")  # how a bar clears its line
    notebook.metadata["language_info"] = {"name": "python"}  # no version, which would change
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
