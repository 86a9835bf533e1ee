"""Executes the quickstart notebook in a fresh kernel and stores it with its outputs, small and without a trace of the machine.

    pip install -e '.[notebooks]' && python notebooks/store.py

Run it after a change of a cell, or of what a cell shows. The slow tests execute the notebook by the same function.
"""

import base64
import io
import os
import pathlib
import tempfile

import nbclient
import nbformat
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
CELL_SECONDS = 1_800  # the longest cell takes two minutes on two idle cores
COLOURS = 256  # in a stored figure: a third of the bytes, and no difference to the eye


def execute(notebook: nbformat.NotebookNode) -> None:
    """Executes the cells in a kernel of its own, elsewhere, with this checkout and without this process's settings of JAX.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed, or took too long.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as directory:
        environment["TMPDIR"] = directory  # the notebook's own temporary files go with it
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": directory}},
        )
        client.execute(env=environment)
    notebook.metadata.language_info = {"name": "python"}  # the kernel has added its versions


def shrink_figures(notebook: nbformat.NotebookNode) -> None:
    """Gives every figure a palette."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
                file = io.BytesIO()
                image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
                output.data["image/png"] = base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    quickstart = nbformat.read(NOTEBOOK, as_version=4)
    execute(quickstart)
    shrink_figures(quickstart)
    nbformat.write(quickstart, NOTEBOOK)
