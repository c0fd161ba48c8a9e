"""A hook of mkdocs for links from a page to files of the source tree, which are not part of the site.

In the repository they lead to the file. On the site they become the file's path. A missing file is a warning, which
fails a strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
_ROOT = Path(__file__).parents[2]

logger = logging.getLogger("mkdocs.plugins.source_links")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def named(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (_ROOT / path).exists():
            logger.warning("%s links to %s, which does not exist", page.file.src_path, path)
        return f"{text} (`{path}`)" if path not in text else f"`{path}`"

    return _OUTSIDE.sub(named, markdown)
