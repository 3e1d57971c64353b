"""The notebooks: each runs from top to bottom in a fresh kernel, and is stored as it ran.

Does not check what the cells compute; the tests of the package do.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

#: Seconds of wall time that one notebook may take, on two cores.
MOST_SECONDS = 120

NAMES = (
    "1_quick_start", "2_layers", "3_compare_methods", "4_agents", "5_own_model_and_data",
)  # fmt: skip


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_run", NOTEBOOKS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _load()


def stored(name: str) -> NotebookNode:
    return run.read(NOTEBOOKS / f"{name}.ipynb")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: NotebookNode) -> list[Any]:
    """What a cell gave, without its values, which may differ between processors."""
    return [output.get("name") or sorted(output["data"]) for output in cell.outputs]


def test_all_notebooks_are_tested() -> None:
    assert [path.stem for path in run.notebooks()] == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_stored(name: str) -> None:
    notebook = stored(name)
    assert run.faults(notebook) == []
    # The outputs are of this very code; `make notebooks` runs it again.
    assert notebook.metadata.kvcomm.code_sha256 == run.code_digest(notebook)
    assert sum(len(cell.outputs) for cell in code_cells(notebook)) > len(code_cells(notebook)) // 2


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str, device: str, real_model: Any) -> None:
    if device != "cpu":
        pytest.skip("the notebooks run on the CPU, whatever device the suite is for")
    before = stored(name)
    after, seconds = run.executed(before)
    print(f"{name}: {seconds:.0f} s")
    assert seconds < MOST_SECONDS
    for old, new in zip(code_cells(before), code_cells(after), strict=True):
        assert new.source == old.source
        assert kinds(new) == kinds(old), new.source


# ---- what is not stored ----


def notebook_of(*outputs: NotebookNode, source: str = "1", count: int = 1) -> NotebookNode:
    return new_notebook(cells=[new_code_cell(source, outputs=list(outputs), execution_count=count)])


def test_faults_of_outputs() -> None:
    fine = new_output("stream", name="stdout", text="fine\n")
    assert run.faults(notebook_of(fine)) == []
    warned = new_output("stream", name="stderr", text="a warning\n")
    assert run.faults(notebook_of(fine, warned)) == ["code cell 1: wrote to stderr: a warning"]
    raised = new_output("error", ename="ValueError", evalue="too few", traceback=[])
    assert run.faults(notebook_of(raised)) == ["code cell 1: ValueError: too few"]
    assert run.faults(notebook_of(fine, count=3)) == ["code cell 1: ran as number 3"]


def test_faults_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMM_CACHE", "/a-cache")
    shown = new_output("execute_result", data={"text/plain": "in '/a-cache/models'"})
    assert run.faults(notebook_of(shown)) == ["code cell 1: names /a-cache"]
    printed = new_output("stream", name="stdout", text=f"{Path.home()}/data\n")
    assert f"code cell 1: names {Path.home()}" in run.faults(notebook_of(printed))


def test_code_digest_is_of_the_code() -> None:
    one = notebook_of(source="a = 1")
    assert run.code_digest(one) == run.code_digest(notebook_of(source="a = 1", count=2))
    assert run.code_digest(one) != run.code_digest(notebook_of(source="a = 2"))


def test_a_fault_is_raised_and_nothing_written() -> None:
    with pytest.raises(ValueError, match="wrote to stderr: noise"):
        run.executed(notebook_of(source="import sys; print('noise', file=sys.stderr)"))


def test_runs_in_an_empty_folder() -> None:
    source = "import os; print(os.listdir())"
    after, _ = run.executed(notebook_of(source=source))
    assert after.cells[0].outputs[0].text == "[]\n"
    assert after.metadata.kvcomm.code_sha256 == run.code_digest(after)
