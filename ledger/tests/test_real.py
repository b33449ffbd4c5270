"""The same once with every kind of model that expunge has."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import expunge
from expunge.linear_model import LogisticRegression, Ridge
from expunge_ledger import Ledger, models
from ledger.tests import life


def make_linear(kind: type, folder: Path, people: int = 30) -> Path:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2 * people, 4)).astype(np.float32)
    y = x[:, :3].argmax(1) if kind is LogisticRegression else x[:, 0]
    model = kind()
    model.fit(x, y, ids=[f"person-{i // 2}" for i in range(2 * people)])
    model.save(folder)
    return folder


@pytest.mark.parametrize("kind", [Ridge, LogisticRegression])
def test_linear_models(url: str, kind: type, tmp_path: Path) -> None:
    state = make_linear(kind, tmp_path / "state")
    shutil.copytree(state, tmp_path / "backup")
    with Ledger.create(url, key=tmp_path / "key") as ledger:
        ledger.register("shop", state)
        with pytest.raises(expunge.InputError, match="no copy of that of the model shop"):
            ledger.register("copy", tmp_path / "backup")
        done = life.forget(ledger, "person-1", "person-2", "nobody", "Person-3")
        assert (done.failed, done.forgotten, done.not_held) == (None, 2, 1)
        assert life.list_states(ledger)[4] == "open"
        ledger.withdraw(4)
        life.file(ledger, "person-1", "person-5")
        life.die_at(expunge.Release, "save", ledger.work)
        (done,) = ledger.work()  # the state has forgotten, the release was not written
        assert (done.failed, done.forgotten) == (None, 1)
        assert ledger.get(5).answers[0].outcome == "already forgotten"
        life.check_answers(ledger)
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "backup", state)
        assert life.list_returned(ledger) == [1, 2, 6]
        ledger.request("person-9")
        life.check_fails(ledger, "people again who were forgotten")
        assert ledger.replay("shop").forgotten == 3
        (done,) = ledger.work()
        assert (done.failed, done.forgotten) == (None, 1)
        life.check_answers(ledger)


def test_what_is_gone_from_a_release_is_named(tmp_path: Path) -> None:
    state = make_linear(Ridge, tmp_path / "state")
    with Ledger.create(f"sqlite:///{tmp_path}/l.db") as ledger:
        ledger.register("shop", state)
        done = life.forget(ledger, "person-1")
        assert done.directory is not None
        ledger.verify()
        (done.directory / "estimator.json").unlink()
        life.check_differs(r"has no estimator\.json any more", ledger.verify)


def test_a_damaged_state_is_not_nobody(tmp_path: Path) -> None:
    state = make_linear(Ridge, tmp_path / "state")
    with Ledger.create(f"sqlite:///{tmp_path}/l.db") as ledger:
        ledger.register("shop", state)
        ledger.request("nobody")
        files = [
            path for path in sorted(state.rglob("*")) if path.is_file() and path.stat().st_size
        ]
        assert len(files) > 3
        for path in files:
            path.rename(tmp_path / "kept")
            (done,) = ledger.work()
            assert done.failed, path
            assert life.list_states(ledger) == {1: "open"}
            (tmp_path / "kept").rename(path)
        (done,) = ledger.work()
        assert done.not_held == 1


def test_the_adapter_asks_what_is_public() -> None:
    """Everything that the ledger takes from expunge is in expunge's own list."""
    import ast

    folder = Path(models.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "expunge":
                assert node.module == "expunge", path
                assert {one.name for one in node.names} <= set(expunge.__all__), path
            if isinstance(node, ast.Import):
                assert not [one for one in node.names if one.name.startswith("expunge.")], path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "expunge":
                assert node.attr in expunge.__all__, (path, node.attr)
