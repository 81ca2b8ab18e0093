"""`python -m rorqual`."""

from rorqual.cli import main

main()
