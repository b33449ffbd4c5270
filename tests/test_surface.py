"""What the product shows: few names, nothing heavy at import, rooms that can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import expunge

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for place in ("src", "ledger/src") for path in (ROOT / place).rglob("*.py"))
# DESIGN, "Words": a PyTorch engineer needs no glossary.
WORDS = "tell|told|hold(?!s\\b)|held|heed|put_back|note_known|find_standing|follow|doubt"
ODD = rf"def _?({WORDS})[a-z_]*\("


def test_at_most_thirty_five_names_and_all_of_them_there():
    assert len(expunge.__all__) <= 35
    assert expunge.__all__ == sorted(expunge.__all__)
    for name in expunge.__all__:
        assert getattr(expunge, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = expunge.nothing


def test_what_a_type_checker_reads_is_what_is_loaded():
    text = Path(expunge.__file__).read_text()
    read = re.findall(r"^    from expunge\.([\w.]+) import (\w+) as \2$", text, re.MULTILINE)
    assert {name: place for place, name in read} == vars(expunge)["_PLACE_OF"]


def test_every_public_name_has_an_example_or_is_an_error():
    for name in expunge.__all__:
        thing = getattr(expunge, name)
        if isinstance(thing, type) and issubclass(thing, Exception):
            continue
        shown = thing.__doc__ or ""
        assert len(shown) > 20, name


LIGHT = (
    "import expunge; expunge.guarantee; expunge.plan; expunge.verify; expunge.Data; "
    "expunge.Certificate; expunge.Release; import expunge.report.page, expunge.states",
    "from expunge.linear_model import LogisticRegression; import numpy as np; "
    "X = np.eye(4); m = LogisticRegression().fit(X, [0, 1, 0, 1], ids=list('abcd')); "
    "m.forget(['a']); m.predict(X)",
)


@pytest.mark.parametrize("code", LIGHT)
def test_torch_is_not_loaded_where_it_is_not_needed(code):
    code += "; import sys; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_import_itself_loads_nothing_heavy():
    code = (
        "import sys, expunge; "
        "heavy = {'numpy', 'scipy', 'torch', 'pydantic', 'sklearn', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_longer_than_a_reader():
    long = {p.name: n for p in SOURCES if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_names_need_no_glossary():
    odd = [f"{p.name}: {m[0]}" for p in SOURCES for m in re.finditer(ODD, p.read_text())]
    assert not odd


def test_no_registry_is_named():
    """Packages come by name, from wherever a machine is set up to find them."""
    hosts = re.compile(r"https?://[\w.]*(pypi|npmjs|debian|pythonhosted)[\w.]*")
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".toml", ".md", ".txt", ".yml", "") and path.is_file():
            assert not hosts.search(path.read_text(errors="ignore")), name
