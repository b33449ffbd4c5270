"""Every command of the documentation runs, and prints what its page shows."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from expunge.jobs.tables import HEAD_TABLES, SHARDS_TABLES, TABLES, ConvexTable, PlanTable
from pages_run import Shell, agree, compare, merge_tables, read_blocks, split_commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN = [
    *(DOCS / f"{n}.md" for n in ("tutorial", "which_route", "job_file", "speed")),
    *sorted((DOCS / "howto").glob("*.md")),
]
SLOW = {"trainer", "lora", "many_processes", "many_runs"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a reader has: the examples, as in a clone in which nothing was run."""
    ignored = shutil.ignore_patterns("run*", "*.safetensors", "__pycache__", ".*", "adapter")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=ignored)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
        for page in RUN
    ],
)
def test_every_command_of_a_page_runs_and_prints_what_it_says(
    page: Path, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, commands, known = Shell(clone, monkeypatch), 0, set(sys.modules)
    for block in read_blocks(page):
        named = re.search(r"(In|Write) `([\w./]+)`:$", block.before)
        if block.language == "console":
            for command, expected in split_commands(block.text):
                code, printed = shell.run(command)
                refused = any("expunge: " in line for line in expected)
                assert (code != 0) == refused, f"{command}\n{printed}"
                missing = compare(expected, printed)
                assert missing is None, f"{command}\nnot printed: {missing}\n{printed}"
                commands += 1
        elif named and named[1] == "In":
            merge_tables(shell.folder / named[2], block.text)
        elif named:
            (shell.folder / named[2]).write_text(block.text)
        elif block.language in ("python", "toml"):
            files = [p.read_text() for p in shell.folder.rglob("*") if p.suffix in (".py", ".toml")]
            assert any(block.text in text for text in files), f"in no file:\n{block.text}"
    for name in set(sys.modules) - known:
        if str(clone) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    assert commands >= 2


def test_every_key_of_a_job_is_in_its_page() -> None:
    text = (DOCS / "job_file.md").read_text(encoding="utf-8")
    heads = {f"{table} (head)": kind for table, kind in HEAD_TABLES.items()}
    shards = {f"{table} (shards)": kind for table, kind in SHARDS_TABLES.items()}
    tables = {**TABLES, "method (plan)": PlanTable, **heads, **shards, "method (c)": ConvexTable}
    for table, kind in tables.items():
        assert f"[{table.partition(' ')[0]}]" in text
        for key, field in kind.model_fields.items():
            row = re.search(rf"^\| `{key}` \|.*$", text, flags=re.MULTILINE)
            assert row, f"{table}.{key}"
            assert field.description.replace("|", "\\|") in text, f"{table}.{key}"


def test_the_checks_above_can_fail() -> None:
    assert agree("test 57.0 %, loss ...", "test 60.2 %, loss 0.31")
    assert not agree("test 57.0 %", "test 90.2 %")
    assert not agree("epsilon = 1", "epsilon = 2")
    assert compare(["a", "...", "d"], "a\nb\nc\nd\n") is None
    assert compare(["a", "d"], "a\nb\nd\n") == "d"
    assert compare(["a"], "a\nb\n") is not None
    assert compare([], "anything\n") is None
