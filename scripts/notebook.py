"""`make notebook`: execute docs/first_hour.ipynb as a reader does, in docs/, and keep its outputs without the progress bars."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "first_hour.ipynb"
CELL_SECONDS = 900
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path: Path) -> None:
    """Execute a notebook in its folder, in this environment, and write its outputs into it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; nothing is written.
    """
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    remove_progress_bars(notebook)
    nbformat.write(notebook, path)


def remove_progress_bars(notebook: Any) -> None:
    """Leave out the progress bars of all cells, and join the printed lines between which they stood."""
    for cell in notebook.cells:
        outputs: list[Any] = []
        for output in cell.get("outputs", ()):
            written_over = output.get("name") == "stderr" and output.text.startswith("\r")
            if WIDGET in output.get("data", {}) or written_over:
                continue
            if outputs and "text" in output and outputs[-1].get("name") == output.name:
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        if outputs:
            cell.outputs = outputs


if __name__ == "__main__":
    execute(NOTEBOOK)
