"""The comparison page prints what its command computes, and the reference script trains."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from expunge import guarantee

ROOT = Path(__file__).parents[2]


def load(name):
    path = ROOT / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table():
    return load("table_comparison")


@pytest.fixture(scope="module")
def printed(table):
    return table.tabulate_noise()


def test_the_page_prints_the_noise_that_its_command_computes(table, printed):
    text = table.DOCS.read_text(encoding="utf-8")
    assert table.replace_table(text, "noise", printed) == text
    changed = [*printed[:-1], printed[-1].replace("0.05067", "0.05066")]
    assert table.replace_table(text, "noise", changed) != text


def test_every_printed_noise_meets_the_target_and_no_less_would(table, printed):
    """Each recipe of the table certifies (1, 1e-5), and with 1 % less noise it does not."""
    for row in table.list_rows(13):
        if row.recipe is None or "classical" in row.method:
            continue
        name = "noise_multiplier" if "DP-SGD" in row.method else "noise_std"
        noise = getattr(row.recipe, name)
        assert guarantee(row.recipe, delta=1e-5).epsilon <= 1.0
        less = type(row.recipe)(**(vars(row.recipe) | {name: 0.99 * noise}))
        assert guarantee(less, delta=1e-5).epsilon > 1.0
        shown = next(line for line in printed if line.startswith(f"| {row.method} |"))
        assert float(shown.split("|")[5]) >= table.read_noise(row.recipe)


def test_what_assumes_nothing_does_not_depend_on_k_and_the_rest_does(printed):
    for line in printed[2:]:
        assumes, *noise = (cell.strip() for cell in (line.split("|")[2], *line.split("|")[4:7]))
        one, all_ = float(noise[0]), float(noise[2])
        assert (one == all_) is (assumes == "nothing")


@pytest.mark.slow
def test_the_comparison_runs(table, capsys):
    assert table.main(["--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    retraining = next(line for line in lines if line.startswith("| retraining |") and "→" in line)
    assert float(retraining.split("→")[1].strip(" |")) > 85


def test_the_reference_script_trains_and_keeps_other_entries(tmp_path):
    script = load("train_reference")
    options = ["--smoke", "--out", str(tmp_path)]
    first = script.main(["--task", "mnist", *options])
    script.main(["--task", "cifar10", "--augment", "--seed", "1", *options])
    entries = json.loads((tmp_path / "reference.json").read_text())
    assert sorted(entries) == ["cifar10-augmented-1", "mnist-0"]
    assert entries["mnist-0"] == first
    assert script.main(["--task", "mnist", *options]) == first
    assert (tmp_path / "models" / "mnist-0.safetensors").stat().st_size > 1000
    assert [point["epoch"] for point in first["curve"]] == [1, 2, 3]
    assert first["test"] > 30


def test_the_reference_settings_are_the_papers():
    settings = load("train_reference").SETTINGS
    assert {(a.batch_size, a.weight_decay) for a in settings.values()} == {(128, 5e-4)}
    assert (settings["mnist"].epochs, settings["mnist"].learning_rate) == (30, 0.06)
    assert (settings["cifar10"].epochs, settings["cifar10"].learning_rate) == (100, 0.1)


def test_the_measured_reference_is_what_the_page_says():
    entries = json.loads((ROOT / "experiments" / "results" / "reference.json").read_text())
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert 88 < entries["mnist-0"]["test"] < 92
    assert 60 < entries["cifar10-0"]["test"] < 67
    script = load("train_reference")
    assert script.replace_table(text, script.tabulate(entries)) == text
