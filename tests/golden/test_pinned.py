"""Every pinned number is the same, bit for bit: tests/golden/pin.py says how it is computed."""

import json

import pytest

from tests.golden import pin


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("section", pin.SECTIONS)
def test_same_bits(section: str) -> None:
    pinned = json.loads(pin.FILE.read_text())[section]
    found = json.loads(json.dumps(pin.SECTIONS[section]()))
    assert list(found) == list(pinned)
    differs = [name for name in pinned if found[name] != pinned[name]]
    assert differs == []
