"""`python -m twolane` is `twolane`."""

from twolane.cli.main import main

main()
