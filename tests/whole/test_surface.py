"""The public surface: what is exported, and that asking for it stays light."""

import importlib
import inspect
import subprocess
import sys

import pytest

import expunge

HEAVY = "torch", "dp_accounting", "matplotlib", "sklearn", "transformers"


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import expunge",
        "import expunge; expunge.guarantee; expunge.calibrate; expunge.plan",
        "import expunge.certificates.certificate, expunge.certificates.record",
        "import expunge.cli.main",
        "from typer.testing import CliRunner\n"
        "from expunge.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
        "from typer.testing import CliRunner\n"
        "from expunge.cli.main import app\n"
        "args = 'account output-perturbation --start-clip 1 --noise-std 9 --delta 1e-5'\n"
        "assert CliRunner().invoke(app, args.split()).exit_code == 0",
    ],
    ids=["package", "accounting", "certificate", "cli", "help", "account"],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert loaded_after(code).isdisjoint(HEAVY)


def test_the_check_above_would_see_torch() -> None:
    assert "torch" in loaded_after("import torch")


def test_help_needs_no_numbers() -> None:
    assert loaded_after("import expunge, expunge.cli.main").isdisjoint({"numpy", "scipy"})


def test_every_exported_name_exists_and_is_documented() -> None:
    assert expunge.__all__ == sorted(expunge.__all__)
    for name in expunge.__all__:
        assert getattr(expunge, name).__doc__, name
    assert set(expunge.__all__) <= set(dir(expunge))


def test_lazy_table_and_exports_agree() -> None:
    lazy = [name for names in expunge._HOMES.values() for name in names]
    assert sorted(lazy) == expunge.__all__
    for home, names in expunge._HOMES.items():
        module = importlib.import_module(f"expunge.{home}")
        for name in names:
            assert getattr(module, name) is getattr(expunge, name)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'forget'"):
        _ = expunge.forget


def test_every_error_is_in_one_tree() -> None:
    errors = importlib.import_module("expunge.errors")
    kinds = [v for v in vars(errors).values() if isinstance(v, type)]
    assert len(kinds) == 7
    for kind in kinds:
        assert issubclass(kind, expunge.ExpungeError)
        assert kind.__name__ in errors.__doc__


def test_the_account_needs_no_heavy_part_of_scipy() -> None:
    named = "cli.main", "accounting.guarantee", "certificates.verification"
    code = "import sys\n" + "".join(f"import expunge.{name}\n" for name in named)
    done = subprocess.run(
        [sys.executable, "-c", code + "print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "scipy.special" in loaded
    assert loaded.isdisjoint({"scipy.stats", "scipy.optimize", "scipy.signal"})


@pytest.mark.parametrize("command", ["demo", "doctor", "audit ."])
def test_a_command_that_lacks_torch_says_what_to_install(command: str) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        f"sys.argv[1:] = {command.split()!r}\n"
        "from expunge.cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "expunge: this command needs torch; pip install 'expunge[torch]'\n"


@pytest.mark.parametrize("name", ["train", "fine_tune", "retrain", "train_many", "fine_tune_many"])
def test_options_stand_in_the_signature(name: str) -> None:
    parameters = inspect.signature(getattr(expunge, name)).parameters
    assert {"epochs", "learning_rate", "batch_size", "schedule"} <= parameters.keys()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


def test_unlearn_has_thirteen_keywords() -> None:
    parameters = inspect.signature(expunge.unlearn).parameters.values()
    assert sum(p.kind is p.KEYWORD_ONLY for p in parameters) == 13
