"""The examples run from an installed wheel, as somebody has it who never saw this repository.

A new environment holds the wheel and nothing else of ours. What others wrote (torch, scikit-learn,
transformers …) is read from the environment of these tests through a path file: installing it
anew would take minutes and test their wheels, not ours. Editable installs are path files too, and
such files are not followed from one another, so the source tree cannot be seen; the first test
holds that.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ("tabular", "resnet", "frozen_head", "trainer", "second_request")


def read_commands(example: str) -> list[str]:
    """The commands in an example's README, without what is said of them."""
    text = (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert block, example
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_at_most_five_commands_and_verifies(example: str) -> None:
    commands = read_commands(example)
    assert len(commands) <= 5
    assert any(command.startswith("expunge verify ") for command in commands)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("new")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    made = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(made, check=True, cwd=folder)
    place = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (wheel,) = folder.glob("expunge-*.whl")
    programs = place / "bin"
    install = ["--python", str(programs / "python"), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True, cwd=folder)
    scheme = {"base": str(place), "platbase": str(place)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def run(command: str, folder: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_environment_has_the_wheel_and_not_the_source(installed: Path, tmp_path: Path) -> None:
    code = "import expunge, sys; print(expunge.__file__); print(*sys.path, sep='\\n')"
    done = run(f'python -c "{code}"', tmp_path, installed)
    where, *paths = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed.parent), done.stderr
    assert not [path for path in paths if Path(path) in (ROOT, ROOT / "src")]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_ends_in_a_certificate_that_holds_and_is_level_with_retraining(
    example: str, installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "."], cwd=ROOT / "examples" / example, check=True, capture_output=True,
        text=True,
    ).stdout.split()  # fmt: skip
    for name in listed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples" / example / name, folder / name)
    printed = ""
    for command in read_commands(example):
        done = run(command, folder, installed)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout
    assert re.search(r"certificate\.json holds: epsilon = ", printed), printed
    assert printed.splitlines()[-1] == "level", printed
