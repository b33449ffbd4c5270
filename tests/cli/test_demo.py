"""``expunge demo``: every route of its table, and what it leaves behind."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import expunge
from expunge.cli import demo as command_demo
from tests.helpers.job_folder import call, refuse, succeed

# Title, folder of its release, epsilon, and whether a control is beside it.
ROUTES = {
    "retraining": ("retraining", 0.0, False),
    "logistic regression": ("logistic-regression/release-2", 0.0, False),
    "head on a published network": ("head/release-2", 0.0, False),
    "4 shards, 1 person": ("shards/release-2", 0.0, False),
    "4 shards, 54 people": ("shards/release-3", 0.0, False),
    "gradient clipping": ("gradient-clipping/release", 1.0, True),
    "model clipping": ("model-clipping/release", 1.0, True),
    "output perturbation": ("output-perturbation/release", 1.0, True),
}
ROW = re.compile(
    r"^(?P<route>\S.*?)  +(?P<test>[\d.]+)(?: +(?P<control>\d+\.\d))? +(?P<epsilon>\d\S*)"
    r" +(?P<seconds>[\d.]+) +(?P<verified>yes)  (?P<keeps>\S.*)$"
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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    out = tmp_path_factory.mktemp("demo") / "run"
    return Shown(out, succeed("demo", "--out", out))


def test_the_table_has_every_route_once_with_its_epsilon_and_control(demo: Shown) -> None:
    assert list(demo.rows) == list(ROUTES)
    for route, (_, epsilon, controlled) in ROUTES.items():
        row = demo.rows[route]
        assert float(row["epsilon"]) == epsilon, route
        assert (row["control"] is not None) == controlled, route


def test_every_release_verifies_and_names_who_asked(demo: Shown) -> None:
    for folder, epsilon, _ in ROUTES.values():
        place = demo.out / folder
        numbered = place.name[-1].isdigit()
        before = place.with_name(f"release-{int(place.name[-1]) - 1}") if numbered else None
        found = expunge.verify(place, parent=before).certificate
        assert epsilon - 0.01 < found.epsilon <= epsilon
        assert found.releasable
        count = {"shards/release-2": 1, "shards/release-3": 54}.get(folder, 55)
        assert found.forget.count == count, folder
    assert not list(demo.out.parent.glob(".run*")), "no half-written folder is left"


def test_exact_routes_keep_their_accuracy_and_noise_keeps_nothing(demo: Shown) -> None:
    test = {route: float(row["test"]) for route, row in demo.rows.items()}
    for route in ("retraining", "logistic regression", "head on a published network"):
        assert test[route] > 85, route
    assert demo.rows["4 shards, 1 person"]["keeps"] == "3 of its 4 networks"
    assert demo.rows["4 shards, 54 people"]["keeps"] == "0 of its 4 networks"
    for route in ("gradient clipping", "model clipping", "output perturbation"):
        assert abs(test[route] - float(demo.rows[route]["control"])) < 15, route


def test_it_is_plain_text_that_ends_with_the_next_command(demo: Shown) -> None:
    assert demo.text.isascii()
    shown = demo.text.replace(str(demo.out), "runs/demo")
    assert max(map(len, shown.splitlines())) <= 100
    assert demo.text.splitlines()[-1].split() == [
        "Your", "own", "model:", "expunge", "init", "mine",
    ]  # fmt: skip
    for name, folder in re.findall(r"expunge (verify|show) (\S+)", demo.text):
        assert call(name, folder).returncode == 0


def test_it_overwrites_nothing(demo: Shown) -> None:
    assert "already holds files" in refuse("demo", "--out", demo.out)


@pytest.mark.usefixtures("one_thread")
def test_a_release_that_does_not_hold_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(release: expunge.Release, folder: Path) -> Path:
        place = release.save(folder) / "model.safetensors"
        data = bytearray(place.read_bytes())
        data[-1] ^= 1
        place.write_bytes(data)
        return folder

    monkeypatch.setattr(command_demo, "write_release", spoil)
    with pytest.raises(expunge.VerificationError, match="hash"):
        command_demo.run_demo(tmp_path / "run")
    assert "yes" not in capsys.readouterr().out
