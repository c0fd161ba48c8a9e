"""Runs `python -m embrace_fx.cli`, by which torchrun starts a command on every rank."""

from embrace_fx.cli import main

main()
