"""``python -m expunge`` is the command line."""

from expunge.cli import main

main()
