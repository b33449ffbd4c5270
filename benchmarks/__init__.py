"""Speed, as ratios measured in one run (``make bench``). Data and networks are those of experiments."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
