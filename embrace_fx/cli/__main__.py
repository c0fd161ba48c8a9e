"""Runs `python -m embrace_fx.cli`, so that torchrun can start a command on every rank."""

from embrace_fx.cli import main

main()
