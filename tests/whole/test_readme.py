"""The first page: its commands run in an empty folder, its links and its table are true."""

import re
from pathlib import Path

import pytest

from pages_run import Block, Shell, read_blocks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
FIRST_SCREEN = 75


def list_commands(blocks: list[Block]) -> list[str]:
    """The lines of all blocks for the shell, without what is said of them."""
    joined = "".join(b.text for b in blocks if b.language == "sh").replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*$", "", line) for line in joined.splitlines())
    return [line for line in lines if line.strip()]


@pytest.mark.usefixtures("one_thread")
def test_every_command_works_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, printed = Shell(tmp_path, monkeypatch), ""
    for command in list_commands(read_blocks(README)):
        if setting := re.fullmatch(r"export (\w+)=(\S+)", command):
            monkeypatch.setenv(setting[1], setting[2])
            continue
        code, said = shell.run(command)
        assert code == 0, f"{command}\n{said}"
        printed += said
    assert "run/certificate.json holds: epsilon = 0" in printed
    assert "release-2/certificate.json holds: epsilon = 0" in printed
    assert "1 request; 1 forgotten, 0 already, 0 not held" in printed
    assert "6.5730058" in printed


def test_every_target_of_make_exists() -> None:
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(r"(?:^|`|\()make ([\w-]+)", TEXT, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(named) <= set(made)


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", TEXT)
    assert len(links) >= 15
    for link in links:
        assert (ROOT / link).is_file(), link


def test_the_first_screen_has_both_examples_two_commands_and_the_routes() -> None:
    first = "\n".join(TEXT.splitlines()[:FIRST_SCREEN])
    places = [
        first.index(part)
        for part in (
            "head.learn(",
            "head.forget(",
            "expunge.certify(",
            "expunge.verify(",
            "expunge.unlearn(",
            "make demo",
            "make test",
            "| noisy fine-tuning |",
        )
    ]
    assert places == sorted(places)


def read_routes(page: Path) -> list[list[str]]:
    """The rows of the table of routes, four columns of each, without links."""
    text = page.read_text(encoding="utf-8")
    table = text[text.index("| route |") :].partition("\n\n")[0]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", table)
    return [re.split(r" ?\| ?", line)[1:5] for line in plain.splitlines()]


def test_its_table_of_routes_is_that_of_the_documentation() -> None:
    ours = read_routes(README)
    assert [row[0] for row in ours[2:]] == [
        "head on exact sums",
        "convex head",
        "restart",
        "retraining",
        "shards",
        "noisy fine-tuning",
        "DP-SGD",
    ]
    assert ours == read_routes(ROOT / "docs" / "which_route.md")
