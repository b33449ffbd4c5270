"""``python -m expunge`` is the command line."""

from expunge.cli.main import main

main()
