"""A ledger of two models, with a token of every kind, behind its server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger_life import make_state
from postgres import MISSING, find_programs, make_database, start_cluster
from server_run import Life


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state(tmp_path_factory.mktemp("template") / "state")


@pytest.fixture
def life(template: Path, tmp_path: Path) -> Iterator[Life]:
    with Life(tmp_path, template) as made:
        yield made


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    programs = find_programs()
    if programs is None:
        pytest.skip(MISSING)
    with start_cluster(programs) as socket:
        yield socket


@pytest.fixture(params=["sqlite", "postgresql"])
def both(request: pytest.FixtureRequest, template: Path, tmp_path: Path) -> Iterator[Life]:
    """The same on each database: for tests of what the server itself asks of the tables."""
    url = None
    if request.param == "postgresql":
        url = make_database(request.getfixturevalue("cluster"))
    with Life(tmp_path, template, url=url) as made:
        yield made
