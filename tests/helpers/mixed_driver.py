"""The command line on a rank whose torch claims to be another version."""

import os

from expunge.certificates.record import list_versions
from expunge.cli.main import main
from expunge.jobs import ranks as teamjobs

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        teamjobs.list_versions = lambda: list_versions() | {"torch": "2.0.0"}
    main()
