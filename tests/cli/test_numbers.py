"""The real commands, tiny: what they print, what they refuse, and how they exit."""

import json
import math
import subprocess
from pathlib import Path

import pytest

import expunge
from expunge.recipes import METHODS, from_dict
from tests.helpers.job_folder import call
from tests.helpers.job_folder import run as run_alone

GRADIENT = (
    "gradient-clipping --start-clip 0.01 --grad-clip 100 --learning-rate 1e-4 "
    "--weight-decay 10 --steps 1"
)
MODEL = "model-clipping --model-clip 0.5 --learning-rate 1e-3 --weight-decay 10"


def run(command: str) -> subprocess.CompletedProcess[str]:
    return call(*command.split())


def answer(command: str) -> dict:
    done = run(command + " --json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_account_solves_for_epsilon() -> None:
    found = answer(f"account {GRADIENT} --noise-std 0.02827 --delta 1e-5")
    assert found["epsilon"] == pytest.approx(6.573, abs=1e-3)
    assert found["mu"] == pytest.approx(math.sqrt(2), abs=1e-4)
    assert found["compared_to"] == "retrained"
    assert found["noise_std"] == 0.02827
    assert found["centre"]["epsilon"] < found["retrained"]["epsilon"] == found["epsilon"]
    assert 0 < found["survival_bound"] < 1
    assert "Bok" in found["theorem"]


def test_account_solves_for_delta_and_compares_to_the_centre() -> None:
    found = answer(f"account {GRADIENT} --noise-std 0.02827 --epsilon 1")
    assert found["delta"] == pytest.approx(0.2862, abs=1e-4)
    centre = answer(f"account {GRADIENT} --noise-std 0.02827 --epsilon 1 --compared-to centre")
    assert centre["delta"] == found["centre"]["delta"] < found["delta"]


def test_json_has_the_fields_of_the_api() -> None:
    found = answer(f"account {GRADIENT} --noise-std 0.02827 --delta 1e-5")
    recipe = expunge.GradientClipping(0.01, 100.0, 1e-4, 10.0, 1, 0.02827)
    for owner in (recipe, expunge.guarantee(recipe, delta=1e-5)):
        for name in owner.__dataclass_fields__:
            assert name in found
    assert found["epsilon"] == expunge.guarantee(recipe, delta=1e-5).epsilon


def test_no_guarantee_is_null_and_said() -> None:
    command = "account output-perturbation --start-clip 1 --noise-std 0 --delta 1e-5"
    assert answer(command)["epsilon"] is None
    assert "This is no guarantee" in run(command).stdout


@pytest.mark.parametrize(
    ("command", "field", "value"),
    [
        (GRADIENT, "noise_std", 0.14915),
        ("output-perturbation --start-clip 0.01", "noise_std", 0.0746127),
        ("output-perturbation --noise-std 0.0746127", "start_clip", 0.01),
        (MODEL + " --noise-std 0.5", "steps", 6),
    ],
)
def test_calibrate_finds_what_is_left_out(command: str, field: str, value: float) -> None:
    found = answer(f"calibrate {command} --epsilon 1 --delta 1e-5")
    assert found[field] == pytest.approx(value, rel=1e-4)
    assert found["epsilon"] <= 1.0


def test_plan_lists_recipes_that_can_be_read_back() -> None:
    found = answer("plan --epsilon 1 --delta 1e-5 --parameters 20042")
    assert len(found["candidates"]) == 4
    for candidate in found["candidates"]:
        recipe = from_dict(candidate["recipe"])
        assert expunge.guarantee(recipe, delta=1e-5).epsilon <= 1.0
    assert found["restart_is_as_good"] is True


@pytest.mark.parametrize(
    "command",
    [
        f"account {GRADIENT} --noise-std 0.02827 --delta 1e-5",
        f"calibrate {MODEL} --noise-std 0.5 --epsilon 1 --delta 1e-5",
        "plan --epsilon 1 --delta 1e-5 --parameters 20042",
    ],
)
def test_tables_are_plain_text_off_a_terminal(command: str) -> None:
    done = run(command)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout.replace(" … ", ""), "nothing is cut off at 80 columns"


BAD = {
    f"account {GRADIENT} --noise-std=-1 --delta 1e-5": "noise_std is -1.0; it must be",
    f"account {GRADIENT} --noise-std nan --delta 1e-5": "noise_std is nan; it must be a finite",
    f"account {GRADIENT} --noise-std inf --delta 1e-5": "noise_std is inf; it must be a finite",
    f"account {GRADIENT} --noise-std 1 --delta 0": "delta is 0.0; it must be a number in (0, 1)",
    f"account {GRADIENT} --noise-std 1 --delta 1.5": "delta is 1.5; it must be",
    f"account {GRADIENT} --noise-std 1 --epsilon 1000": "epsilon is 1000.0; it must be a number in",
    f"account {GRADIENT} --noise-std 1 --epsilon=-2": "epsilon is -2.0; it must be",
    f"account {GRADIENT} --noise-std 1": "give either delta or epsilon",
    f"account {GRADIENT} --noise-std 1 --delta 1e-5 --epsilon 1": "give either delta or epsilon",
    f"account {GRADIENT} --noise-std 1 --delta 1e-5 --compared-to zero": "compared_to is 'zero'",
    f"account {GRADIENT} --delta 1e-5": "gradient-clipping needs noise_std",
    f"account {GRADIENT} --noise-std 1 --clip 2 --delta 1e-5": "No such option",
    "account gradient-clipping --start-clip 1 --grad-clip 1 --learning-rate 0.1 --weight-decay 10 "
    "--steps 1 --noise-std 1 --delta 1e-5": "learning_rate * weight_decay is 1; it must be below 1",
    f"account {MODEL} --noise-std 1 --steps 0 --delta 1e-5": "steps is 0; it must be a whole",
    f"account {MODEL} --noise-std 1 --steps x --delta 1e-5": "Invalid value for '--steps'",
    "account forgetting --delta 1e-5": "method is 'forgetting'; it must be one of",
    "account --delta 1e-5": "Missing argument 'METHOD'",
    f"calibrate {GRADIENT} --noise-std 1 --epsilon 1 --delta 1e-5": "missing here: nothing",
    "calibrate output-perturbation --epsilon 1 --delta 1e-5": "missing here: start_clip, noise_std",
    "calibrate retraining --epsilon 1 --delta 1e-5": "it must be one of output-perturbation, grad",
    "calibrate none --epsilon 1 --delta 1e-5": "method is 'none'; it must be one of",
    f"calibrate {MODEL} --steps 1 --epsilon 900 --delta 1e-5": "epsilon is 900.0",
    "calibrate model-clipping --model-clip 20 --learning-rate 1 --weight-decay 0 --noise-std 0.5 "
    "--epsilon 1 --delta 1e-5": "model_clip is so large against noise_std",
    "plan --epsilon 1 --delta 1e-5 --parameters 0": "parameters is 0; it must be",
    "plan --epsilon 1 --delta 1e-5": "missing: --parameters; give what is missing, or --job",
    "plan --parameters 9": "missing: --epsilon, --delta; give what is missing",
    "plan --epsilon 1 --job job.toml": "--epsilon is 1.0; it must be left out with --job",
    "remember": "No such command 'remember'",
}


@pytest.mark.parametrize("command", BAD, ids=range(len(BAD)))
def test_bad_input_is_one_sentence_and_exit_code_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert BAD[command] in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_real_processes_exit_alike() -> None:
    good = run_alone(*f"account {GRADIENT} --noise-std 0.02827 --delta 1e-5 --json".split())
    assert good.returncode == 0
    assert json.loads(good.stdout)["epsilon"] == pytest.approx(6.573, abs=1e-3)
    bad = run_alone(*f"account {GRADIENT} --noise-std=-1 --delta 1e-5".split())
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr == "expunge: noise_std is -1.0; it must be a finite number >= 0\n"


def test_help_and_version() -> None:
    assert "account" in run("--help").stdout
    assert run("").stdout == run("--help").stdout
    assert run("--version").stdout.split()[:2] == ["expunge", expunge.__version__]
    for name in METHODS:
        assert name in run("account --help").stdout.replace("\n  ", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_every_letter(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = run_alone(*["plan", "--epsilon", "1", "--delta", "1e-5", "--parameters", "9"])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_defect_is_one_sentence_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("expunge.accounting.guarantee.guarantee", break_down)
    done = run(f"account {GRADIENT} --noise-std 0.02827 --delta 1e-5")
    assert done.returncode == 3
    assert done.stderr.startswith("expunge: this is a defect of expunge: KeyError: 'a defect' (")
    assert done.stderr.count("\n") == 1
