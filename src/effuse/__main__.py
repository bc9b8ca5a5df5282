"""`python -m effuse` is the command line."""

from effuse.cli import main

main()
