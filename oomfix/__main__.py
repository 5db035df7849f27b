"""`python -m oomfix`."""

from oomfix.cli import main

main()
