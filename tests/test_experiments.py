"""The experiments' own scripts, tiny, and that what is committed is what they print."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_table_noise(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "table_noise.py"
    for options, folder in ((["--smoke"], "smoke"), ([], "full")):
        command = [sys.executable, str(script), *options, "--out", str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "| gradient clipping mnist | 1 | 2 | 6.573 | 5.276 |" in done.stdout
    committed = ROOT / "experiments" / "results" / "noise.md"
    assert committed.read_text() == (tmp_path / "full" / "noise.md").read_text()
