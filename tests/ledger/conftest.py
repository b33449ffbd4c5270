"""Every ledger of these tests is on SQLite and on PostgreSQL; a state that each test copies."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import expunge
from ledger_life import make_state
from postgres import MISSING, find_programs, make_database, start_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    programs = find_programs()
    if programs is None:
        pytest.skip(MISSING)
    with start_cluster(programs) as socket:
        yield socket


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return make_database(request.getfixturevalue("cluster"))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state(tmp_path_factory.mktemp("template") / "state")


@pytest.fixture
def state(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "state"))


@pytest.fixture
def ledger(url: str, state: Path, tmp_path: Path) -> Iterator[expunge.Ledger]:
    """A ledger that knows one model, "shop"."""
    made = expunge.Ledger.create(url, key=tmp_path / "ledger.key")
    made.register("shop", state)
    yield made
    made.close()


@pytest.fixture
def small(state: Path, tmp_path: Path) -> Iterator[expunge.Ledger]:
    """The same, on SQLite alone."""
    made = expunge.Ledger.create(f"sqlite:///{tmp_path}/ledger.db", key=tmp_path / "ledger.key")
    made.register("shop", state)
    yield made
    made.close()
