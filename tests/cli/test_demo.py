"""``expunge demo``: the real command, every route of its table, and what it leaves behind."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import expunge
from expunge.cli import demo as command_demo
from expunge.jobs.directory import FILES, write_run

# Title, folder of its release, epsilon, and whether a control stands beside it.
ROUTES = {
    "exact statistics head": ("statistics-head/release-2", 0.0, False),
    "convex head, solved again": ("convex-head/release-2", 0.0, False),
    "convex head, with noise": ("convex-head-noisy/release-2", 1.0, False),
    "restart from public weights": ("restart", 0.0, False),
    "retraining, 60 epochs": ("retraining", 0.0, False),
    "retraining, 6 epochs": ("retraining-short", 0.0, False),
    "4 shards, 1 person": ("shards/release-2", 0.0, False),
    "4 shards, 89 people": ("shards/release-3", 0.0, False),
    "gradient clipping": ("gradient-clipping", 1.0, True),
    "model clipping": ("model-clipping", 1.0, True),
    "output perturbation": ("output-perturbation", 1.0, True),
    "noise around public weights": ("public-centre", 1.0, True),
}
ROW = re.compile(
    r"^(?P<route>\S.*?)  +(?P<test>[\d.]+)(?: +(?P<control>\d+\.\d))? +(?P<epsilon>\d\S*)"
    r" +(?P<seconds>[\d.]+) +(?P<verified>yes|no)  (?P<keeps>\S.*)$"
)


@dataclass(frozen=True)
class Shown:
    """What the command printed, and the folder it wrote."""

    out: Path
    text: str

    @property
    def rows(self) -> dict[str, re.Match[str]]:
        found = [ROW.match(line) for line in self.text.splitlines()]
        return {row["route"]: row for row in found if row}

    def read_test(self, folder: str, arm: str, stage: str) -> float:
        rows = json.loads((self.out / folder / "metrics.json").read_text())["stages"]
        (found,) = (r["test"] for r in rows if (r["arm"], r["stage"]) == (arm, stage))
        return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    out = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "expunge", "demo", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return Shown(out, done.stdout)


def test_the_table_has_every_route_once_with_its_epsilon_and_control(demo: Shown) -> None:
    assert list(demo.rows) == list(ROUTES)
    for route, (_, epsilon, controlled) in ROUTES.items():
        row = demo.rows[route]
        assert float(row["epsilon"]) == epsilon, route
        assert (row["control"] is not None) == controlled, route
        assert row["verified"] == "yes", route


def test_every_release_is_complete_and_verifies(demo: Shown) -> None:
    for folder, epsilon, _ in ROUTES.values():
        place = demo.out / folder
        assert {p.name for p in place.iterdir() if p.is_file()} == set(FILES)
        before = place.with_name(f"release-{int(place.name[-1]) - 1}") if "/" in folder else None
        found = expunge.verify(place, record=place, parent=before)
        assert epsilon - 0.01 < found.epsilon <= epsilon
        assert found.delta == 1e-5
        assert found.releasable
    written = {p.parent.relative_to(demo.out).as_posix() for p in demo.out.rglob("record.json")}
    learned = {f"{name}/release-1" for name in (
        "statistics-head", "convex-head", "convex-head-noisy", "shards")}  # fmt: skip
    assert written == {folder for folder, _, _ in ROUTES.values()} | learned
    assert not list(demo.out.parent.glob(".run*")), "no half-written directory is left"


def test_everybody_who_asked_is_forgotten_by_every_route(demo: Shown) -> None:
    for folder, _, _ in ROUTES.values():
        told = expunge.verify(demo.out / folder).data.forget
        assert told is not None, folder
        assert told.count == {"shards/release-2": 1, "shards/release-3": 89}.get(folder, 90)


def test_the_table_shows_what_was_measured(demo: Shown) -> None:
    for route, (folder, _, controlled) in ROUTES.items():
        stage = "after fine-tuning" if controlled else "after training"
        test = demo.read_test(folder, folder.partition("/")[0], stage)
        assert demo.rows[route]["test"] == f"{100 * test:.1f}", route
        if controlled:
            control = demo.read_test(folder, "centre", stage)
            assert demo.rows[route]["control"] == f"{100 * control:.1f}", route


def test_what_is_built_to_forget_keeps_its_accuracy_and_noise_keeps_nothing(demo: Shown) -> None:
    test = {route: float(row["test"]) for route, row in demo.rows.items()}
    assert test["exact statistics head"] > 95
    assert test["convex head, solved again"] > 94
    assert test["retraining, 60 epochs"] > 93
    assert demo.read_test("gradient-clipping", "old model", "before") > 0.9
    assert demo.read_test("gradient-clipping", "gradient-clipping", "after noise") < 0.5
    assert demo.read_test("public-centre", "public-centre", "after noise") > 0.75
    assert demo.rows["4 shards, 1 person"]["keeps"] == "3 of its 4 networks"
    assert demo.rows["4 shards, 89 people"]["keeps"] == "0 of its 4 networks"


def test_it_ends_with_the_route_to_take(demo: Shown) -> None:
    last = demo.text.rpartition("\nYour route: ")[2]
    assert last.endswith(".\n")
    assert last.count(".\n") == 1, "one sentence, and nothing after it"
    said = " ".join(last.split())
    order = ("a head built to forget", "a restart", "retraining", "shards", "noisy fine-tuning")
    places = [said.index(name) for name in order]
    assert places == sorted(places)
    for route in ("exact statistics head", "restart from public weights", "retraining, 60 epochs"):
        row = demo.rows[route]
        assert f"here {row['test']} % in {row['seconds']} s" in said


def test_it_is_plain_text_that_fits_a_page(demo: Shown) -> None:
    assert demo.text.isascii()
    shown = demo.text.replace(str(demo.out), "runs/demo")
    assert max(map(len, shown.splitlines())) <= 100


def test_the_commands_that_it_names_work(demo: Shown) -> None:
    named = re.findall(r"expunge (verify|show) (\S+)", demo.text)
    assert [name for name, _ in named] == ["verify", "show"]
    for words in named:
        command = [sys.executable, "-m", "expunge", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("one_thread")
def test_a_release_that_does_not_hold_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(folder: Path, **made: object) -> None:
        with (write_run(folder, **made) / "model.safetensors").open("r+b") as weights:
            weights.seek(-1, 2)
            last = weights.read(1)[0]
            weights.seek(-1, 2)
            weights.write(bytes([last ^ 1]))

    monkeypatch.setattr(command_demo, "write_run", spoil)
    monkeypatch.setitem(command_demo.FULL, "epochs", 1)
    with pytest.raises(expunge.VerificationError, match="weights"):
        command_demo.run_demo(tmp_path / "run")
    assert "yes" not in capsys.readouterr().out


def test_it_overwrites_nothing(demo: Shown) -> None:
    certificate = demo.out / "gradient-clipping" / "certificate.json"
    before = certificate.read_bytes()
    command = [sys.executable, "-m", "expunge", "demo", "--out", str(demo.out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "already holds files" in done.stderr
    assert certificate.read_bytes() == before
