"""What is done with a release: verify, show, report, audit, keys; and what none of it loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.job_folder import call, refuse, run, succeed, write_job
from tests.helpers.sample_releases import save_release


@pytest.fixture
def release(tmp_path: Path) -> Path:
    save_release(tmp_path / "run", "gradient-clipping")
    return tmp_path / "run"


def test_verify_says_what_it_did_not_look_at(release: Path) -> None:
    shown = succeed("verify", release)
    assert " holds: epsilon = " in shown
    assert "not looked at: who wrote it: it is not signed" in shown
    assert "not looked at: the operator's code" in shown
    found = json.loads(succeed("verify", release, "--json"))
    assert found["holds"] is True
    assert found["unchecked"]
    assert found["certificate"]["digest"]


def test_what_differs_is_named_with_exit_code_1(release: Path) -> None:
    weights = bytearray((release / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (release / "model.safetensors").write_bytes(weights)
    done = call("verify", release, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["holds"] is False
    assert "hash" in told["differs"]
    assert done.stderr.startswith("expunge: ")


def test_the_people_of_a_request_are_compared(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    succeed("unlearn", path)
    succeed("verify", tmp_path / "run", "--people", tmp_path / "forget.txt")
    (tmp_path / "list.csv").write_text("row,person\n1,p3\n2,p7\n3,p31\n")
    table = ("--people", tmp_path / "list.csv", "--column", "person")
    succeed("verify", tmp_path / "run", *table)
    (tmp_path / "other.txt").write_text("p3\np8\n")
    told = refuse("verify", tmp_path / "run", "--people", tmp_path / "other.txt", code=1)
    assert "not about the people" in told


ESCAPES = ["\x1b[2J\x1b[1;1Hrun holds", "two\nlines", "\x9b31m", "\u202eabc"]


@pytest.mark.parametrize("words", ESCAPES)
def test_words_of_a_file_move_no_cursor(release: Path, words: str) -> None:
    """A certificate whose text has control characters, and names of files that have them."""
    file = release / "certificate.json"
    plain = json.loads(file.read_text())
    for field in ("theorem", "created"):
        file.write_text(json.dumps(plain | {field: words}))
        for command in ("show", "verify", "report"):
            done = call(command, release)
            assert done.returncode in (1, 2)
            assert words not in done.stdout + done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
    other = release.with_name("a" + words.replace("/", ""))
    release.rename(other)
    done = call("verify", other)
    assert words not in done.stdout + done.stderr


def test_show_report_and_sign(release: Path) -> None:
    assert "CERTIFICATE OF UNLEARNING" in succeed("show", release)
    assert json.loads(succeed("show", release, "--json"))["schema_version"] == 1
    assert succeed("report", release).strip().endswith("report.html")
    succeed("report", release, "--public")
    key = release.with_name("key.pem")
    made = json.loads(succeed("keygen", key, "--json"))
    assert made["fingerprint"] in succeed("sign", release, "--key", key)
    assert made["fingerprint"] in (release / "report.html").read_text()
    assert "not signed" not in succeed("verify", release, "--key", f"{key}.pub")
    assert call("keygen", key).returncode == 2, "a key is never overwritten"
    other = release.with_name("other.pem")
    succeed("keygen", other)
    assert call("sign", release, "--key", other).returncode == 2, "another's signature is there"
    assert call("verify", release, "--key", f"{other}.pub").returncode == 1


LIGHT = [
    ["account", "output-perturbation", "--start-clip", "1", "--noise-std", "9", "--delta", "1e-5"],
    ["plan", "--epsilon", "1", "--delta", "1e-5", "--parameters", "9"], ["verify", "run"],
    ["show", "run"], ["report", "run"], ["keygen", "other.pem"],
    ["sign", "run", "--key", "key.pem"], ["init", "mine"], ["--help"], ["--version"],
]  # fmt: skip


def run_without_torch(commands: list[list[str]], folder: Path) -> None:
    text = (
        "import runpy, sys\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['expunge', *words]\n"
        "    try:\n"
        "        runpy.run_module('expunge', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (words, end.code)\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    given = [sys.executable, "-c", text]
    done = subprocess.run(given, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_that_train_nothing_never_load_torch(release: Path) -> None:
    succeed("keygen", release.with_name("key.pem"))
    run_without_torch(LIGHT, release.parent)


def test_a_linear_model_forgets_without_torch(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import numpy as np\nimport expunge\n"
        "def load():\n"
        "    x = np.random.default_rng(0).standard_normal((60, 4))\n"
        "    return expunge.Data((x, (x[:, 0] > 0) * 1), ids=[f'p{i}' for i in range(60)])\n"
    )
    (tmp_path / "job.toml").write_text(
        '[data]\nload = "one.py:load"\n[method]\nname = "linear-model"\n[output]\n'
    )
    (tmp_path / "list.txt").write_text("p3\n")
    lines = ("check job.toml", "plan --job job.toml", "learn job.toml",
             "forget state list.txt --out release-2", "replay release-2 job.toml")  # fmt: skip
    run_without_torch([line.split() for line in lines], tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_printed_is_no_verdict(release: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "expunge", "verify", str(release)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "No space left on device" in done.stderr


def test_doctor(tmp_path: Path) -> None:
    found = json.loads(succeed("doctor", "--json"))
    assert found["good"] is True
    assert found["versions"]["numpy"]
    done = run("doctor", cwd=tmp_path)
    assert "all is well" in done.stdout
