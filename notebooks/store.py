"""Executes notebooks in fresh kernels and stores them with their outputs, small and without a trace of the machine.

    pip install -e '.[notebooks]' && python notebooks/store.py [NAME ...]

NAME is a file of this directory without its ending; all of them by default. Run it after a change of a cell, or of what a cell
shows. The slow tests execute the notebooks by the same function.
"""

import argparse
import base64
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

import nbclient
import nbformat
from PIL import Image

DIRECTORY = pathlib.Path(__file__).resolve().parent
CELL_SECONDS = 1_800  # the longest cell takes two minutes on two idle cores
COLOURS = 256  # in a stored figure: a third of the bytes, and no difference to the eye


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Executes notebooks and stores them with their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="without .ipynb; default: all")
    there = sorted(path.stem for path in DIRECTORY.glob("*.ipynb"))
    names = parser.parse_args(arguments).names or there
    if unknown := set(names) - set(there):
        parser.error(f"there is no notebook {', '.join(sorted(unknown))}; there are: {', '.join(there)}")
    for name in names:
        store(DIRECTORY / f"{name}.ipynb")


def store(path: pathlib.Path) -> None:
    """Executes one notebook and writes it back."""
    notebook = nbformat.read(path, as_version=4)
    execute(notebook)
    shrink_figures(notebook)
    nbformat.write(notebook, path)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Executes the cells in a kernel of its own, elsewhere, with this checkout and without this process's settings of JAX.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed, or took too long.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = str(DIRECTORY.parent)
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
    main(sys.argv[1:])
