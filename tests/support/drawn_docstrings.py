"""Draws ten docstrings of the product, to be read as somebody would who has not seen the code.

    python -m tests.support.drawn_docstrings [SEED]

The seed is today's date unless given. Each docstring should say what the function does.
"""

from __future__ import annotations

import datetime
import random
import sys

from tests.support.docstrings import docstrings

COUNT = 10


def main(seed: str) -> None:
    for each in random.Random(seed).sample(sorted(docstrings()), COUNT):
        print(f"{each.where} {each.name}\n    " + each.text.replace("\n", "\n    ") + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else datetime.date.today().isoformat())
