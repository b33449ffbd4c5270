"""Speed, as ratios measured in one run (``make bench``); data and networks are of experiments."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
