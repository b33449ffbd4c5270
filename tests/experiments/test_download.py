"""Downloads against a local server that can stop, lie and refuse; nothing half-written remains."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import cifar
import download
import mnist
from expunge.errors import InputError

CONTENT = bytes(range(256)) * 400
CHECKSUM = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /good, half of it per answer at /stops, other bytes at /lies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        body = CONTENT[::-1] if self.path == "/lies" else CONTENT
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if self.path == "/absent":
            self.send_error(404, "Not Found")
            return
        if start >= len(body):
            self.send_error(416, "Range Not Satisfiable")
            return
        if wanted and self.path != "/whole":
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            start = 0
            self.send_response(200)
        rest = body[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2] if self.path == "/stops" else rest)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    for _ in range(2):
        assert download.fetch([server.url("good")], path, CHECKSUM) == path
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["file.bin"]
    assert server.asked == [("/good", None)]


def test_a_transfer_that_stops_is_resumed_where_it_stopped(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(InputError, match=r"stopped after \d+ of 102400 bytes.*root= or EXPUNGE_DA"):
        download.fetch([server.url("stops")], path, CHECKSUM, attempts=2)
    assert names(tmp_path) == ["file.bin.part"]
    got = (tmp_path / "file.bin.part").stat().st_size
    assert got == len(CONTENT) * 3 // 4
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:got]
    download.fetch([server.url("good")], path, CHECKSUM)
    assert server.asked[-1] == ("/good", f"bytes={got}-")
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_server_that_ignores_the_range_starts_the_file_anew(
    server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "file.bin"
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:100])
    download.fetch([server.url("whole")], path, CHECKSUM)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"not the beginning", CONTENT + b"too long", CONTENT])
def test_a_part_of_any_kind_ends_in_the_right_file(
    server: Server, tmp_path: Path, stale: bytes
) -> None:
    path = tmp_path / "file.bin"
    (tmp_path / "file.bin.part").write_bytes(stale)
    download.fetch([server.url("good")], path, CHECKSUM)
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_wrong_checksum_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(InputError, match=r"gives a file with sha256 .* instead of") as caught:
        download.fetch([server.url("lies")], path, CHECKSUM)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []
    assert len(server.asked) == 1


def test_the_next_place_is_tried(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    urls = [server.url(name) for name in ("absent", "lies", "good")]
    assert download.fetch(urls, path, CHECKSUM).read_bytes() == CONTENT
    assert [place for place, _ in server.asked] == ["/absent", "/lies", "/good"]


def test_a_file_that_is_there_but_wrong_is_refused_and_kept(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match="is not the official file"):
        download.fetch([server.url("good")], path, CHECKSUM)
    assert path.read_bytes() == b"mine"
    assert names(tmp_path) == ["file.bin"]


def test_two_downloads_at_once_give_one_whole_file(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    errors: list[BaseException] = []

    def run() -> None:
        try:
            download.fetch([server.url("good")], path, CHECKSUM)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]
    assert len(server.asked) == 1


def test_offline_every_task_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPUNGE_DATA", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    for load, place in (
        (mnist.load, "storage.googleapis.com"),
        (lambda: mnist.load(name="fashion-mnist"), "fashion-mnist.s3-website"),
        (lambda: cifar.load("cifar10"), "www.cs.toronto.edu"),
        (lambda: cifar.load("cifar100"), "www.cs.toronto.edu"),
    ):
        with pytest.raises(InputError, match="could not be downloaded") as caught:
            load()
        assert f"{place}" in str(caught.value)
        assert "cannot be reached" in str(caught.value)
        assert "EXPUNGE_DATA" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be written"):
        download.fetch([], tmp_path / "file" / "x", CHECKSUM)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def test_only_the_members_named_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    write_tar(archive, {"set/a.bin": CONTENT, "../evil": b"x", "set/b.bin": b"y"})
    download.unpack(archive, {"set/a.bin": CHECKSUM}, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["a.bin"]
    assert not (tmp_path / "evil").exists()
    with pytest.raises(InputError, match=r"set/b.bin in a.tar.gz is not the official file"):
        download.unpack(archive, {"set/b.bin": CHECKSUM}, tmp_path / "out")
    with pytest.raises(InputError, match="cannot be unpacked"):
        download.unpack(archive, {"set/absent.bin": CHECKSUM}, tmp_path / "out")
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(InputError, match="cannot be unpacked"):
        download.unpack(archive, {"set/a.bin": CHECKSUM, "set/b.bin": CHECKSUM}, tmp_path / "o2")


def test_the_data_folder_is_root_then_the_variable_then_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPUNGE_DATA", "/srv/sets")
    assert download.data_folder("/here") == Path("/here")
    assert download.data_folder() == Path("/srv/sets")
    monkeypatch.delenv("EXPUNGE_DATA")
    assert download.data_folder() == Path.home() / ".cache" / "expunge"


def test_no_bar_is_drawn_unless_stderr_is_a_terminal(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    download.fetch([server.url("good")], tmp_path / "quiet.bin", CHECKSUM)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    download.fetch([server.url("good")], tmp_path / "shown.bin", CHECKSUM)
    out, err = capsys.readouterr()
    assert out == ""
    assert "shown.bin" in err
