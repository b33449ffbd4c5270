"""``expunge-ledger``: a life by commands, and what is refused."""

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import expunge
from expunge_ledger.command import app, main
from ledger.tests.stand_in import FILE


@pytest.fixture(autouse=True)
def place(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPUNGE_LEDGER", url)
    monkeypatch.setenv("EXPUNGE_LEDGER_KEY", str(tmp_path / "ledger.key"))
    monkeypatch.chdir(tmp_path)


def call(*words: object, code: int = 0, given: str | None = None) -> str:
    """What a command prints; an error is what ``main`` says of it."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=given)
    if isinstance(done.exception, expunge.ExpungeError):
        assert done.exception.exit_code == code, done.exception
        return str(done.exception)
    assert done.exit_code == code, done.output
    return done.stdout


def load(*words: object) -> Any:
    return json.loads(call(*words, "--json"))


def test_a_life(state: Path, tmp_path: Path) -> None:
    call("init")
    assert "releases go to" in call("register", "shop", state)
    filed = load("request", "person-1", "--received", "2026-01-31", "--reason", "a letter")
    assert (filed["number"], filed["due"], filed["pace"]) == (1, "2026-02-28", "overdue")
    again = call("request", "person-1")
    assert again == "request 1 was filed before; it is open and due 2026-02-28\n"
    load("request", "person-2", "--model", "shop")
    load("request", "person-3")
    assert "request 3 is refused" in call("request", "--refuse", "3", "--reason", "no")
    load("request", "person-4")
    assert "is withdrawn" in call("request", "--withdraw", "4")
    assert "overdue" in call("list")
    done = load("work")["done"][0]
    assert (done["forgotten"], done["release"], done["failed"]) == (2, 1, None)
    assert call("work") == "nothing to do\n"
    listed = load("list", "--state", "answered")["requests"]
    assert [one["answers"][0]["outcome"] for one in listed] == ["forgotten"] * 2
    assert expunge.verify(done["directory"]).holds
    assert call("work", "--model", "shop", "--replay") == "shop holds nobody who was forgotten\n"
    assert "the last one by which" in call("register", "shop", "--readmit", "3", code=2)
    assert load("verify")["holds"]
    call("export", "person-1")
    with zipfile.ZipFile("evidence.zip") as archive:
        assert "shop/0001/certificate.json" in archive.namelist()
    call("export", "person-1", code=2)
    secret = call("token", "desk", "--role", "requester").strip()
    assert secret.startswith("expunge_")
    assert load("token")["tokens"] == [{"name": "desk", "role": "requester", "model": None}]
    assert "desk is revoked" in call("token", "desk", "--revoke")
    assert secret not in call("token")
    assert "0 requests waited" in call("register", "shop", "--retire", "switched off")
    assert "the ledger holds" in call("verify", "--quick")


def test_what_is_no_ledger_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("person-1\n" * 99)
    (tmp_path / "folder").mkdir()
    for place in ("list.txt", "folder", "none/l.db"):
        assert "ledger is" in call("init", "--ledger", f"sqlite:///{tmp_path / place}", code=2)
    new, key = tmp_path / "new.db", tmp_path / "list.txt" / "ledger.key"
    call("init", "--ledger", f"sqlite:///{new}", "--key", key, code=2)
    assert not new.exists()


def test_what_fails_says_so(state: Path, tmp_path: Path) -> None:
    call("init")
    call("register", "shop", state)
    call("request", "person-1")
    (state / FILE).rename(tmp_path / FILE)
    assert "damaged" in call("work", code=1)
    (tmp_path / FILE).rename(state / FILE)
    call("work")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("register shop /nowhere", "state is '/nowhere'"),
        ("register ../shop .", "name is"),
        ("request person-1 --model shop", "model is 'shop'"),
        ("request --withdraw 1", "request is 1"),
        (
            f"request --refuse {10**22} --reason no",
            f"request is {10**22}; it must be the number of a request",
        ),
        ("work --model shop", "model is 'shop'; it must be registered first"),
        ("export person-1", "has no request"),
        ("token a --role admin", "role is 'admin'"),
        ("token a --revoke", "name is 'a'"),
    ],
)
def test_refused(words: str, said: str) -> None:
    call("init")
    assert said in call(*words.split(), code=2)


def test_one_sentence_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EXPUNGE_LEDGER")
    monkeypatch.setattr(sys, "argv", ["expunge-ledger", "list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    sentence = "expunge-ledger: no ledger is named; give --ledger URL, or set EXPUNGE_LEDGER\n"
    assert capsys.readouterr() == ("", sentence)


def test_the_input_is_one_identifier(monkeypatch: pytest.MonkeyPatch) -> None:
    call("init")
    for given in ("person-1\nperson-2\n", "", "person-1\n\n"):
        assert "the input has" in call("request", "-", given=given, code=2)
    assert load("list")["requests"] == []
    call("request", "-", given="person-1\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    from expunge_ledger.command import _read

    with pytest.raises(expunge.InputError, match="the input is not text"):
        _read("-")
