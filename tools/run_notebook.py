# SPDX-License-Identifier: MIT
"""Run a notebook and write its new outputs into it, without times of day."""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from rich.progress import Progress


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
            on_cell_complete=lambda cell, cell_index: bar.update(task, completed=cell_index + 1),
        )
        client.execute()
    notebook.metadata["language_info"] = {"name": "python"}  # no version, which would change
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
