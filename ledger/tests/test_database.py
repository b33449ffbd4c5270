"""Where the tables lie: versions, keys, addresses, roles."""

import stat
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

import expunge
import expunge_ledger
from expunge_ledger import Ledger
from expunge_ledger.database import connect, connected, read_url, upgrade
from expunge_ledger.schema import METADATA
from ledger.tests.life import check_refused, forget
from ledger.tests.postgres import find_programs, make_database


def test_the_migration_leads_to_the_tables(url: str, tmp_path: Path) -> None:
    if url.startswith("sqlite"):
        (tmp_path / "ledger.db").touch()
    engine = connect(read_url(url))
    upgrade(engine)
    with connected(engine) as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()


def test_a_ledger_of_another_version_is_refused(ledger: Ledger) -> None:
    with ledger.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(expunge.CertificateError, match="knows 0001 alone"):
        Ledger(ledger.url.render_as_string(hide_password=False), key=ledger.key_file)


def test_creating_twice_changes_nothing(ledger: Ledger) -> None:
    before = ledger.anchor()
    with Ledger.create(
        ledger.url.render_as_string(hide_password=False), key=ledger.key_file
    ) as again:
        assert again.anchor() == before


@pytest.mark.parametrize(
    "url", ["ledger.db", "sqlite://", "sqlite:///:memory:", "mysql://x/y", "", "sqlite:///"]
)
def test_addresses_that_are_none(url: str) -> None:
    check_refused("ledger is ", Ledger, url)


def test_no_ledger_is_made_by_asking(tmp_path: Path) -> None:
    check_refused(r"there is no ledger at .*init", Ledger, f"sqlite:///{tmp_path}/typo.db")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    check_refused(r"there is no ledger at .*init", Ledger, f"sqlite:///{tmp_path}/empty.db")


def test_a_server_that_is_away_is_one_sentence(tmp_path: Path) -> None:
    address = f"postgresql://user:secret@/ledger?host={tmp_path}"
    with pytest.raises(expunge.RunError, match="did not answer") as error:
        Ledger(address, key=tmp_path / "key")
    assert "secret" not in str(error.value)


def test_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, file = f"sqlite:///{tmp_path}/l.db", tmp_path / "l.db.key"
    Ledger.create(address).close()
    for path in (file, tmp_path / "l.db"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = file.read_bytes()
    for change, said in (
        (lambda: file.chmod(0o644), "can be read by others"),
        (lambda: (file.chmod(0o600), file.write_text("ab" * 32)), "is not the key of this ledger"),
        (lambda: file.write_text("short"), "64 hexadecimal digits"),
        (file.unlink, "is not there"),
    ):
        change()
        for opening in (Ledger, Ledger.create):
            check_refused(said, opening, address)
    file.write_bytes(kept)
    file.chmod(0o600)
    Ledger(address).close()
    monkeypatch.delenv("EXPUNGE_LEDGER_KEY", raising=False)
    check_refused("needs --key FILE", Ledger.create, "postgresql://user@/ledger?host=/nowhere")


def test_records_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from expunge_ledger import Ledger\n"
        f"ledger = Ledger.create('sqlite:///{tmp_path}/l.db')\n"
        "ledger.request('person-1'); ledger.withdraw(1); ledger.requests(); ledger.events()\n"
        "ledger.verify(); ledger.export('person-1'); ledger.models()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_roles_of_postgresql(cluster: Path, state: Path, tmp_path: Path) -> None:
    """The documented script: the ledger works as a role that changes and deletes no event."""
    address, programs = make_database(cluster), find_programs()
    Ledger.create(address, key=tmp_path / "key").close()
    script = Path(expunge_ledger.__file__).with_name("roles.sql")
    psql = [str(programs / "psql"), "-h", str(cluster), "-U", "postgres", "-v", "ON_ERROR_STOP=1"]
    for _ in range(2):  # running it again changes nothing
        done = subprocess.run(
            [*psql, "-f", str(script)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    with Ledger(address.replace("postgres@", "expunge_ledger@"), key=tmp_path / "key") as ledger:
        ledger.register("shop", state)
        ledger.make_token("desk", "requester")
        done_ = forget(ledger, "person-1", "nobody")
        assert (done_.forgotten, done_.not_held) == (1, 1)
        ledger.verify()
        ledger.retire("shop", "gone")
    who = f"host={cluster} dbname=postgres user="
    for statement in (
        "UPDATE events SET body = '{}'", "DELETE FROM events", "TRUNCATE events",
        "DELETE FROM requests", "DELETE FROM work", "DROP TABLE events", "DELETE FROM tokens",
        "CREATE TABLE mine (x int)", "UPDATE alembic_version SET version_num = '1'",
        "ALTER TABLE events DISABLE TRIGGER ALL",
    ):  # fmt: skip
        with (
            psycopg.connect(f"{who}expunge_ledger") as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            connection.execute(statement)
    with psycopg.connect(f"{who}expunge_owner") as connection:
        connection.execute("ALTER TABLE requests ADD COLUMN later integer")
        connection.rollback()


def test_a_full_disk_under_the_database(small: Ledger) -> None:
    small.request("person-1")
    before = small.anchor()
    with small.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.rollback()

    def fill() -> None:
        for i in range(2, 400):
            small.request(f"person-{i}", reason="x" * 2000)

    with pytest.raises(expunge.RunError, match=r"disk is full.*nothing changed"):
        fill()
    count = len(small.requests())
    assert small.anchor().events - before.events == count - 1
    with small.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        connection.rollback()
    assert small.request("person-1000").number == count + 1
    small.verify()
