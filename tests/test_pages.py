"""Every command and every block of every page runs, in order, in a folder of its own.

A page is a session. Blocks of Python run in one namespace, as doctests where they begin with a
prompt; a block with a title is the file of that name; in a console block ``$`` begins a command and
what follows is what it prints, with ``...`` for what may differ. ``<!-- slow -->`` before a block
leaves it to ``make test-slow``; ``<!-- no test: why -->`` leaves it out.
"""

import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import expunge
import expunge.linear_model
from expunge.jobs import tables
from tests.helpers.job_folder import call, make_environment
from tests.jobs.test_examples import run_python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
FENCE = re.compile(
    r'^(?:<!-- (slow|no test)[^>]*-->\n)?```(\w*)(?: title="([^"]+)")?\n(.*?)^```$',
    flags=re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", flags=re.MULTILINE)
LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MOST_WORDS, MOST_UNTESTED = 20_000, 8
COMMANDS = {"expunge": "expunge.cli.main", "expunge-ledger": "expunge_ledger.command"}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of libraries that pages use
]


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    title: str
    text: str
    line: int


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(*(part or "" for part in found.groups()), line=text[: found.start()].count("\n") + 1)
        for found in FENCE.finditer(text)
    ]


def list_pages(slow: bool) -> list[str]:
    """Pages with something to run; slow ones are those that have a block of that mark."""
    marks = {name: [b.mark for b in read_blocks(page)] for name, page in PAGES.items()}
    wanted = "slow" if slow else ""
    return [name for name, found in marks.items() if wanted in found]


class Session:
    """What one page does, one block after the other."""

    def __init__(self, name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.name, self.folder, self.patch = name, folder, patch
        self.names: dict[str, Any] = {"__name__": "__page__"}
        patch.chdir(folder)

    def run(self, block: Block) -> None:
        where = f"{self.name}, line {block.line}"
        match block:
            case Block(title=title) if title:
                Path(title).parent.mkdir(parents=True, exist_ok=True)
                Path(title).write_text(block.text)
            case Block(language="python", text=text) if text.startswith(">>>"):
                test = doctest.DocTestParser().get_doctest(
                    text, self.names, where, where, block.line
                )
                found = list[str]()
                runner = doctest.DocTestRunner(optionflags=LOOSELY)
                runner.run(test, out=found.append, clear_globs=False)
                self.names.update(test.globs)
                assert not found, "".join(found)
            case Block(language="python"):
                file = self.folder / f".block-{block.line}.py"  # a file, so that it has a source
                file.write_text(block.text)
                exec(compile(block.text, str(file), "exec"), self.names)
            case Block(language="console"):
                for command, expected in COMMAND.findall(block.text):
                    self.type(command.strip(), expected, where)
            case Block(language="toml"):
                tomllib.loads(block.text)
            case _:
                pass

    def type(self, command: str, expected: str, where: str) -> None:
        """One command as somebody types it; where it can, without a process of its own."""
        program, *words = shlex.split(command, comments=True)
        if program == "cd":
            self.patch.chdir(words[0])
            return
        if program == "export":
            self.patch.setenv(*words[0].split("=", 1))
            return
        if program == "python":
            done = subprocess.CompletedProcess(
                words, 0, run_python(words, Path.cwd(), self.patch), ""
            )
        elif program in COMMANDS and not re.search(r"[|><;&]", command):
            main = importlib.import_module(COMMANDS[program]).main
            done = call(*words, program=program, main=main)
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, check=False,
                env=make_environment(PATH=path),
            )  # fmt: skip
        shown = [done.stdout, done.stderr, done.stderr + done.stdout, done.stdout + done.stderr]
        refused = expected.startswith("expunge: ")
        assert (done.returncode != 0) == refused, f"{where}: {command}\n{done.stderr}"
        checker = doctest.OutputChecker()
        matches = any(checker.check_output(expected, one, LOOSELY) for one in shown)
        assert matches or not expected.strip(), f"{where}: {command}\n{shown[-1]}"


WHOLE = [pytest.param(name, True, marks=pytest.mark.slow) for name in list_pages(slow=True)]
MARKED = [*((name, False) for name in list_pages(slow=False)), *WHOLE]


@pytest.mark.parametrize(("name", "whole"), MARKED)
def test_a_page_runs(tmp_path: Path, monkeypatch: Any, name: str, whole: bool) -> None:
    session = Session(name, tmp_path, monkeypatch)
    for block in read_blocks(PAGES[name]):
        if not block.mark or (whole and block.mark == "slow"):
            session.run(block)


def test_blocks_say_what_they_are() -> None:
    """A block without a language would not be run; few blocks are left out."""
    blocks = [(name, block) for name, page in PAGES.items() for block in read_blocks(page)]
    plain = [f"{name}, line {b.line}" for name, b in blocks if not b.language]
    assert plain == []
    commands = [
        f"{name}, line {b.line}"
        for name, b in blocks
        if b.language not in ("console", "python", "toml")
        and re.search(r"^\s*expunge ", b.text, re.M)
    ]
    assert commands == [], "commands belong into console blocks"
    assert sum(block.mark == "no test" for _, block in blocks) <= MOST_UNTESTED
    fences = {name: page.read_text().count("\n```") for name, page in PAGES.items()}
    assert {name: 2 * len(read_blocks(page)) for name, page in PAGES.items()} == fences


def test_the_pages_are_short() -> None:
    pages = [*PAGES.values(), ROOT / "README.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS


def find_mentions(pattern: str) -> Iterator[tuple[str, str]]:
    for name, page in PAGES.items():
        for found in re.findall(pattern, page.read_text(encoding="utf-8")):
            yield name, found


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return part in getattr(found, "__dataclass_fields__", {})
            found = getattr(found, part)
        return True
    return False


def test_names_on_pages_exist() -> None:
    mentions = find_mentions(r"`(expunge(?:\.\w+)+)[`(]")
    assert sorted({m for m in mentions if not is_there(m[1])}) == []


def test_files_on_pages_exist() -> None:
    kinds = r"`((?:src|tests|experiments|benchmarks|examples|docs|ledger)/[\w./-]+)"
    mentions = find_mentions(kinds)
    assert sorted({m for m in mentions if not (ROOT / m[1].rstrip("/.")).exists()}) == []


def test_every_public_name_is_in_the_reference() -> None:
    pages = [page.read_text() for name, page in PAGES.items() if name.startswith("reference/")]
    found = re.findall(r"^::: ([\w.]+)$", "\n".join(pages), flags=re.MULTILINE)
    linear = [f"linear_model.{name}" for name in expunge.linear_model.__all__]
    assert sorted(found) == sorted(f"expunge.{name}" for name in [*expunge.__all__, *linear])


TABLES = ("Model", "Data", "Training", "Retraining", "Noisy", "Output", "Linear")


def test_every_key_of_a_job_is_on_its_page() -> None:
    """A row for each, with the default and the words of its own refusal."""
    page = PAGES["job_file.md"].read_text().splitlines()
    for table in TABLES:
        for key, field in getattr(tables, f"{table}Table").model_fields.items():
            if key == "name" and field.is_required():
                continue  # the row of retraining says all names
            default = "–"
            if field.is_required():
                default = "required"
            elif field.default is not None:
                default = f"`{json.dumps(field.default)}`"
            assert f"| `{key}` | {default} | {field.description} |" in page


def test_the_comparison_is_what_its_script_wrote() -> None:
    results = ROOT / "experiments" / "results" / "table_comparison.md"
    page = PAGES["comparison.md"].read_text().splitlines()
    assert [line for line in results.read_text().splitlines() if line not in page] == []


def test_forgetting_with_a_trainer_takes_six_lines() -> None:
    """Beside build, data and train, which people have."""
    after = PAGES["howto/retraining.md"].read_text().partition("forgetting takes six lines")[2]
    block = FENCE.search(after)
    assert block is not None
    assert len(block[4].splitlines()) == 6


def test_every_field_of_a_certificate_is_on_its_page() -> None:
    shown = set(re.findall(r"`(\w+)`", PAGES["certificate_format.md"].read_text()))
    assert {*expunge.Certificate.model_fields, *expunge.Record.model_fields} <= shown
