"""A PostgreSQL cluster of its own, in a temporary folder, reached by a socket there."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISSING = "PostgreSQL is not installed here (apt-get install postgresql)"


def find_programs() -> Path | None:
    """Where the newest PostgreSQL's programs are, as Debian puts them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@contextmanager
def start_cluster(programs: Path) -> Iterator[Path]:
    """The folder of the socket; ``initdb`` refuses root, so another user runs it then."""
    folder = Path(tempfile.mkdtemp(prefix="expunge-pg-", dir="/tmp"))
    other = {}
    if os.getuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = "postgres" if "postgres" in names else "nobody"
        shutil.chown(folder, user)
        other = {"user": user, "extra_groups": []}

    def command(name: str, *words: str) -> dict:
        given = [str(programs / name), "-D", str(folder / "data"), *words]
        return {"args": given, "cwd": folder, **other}

    initialise = command("initdb", "-U", "postgres", "-A", "trust", "--no-sync")
    done = subprocess.run(**initialise, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off")
    with (folder / "log").open("w") as log:
        started = command("postgres", *words, "-c", "max_connections=60")
        server = subprocess.Popen(**started, stdout=log, stderr=log)
        try:
            _wait(programs, folder, server)
            yield folder
        finally:
            server.send_signal(signal.SIGQUIT)
            server.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


def _wait(programs: Path, folder: Path, server: subprocess.Popen) -> None:
    ask = [programs / "pg_isready", "-q", "-h", folder]
    while subprocess.run(ask, check=False).returncode != 0:
        assert server.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)


def make_database(socket: Path, name: str = "postgres") -> str:
    """The address of an empty database: the one that there is, emptied, or a new one."""
    import psycopg

    address = f"host={socket} user=postgres dbname=postgres"
    others = "pg_stat_activity WHERE datname = 'postgres' AND pid <> pg_backend_pid()"
    with psycopg.connect(address, autocommit=True) as connection:
        if name != "postgres":
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        else:
            connection.execute(f"SELECT pg_terminate_backend(pid) FROM {others}")
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
    return f"postgresql+psycopg://postgres@/{name}?host={socket}"
