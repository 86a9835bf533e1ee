"""What holds for every notebook, as it is stored and as a fresh kernel executes it."""

import json
import pathlib
import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is missing; pip install -e '.[notebooks]'")

DIRECTORY = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
PATHS = sorted(DIRECTORY.glob("*.ipynb"))
NUM_FIGURES = {"ablation": 3, "old_logits": 4, "quickstart": 5}
MAX_LINES = 50  # of one output: about a screen


def check_outputs(notebook, name: str) -> None:
    """Everything ran, in order; all figures are there; nothing is long, warns, or tells of the machine."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), f"cells were executed in the order {counts}"
    outputs = [output for cell in code for output in cell.outputs]
    num_figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert num_figures == NUM_FIGURES.get(name), f"{num_figures} figures, wanted as many as NUM_FIGURES says for {name!r}"
    for output in outputs:
        shown = {"stream": output.text} if output.output_type == "stream" else output.data
        text = "\n".join(content for kind, content in shown.items() if kind != "image/png")
        assert output.get("name") != "stderr", text
        assert not re.search(r"warning|deprecated|\x1b", text, re.IGNORECASE), text
        assert not re.search(r"(?<![\w.])[/~]\w+/|[A-Z]:\\", text), text
        assert text.count("\n") <= MAX_LINES, text


def execute_and_ask(name: str, questions: str) -> dict:
    """Executes the notebook of that name and then a cell of questions, which prints its answers as JSON; returns them."""
    for package in ("ipykernel", "matplotlib", "nbclient"):
        pytest.importorskip(package, reason=f"{package} is missing; pip install -e '.[notebooks]'")
    from notebooks.store import execute

    notebook = nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(questions))
    execute(notebook)
    check_outputs(notebook, name)
    return json.loads(notebook.cells[-1].outputs[0].text)
