"""`python -m rorqual`."""

from rorqual.cli.main import main

main()
