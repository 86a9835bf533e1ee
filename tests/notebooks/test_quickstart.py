"""The quickstart notebook: as it is stored, and as a fresh kernel executes it."""

import json
import pathlib
import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is missing; pip install -e '.[notebooks]'")

NOTEBOOK = pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"
BADGE = "https://colab.research.google.com/github/exactor-rl/exactor/blob/main/notebooks/quickstart.ipynb"
NUM_FIGURES = 5
MAX_BYTES = 300_000
MAX_LINES = 50  # of one output: about a screen

FACTS = """
import json

is_stale = staleness > 0
print(json.dumps({
    "success": [summary["success_before"], summary["success_after"]],
    "replay": [summary["exactness"]["replay"], summary["exactness_max_error"], float(np.abs(replayed - old).max())],
    "tokens": len(old),
    "engine_max": float(np.abs(sampler - old).max()),
    "recompute_mean": [float(np.abs(recomputed - old)[is_stale == stale].mean()) for stale in (False, True)],
    "clipped": [float(column("clip_fraction", rows).mean()) for rows in (metrics[:12], varied)],
    "masked": [float(column("discrepancy_masked_fraction", rows).max()) for rows in (metrics[:12], varied)],
    "first_tokens": [rows[0]["tokens_trained"] for rows in (metrics, varied)],
}))
"""


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def check_outputs(notebook) -> None:
    """Everything ran, in order; all figures are there; nothing is long, warns, or tells of the machine."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == NUM_FIGURES
    for output in outputs:
        text = output.text if output.output_type == "stream" else "".join(output.data["text/plain"])
        assert output.get("name") != "stderr", text
        assert not re.search(r"warning|deprecated|\x1b", text, re.IGNORECASE), text
        assert not re.search(r"(?<![\w.])[/~]\w+/|[A-Z]:\\", text), text
        assert text.count("\n") <= MAX_LINES, text


def test_the_stored_notebook_is_whole_and_small(notebook):
    nbformat.validate(notebook)
    check_outputs(notebook)
    assert NOTEBOOK.stat().st_size < MAX_BYTES, "store it with notebooks/store.py"
    assert notebook.metadata.keys() == {"colab", "kernelspec", "language_info"} and not notebook.metadata.colab.toc_visible
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info == {"name": "python"}
    assert all(cell.metadata == {} for cell in notebook.cells)
    ids = [cell["id"] for cell in json.loads(NOTEBOOK.read_text())["cells"]]  # nbformat has repaired them when it read the file
    assert len(set(ids)) == len(ids)


def test_colab_opens_it_and_one_cell_installs(notebook):
    assert BADGE in notebook.cells[0].source
    (install,) = [cell for cell in notebook.cells if cell.cell_type == "code" and "pip" in cell.source]
    assert install.outputs == [], "where the package can be imported nothing is installed"
    repository = re.search(r"github/([\w-]+/[\w-]+)/", BADGE).group(1)
    assert f"git+https://github.com/{repository}.git" in install.source


@pytest.mark.slow
def test_a_fresh_kernel_learns_replays_exactly_and_sees_what_recompute_hides(notebook):
    for package in ("ipykernel", "matplotlib", "nbclient"):
        pytest.importorskip(package, reason=f"{package} is missing; pip install -e '.[notebooks]'")
    from notebooks.store import execute

    notebook.cells.append(nbformat.v4.new_code_cell(FACTS))
    execute(notebook)
    check_outputs(notebook)
    facts = json.loads(notebook.cells[-1].outputs[0].text)
    before, after = facts["success"]
    assert after >= 0.70 and after - before >= 0.50
    assert facts["replay"] == ["bitwise", 0.0, 0.0] and facts["tokens"] > 20_000
    assert facts["engine_max"] < 1e-4
    fresh, stale = facts["recompute_mean"]
    assert fresh < 1e-5 and stale > 0.01, "recompute is exact only where nothing is stale"
    assert facts["first_tokens"][0] == facts["first_tokens"][1]
    exact, varied = facts["clipped"]
    assert varied < 0.5 * exact, "the clip does not see the staleness"
    exact, varied = facts["masked"]
    assert exact == 0 and varied > 0.01, "the mask does"
