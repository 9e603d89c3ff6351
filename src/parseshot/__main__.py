"""python -m parseshot."""

from parseshot.cli import main

main()
