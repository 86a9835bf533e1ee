"""The notebooks as they are stored, and how they are stored."""

import json
import re

import pytest

from tests.notebooks.checks import PATHS, check_outputs, nbformat

REPOSITORY = "exactor-rl/exactor"
MAX_BYTES = 300_000

every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@every_notebook
def test_it_is_whole_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook, path.stem)
    assert path.stat().st_size < MAX_BYTES, "store it with notebooks/store.py"
    assert notebook.metadata.keys() == {"colab", "kernelspec", "language_info"} and not notebook.metadata.colab.toc_visible
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info == {"name": "python"}
    assert all(cell.metadata == {} for cell in notebook.cells)
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]  # nbformat has repaired them when it read the file
    assert len(set(ids)) == len(ids)


@every_notebook
def test_colab_opens_it_and_one_cell_installs(path):
    notebook = nbformat.read(path, as_version=4)
    badge = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{path.name}"
    assert re.findall(r"\]\((https://colab[^)]*)\)", notebook.cells[0].source)[-1] == badge
    (install,) = [cell for cell in notebook.cells if cell.cell_type == "code" and "pip" in cell.source]
    assert install.outputs == [], "where the package can be imported nothing is installed"
    assert f"git+https://github.com/{REPOSITORY}.git" in install.source


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The module, with two notebooks and an execution that only leaves a mark."""
    pytest.importorskip("nbclient", reason="nbclient is missing; pip install -e '.[notebooks]'")
    from notebooks import store

    for name in ("one", "two"):
        nbformat.write(nbformat.v4.new_notebook(), tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(store, "DIRECTORY", tmp_path)
    monkeypatch.setattr(store, "execute", lambda notebook: notebook.metadata.update(executed=True))
    return store


@pytest.mark.parametrize(("arguments", "expected"), [([], {"one", "two"}), (["two"], {"two"})])
def test_all_notebooks_are_stored_or_those_named(store, arguments, expected):
    store.main(arguments)
    executed = {
        path.stem for path in store.DIRECTORY.glob("*.ipynb") if "executed" in nbformat.read(path, as_version=4).metadata
    }
    assert executed == expected


def test_an_unknown_name_is_refused_before_anything_is_executed(store, capsys):
    with pytest.raises(SystemExit):
        store.main(["one", "three"])
    assert "there is no notebook three; there are: one, two" in capsys.readouterr().err
    assert "executed" not in nbformat.read(store.DIRECTORY / "one.ipynb", as_version=4).metadata
