"""The command line on a rank whose torch claims to be another version."""

import os

from expunge import teamjobs
from expunge.cli import main
from expunge.unlearning import list_versions

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        teamjobs.list_versions = lambda: list_versions() | {"torch": "2.0.0"}
    main()
