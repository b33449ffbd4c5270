"""Documentation that is run: the commands of a page, in order, and what the page says they print.

In a ``console`` block a line that starts with ``$ `` is a command and the lines below it are what
it prints, where ``...`` stands for anything and a percentage, or "29 of 30", may be a few points
off. A block after
a line that ends in ``Write `NAME`:`` is that file's content; after ``In `NAME`:`` it is the tables
of a TOML file that change. Other Python and TOML must stand like that in a file of the example.
"""

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from expunge.jobs.loading import importing_from
from job_folder import call, make_environment

POINTS = 12.0


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of prose right before it."""

    language: str
    text: str
    before: str


def read_blocks(page: Path) -> list[Block]:
    found, before, lines = [], "", iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        fence = re.match(r"^```(\w*)$", line)
        if fence:
            text = []
            for inner in lines:
                if inner == "```":
                    break
                text.append(inner)
            found.append(Block(fence[1], "\n".join(text) + "\n", before))
        elif line.strip():
            before = line
    return found


def split_commands(text: str) -> list[tuple[str, list[str]]]:
    """Every command of a console block with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0][:-1] + line.strip(), [])
        else:
            assert found, f"a console block begins with {line!r}"
            found[-1][1].append(line)
    return found


class Shell:
    """A folder in which commands run one after the other; the real ones, torch imported once."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch

    def run(self, command: str) -> tuple[int, str]:
        if command.startswith("cd ") and "&" not in command:
            self.folder = self.folder / command[3:].strip()
            assert self.folder.is_dir(), command
            return 0, ""
        words = shlex.split(command)
        if not re.search(r"[|;&<>*$]", command):
            self.patch.chdir(self.folder)
            if words[0] == "expunge":
                done = call(*words[1:], together=True)
                return done.returncode, done.stdout
            if words[0] == "python":
                return 0, self.run_python(words[1:])
        made = make_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=made,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def run_python(self, words: list[str]) -> str:
        """What ``python FILE`` or ``python -m MODULE`` prints, in this process."""
        out = io.StringIO()
        with redirect_stdout(out), importing_from(self.folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__")
            else:
                runpy.run_path(words[0], run_name="__main__")
        return out.getvalue()


def _share(line: str) -> str:
    """The line with "29 of 30" as a percentage of 30."""
    return re.sub(
        r"\b(\d+) of (\d+)\b",
        lambda found: f"{100 * int(found[1]) / int(found[2]):.1f} % of {found[2]}",
        " ".join(line.split()),
    )


def agree(expected: str, line: str) -> bool:
    """Whether a printed line is what the page shows."""
    pattern, expected, line = "", _share(expected), _share(line)
    for part in re.split(r"(\.\.\.|\d+(?:\.\d+)? %)", expected):
        if part == "...":
            pattern += ".*"
        elif part.endswith(" %"):
            pattern += r"(\d+(?:\.\d+)?) %"
        else:
            pattern += re.escape(part)
    found = re.fullmatch(pattern, line)
    shown = [float(x) for x in re.findall(r"(\d+(?:\.\d+)?) %", expected)]
    close = found and all(
        abs(a - float(b)) <= POINTS for a, b in zip(shown, found.groups(), strict=True)
    )
    return bool(close)


def compare(expected: list[str], printed: str) -> str | None:
    """The first line of the page that was not printed in its place, if any."""
    lines = [line for line in printed.splitlines() if line.strip()]
    place, loose = 0, False
    for line in (line for line in expected if line.strip()):
        if line.strip() == "...":
            loose = True
            continue
        places = range(place, len(lines)) if loose else range(place, min(place + 1, len(lines)))
        hit = next((i for i in places if agree(line, lines[i])), None)
        if hit is None:
            return line
        place, loose = hit + 1, False
    return None if loose or place == len(lines) or not expected else "(the page ends too early)"


def merge_tables(path: Path, text: str) -> None:
    """Change the tables of a TOML file; a table is written anew when it names its ``name``."""
    data, changes = tomllib.loads(path.read_text()), tomllib.loads(text)
    for table, keys in changes.items():
        kept = {} if table == "method" and "name" in keys else data.get(table, {})
        data[table] = {**kept, **keys}
    lines = []
    for table, keys in data.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")
