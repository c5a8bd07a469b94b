"""`python -m patchgen` is the command `patchgen`."""

from patchgen.cli import main

main()
