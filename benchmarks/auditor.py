"""``make auditor``: the wheel in a fresh environment without torch, and how large that is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_environment(folder: Path) -> Path:
    """Build the wheel and install it, with what it needs and nothing else; the commands' folder."""
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "wheel", ROOT)
    (wheel,) = (folder / "wheel").glob("expunge-*.whl")
    venv.create(folder / "venv", with_pip=True)
    places = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    _run(places / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    return places


def measure_packages(places: Path) -> dict[str, float]:
    """Megabytes (10^6 bytes) that each package takes, largest first; pip's own left out."""
    home = next(places.parent.glob("[Ll]ib/**/site-packages"))
    sizes = {
        path.name: sum(f.stat().st_size for f in [path, *path.rglob("*")] if f.is_file()) / 1e6
        for path in home.iterdir()
        if path.name.partition("-")[0] not in ("pip", "setuptools", "pkg_resources")
        and path.name not in ("_distutils_hack", "distutils-precedence.pth")
    }
    return dict(sorted(sizes.items(), key=lambda one: -one[1]))


def _run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


def main() -> None:
    """Print the size of the environment, and of its largest parts."""
    with tempfile.TemporaryDirectory() as folder:
        places = make_environment(Path(folder))
        sizes = measure_packages(places)
        _run(places / "expunge", "verify", ROOT / "tests/data/before/gradient-clipping")
    print(f"pip install expunge: {sum(sizes.values()):.0f} MB, without torch")
    for name, size in list(sizes.items())[:6]:
        print(f"  {size:6.1f} MB  {name}")


if __name__ == "__main__":
    main()
