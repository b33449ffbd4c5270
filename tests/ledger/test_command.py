"""``expunge ledger``: a life by commands, and what is refused."""

import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

from job_folder import call


@pytest.fixture(autouse=True)
def place(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPUNGE_LEDGER", url)
    monkeypatch.setenv("EXPUNGE_LEDGER_KEY", str(tmp_path / "ledger.key"))
    monkeypatch.chdir(tmp_path)


def succeed(*words: str | Path) -> dict:
    done = call("ledger", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_life(state: Path, tmp_path: Path) -> None:
    assert call("ledger", "init").returncode == 0
    assert "releases go to" in call("ledger", "register", "shop", state).stdout
    filed = succeed("request", "person-1", "--received", "2026-01-31", "--reason", "a letter")
    assert (filed["number"], filed["due"], filed["clock"]) == (1, "2026-02-28", "overdue")
    again = call("ledger", "request", "person-1")
    assert again.stdout == "request 1 was filed before; it is open and due 2026-02-28\n"
    succeed("request", "person-2", "--model", "shop")
    succeed("request", "person-3")
    assert "request 3 is refused" in call("ledger", "refuse", "3", "--reason", "no").stdout
    succeed("request", "person-4")
    assert "is withdrawn" in call("ledger", "withdraw", "4").stdout
    assert "overdue" in call("ledger", "list").stdout
    told = succeed("work")["done"][0]
    assert (told["forgotten"], told["release"], told["failed"]) == (2, 1, None)
    assert call("ledger", "work").stdout == "nothing to do\n"
    listed = succeed("list", "--state", "answered")["requests"]
    assert [one["answers"][0]["outcome"] for one in listed] == ["forgotten"] * 2
    assert call("verify", told["directory"]).returncode == 0
    assert "holds nobody of the 2" in call("ledger", "check", state).stdout
    assert call("ledger", "replay", "shop").stdout == "shop holds nobody who was forgotten\n"
    assert succeed("verify")["holds"]
    assert call("ledger", "export", "person-1").returncode == 0
    with zipfile.ZipFile("evidence.zip") as archive:
        assert "shop/0001/certificate.json" in archive.namelist()
    assert call("ledger", "export", "person-1").returncode == 2


def test_what_is_no_ledger_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("person-1\n" * 99)
    (tmp_path / "folder").mkdir()
    for place in ("list.txt", "folder"):
        done = call("ledger", "init", "--ledger", f"sqlite:///{tmp_path / place}")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    new = tmp_path / "new.db"
    key = tmp_path / "list.txt" / "ledger.key"
    done = call("ledger", "init", "--ledger", f"sqlite:///{new}", "--key", key)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert not new.exists()


def test_what_fails_says_so(state: Path, tmp_path: Path) -> None:
    call("ledger", "init")
    call("ledger", "register", "shop", state)
    call("ledger", "request", "person-1")
    (state / "sums").rename(tmp_path / "sums")
    done = call("ledger", "work")
    assert done.returncode == 1
    assert "damaged" in done.stderr
    (tmp_path / "sums").rename(state / "sums")
    assert call("ledger", "work").returncode == 0
    assert call("ledger", "check", tmp_path).returncode == 2


REFUSED = {
    "list": "there is no ledger at",
    "request person-1": "there is no ledger at",
    "register shop /nowhere": "there is no ledger at",
}


@pytest.mark.parametrize("words", REFUSED)
def test_before_there_is_a_ledger(words: str) -> None:
    done = call("ledger", *words.split())
    assert done.returncode == 2
    assert REFUSED[words] in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("register shop /nowhere", "state is '/nowhere'"),
        ("register ../shop .", "name is '../shop'"),
        ("request person-1 --model shop", "model is 'shop'"),
        ("withdraw 1", "request is 1"),
        (f"withdraw {10**22}", f"request is {10**22}; it must be the number of a request"),
        (f"refuse {2**31} --reason no", f"request is {2**31}; it must be the number of a request"),
        ("work --model shop", "model is 'shop'; it must be registered first"),
        ("export person-1", "has no request"),
        ("check /nowhere", "state is '/nowhere'"),
    ],
)
def test_refused(words: str, said: str) -> None:
    call("ledger", "init")
    done = call("ledger", *words.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_no_ledger_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPUNGE_LEDGER")
    done = call("ledger", "list")
    assert (done.returncode, "no ledger is named" in done.stderr) == (2, True)


def test_a_name_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    call("ledger", "init")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    done = call("ledger", "request", "-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "the input is not text" in done.stderr
