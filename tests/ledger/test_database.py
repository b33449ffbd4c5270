"""Where the tables lie: versions, keys, addresses."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, text

import expunge
from expunge.ledger.chain import START, append
from expunge.ledger.database import connect, read_url, read_version, reading, upgrade
from expunge.ledger.models import register_model
from expunge.ledger.names import make_key
from expunge.ledger.requests import file_request
from expunge.ledger.schema import BOOK, METADATA, VERSION


def test_migrations_lead_to_the_tables(url: str) -> None:
    engine = connect(read_url(url))
    upgrade(engine)
    with reading(engine) as connection:
        assert read_version(connection) == VERSION
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()


def test_a_ledger_of_the_first_version_is_brought_up(url: str, state: Path, tmp_path: Path) -> None:
    key, engine = tmp_path / "key", connect(read_url(url))
    upgrade(engine, "0001")
    secret = make_key(key)
    engine = engine.execution_options(key=secret)
    with engine.execution_options(writes=True).begin() as connection:
        row = {"id": 1, "ledger": "a" * 64, "events": 0, "head": START}
        connection.execute(insert(BOOK).values(**row, check=secret.tag("check", "a" * 64)))
        append(connection, "created", ledger="a" * 64)
        # what this version writes needs a column that the first did not have
        connection.execute(text("ALTER TABLE models ADD COLUMN retired VARCHAR(32)"))
        register_model(connection, "shop", state)
        file_request(connection, secret, "person-1")
        connection.execute(text("ALTER TABLE models DROP COLUMN retired"))
    engine.dispose()
    with pytest.raises(expunge.InputError, match="is of version 0001; expunge ledger init"):
        expunge.Ledger(url, key=key)
    again = expunge.Ledger.create(url, key=key)
    assert again.get(1).state == "open"
    (done,) = again.work()
    assert done.forgotten == 1
    again.verify()
    again.close()


def test_a_ledger_of_a_later_version_is_refused(ledger: expunge.Ledger) -> None:
    with ledger.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    address = ledger.url.render_as_string(hide_password=False)
    with pytest.raises(expunge.CertificateError, match="knows none after"):
        expunge.Ledger(address, key=ledger.key_file)


def test_creating_twice_changes_nothing(ledger: expunge.Ledger) -> None:
    before = ledger.anchor()
    address = ledger.url.render_as_string(hide_password=False)
    again = expunge.Ledger.create(address, key=ledger.key_file)
    assert again.anchor() == before
    again.close()


@pytest.mark.parametrize(
    "url", ["ledger.db", "sqlite://", "sqlite:///:memory:", "mysql://x/y", "", "sqlite:///"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(expunge.InputError, match="ledger is "):
        expunge.Ledger(url)


def test_no_ledger_is_made_by_asking(tmp_path: Path) -> None:
    with pytest.raises(expunge.InputError, match=r"there is no ledger at .*init"):
        expunge.Ledger(f"sqlite:///{tmp_path}/typo.db")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_is_one_sentence(tmp_path: Path) -> None:
    address = f"postgresql://user:secret@/ledger?host={tmp_path}"
    with pytest.raises(expunge.RunError, match="did not answer") as error:
        expunge.Ledger(address, key=tmp_path / "key")
    assert "secret" not in str(error.value)


def test_the_key(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/l.db"
    made = expunge.Ledger.create(address)
    file = tmp_path / "l.db.key"
    assert made.key_file == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "l.db").stat().st_mode) == 0o600
    made.close()
    kept = file.read_bytes()
    file.chmod(0o644)
    with pytest.raises(expunge.InputError, match="can be read by others"):
        expunge.Ledger(address)
    file.chmod(0o600)
    file.write_text("ab" * 32)
    with pytest.raises(expunge.InputError, match="is not the key of this ledger"):
        expunge.Ledger(address)
    file.write_text("short")
    with pytest.raises(expunge.InputError, match="64 hexadecimal digits"):
        expunge.Ledger(address)
    file.unlink()
    with pytest.raises(expunge.InputError, match="is not there"):
        expunge.Ledger(address)
    with pytest.raises(expunge.InputError, match="is not there"):
        expunge.Ledger.create(address)
    file.write_bytes(kept)
    file.chmod(0o600)
    expunge.Ledger(address).close()


def test_postgresql_asks_where_the_key_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPUNGE_LEDGER_KEY", raising=False)
    with pytest.raises(expunge.InputError, match="needs --key FILE"):
        expunge.Ledger.create("postgresql://user@/ledger?host=/nowhere")


def test_what_is_missing_is_named() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import expunge; expunge.Ledger"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs SQLAlchemy; pip install 'expunge[ledger]'" in done.stderr
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "sys.argv[1:] = ['ledger', 'list', '--ledger', 'sqlite:///x.db']\n"
        "from expunge.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "expunge: this command needs sqlalchemy; pip install 'expunge[ledger]'\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_records_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, expunge\n"
        f"ledger = expunge.Ledger.create('sqlite:///{tmp_path}/l.db')\n"
        "ledger.request('person-1'); ledger.withdraw(1); ledger.requests(); ledger.events()\n"
        "ledger.verify(); ledger.export('person-1'); ledger.models()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.stdout == "False\n"
