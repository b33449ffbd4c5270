"""Every ledger of these tests is on SQLite and on PostgreSQL; a state that each test has alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from expunge_ledger import Ledger
from ledger.tests import stand_in
from ledger.tests.postgres import MISSING, find_programs, make_database, start_cluster
from ledger.tests.server_run import Life

stand_in.install()


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


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return stand_in.make_state(tmp_path / "state")


@pytest.fixture
def ledger(url: str, state: Path, tmp_path: Path) -> Iterator[Ledger]:
    """A ledger that has one model, "shop"."""
    with Ledger.create(url, key=tmp_path / "ledger.key") as made:
        made.register("shop", state)
        yield made


@pytest.fixture
def small(state: Path, tmp_path: Path) -> Iterator[Ledger]:
    """The same, on SQLite alone."""
    with Ledger.create(f"sqlite:///{tmp_path}/ledger.db", key=tmp_path / "ledger.key") as made:
        made.register("shop", state)
        yield made


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A ledger of two models, with a token of every kind, behind its server."""
    with Life(tmp_path) as made:
        yield made


@pytest.fixture
def both(url: str, tmp_path: Path) -> Iterator[Life]:
    """The same on each database: for tests of what the server itself asks of the tables."""
    with Life(tmp_path, url=url) as made:
        yield made
