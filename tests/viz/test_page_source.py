"""The page as a file: what it holds, and that it loads nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from embrace_fx.vocabulary.schedule import Schedule, Timeline
from tests.support.pictures import compute, saved


class _Page(HTMLParser):
    """Collects what a page would load, and its data."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.policy = ""
        self.data = ""
        self.items: dict[str, list[dict[str, str | None]]] = {}
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section" and given.get("class") == "panel":
            self.items[given["id"] or ""] = []
        if tag == "g" and given.get("class") == "item":
            self.items[[*self.items][-1]].append(given)
        self.loads += [value for name, value in given.items() if name in ("src", "href") and value]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self._in_data = tag == "script" and given.get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data


def page_of(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    return page


def test_page_loads_nothing(tmp_path: Path, schedule: Schedule, timeline: Timeline) -> None:
    text = saved(tmp_path, ".html", schedule, timeline)
    page = page_of(text)
    assert page.loads == []
    assert "default-src 'none'" in page.policy
    assert "http://" not in text
    assert "https://" not in text


def test_page_holds_the_picture(tmp_path: Path, schedule: Schedule, timeline: Timeline) -> None:
    text = saved(tmp_path, ".html", schedule, timeline)
    page = page_of(text)
    data = json.loads(page.data)
    assert [panel["status"] for panel in data["panels"]] == [*page.items] == ["predicted", "measured"]
    for status, drawn in (("predicted", schedule.predicted), ("measured", timeline)):
        names = [item["data-of"] or "" for item in page.items[status]]
        assert sum(name.startswith("waits for ") for name in names) == len(drawn.waits) > 0
        for span in drawn.spans:
            assert span.operation.name in names
    span = timeline.spans[5]
    at = f"{span.start_ms:.4f}", f"{span.end_ms:.4f}", span.operation.name
    assert at in [(item["data-s"], item["data-e"], item["data-of"]) for item in page.items["measured"]]
    assert text.count('class="critical"') == len(schedule.critical_path)
    figures = {f["label"]: f["value"] for f in data["panels"][1]["figures"]}
    assert figures["step"] == timeline.diagnostics().step_ms


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "backward </script><b>&"
    text = saved(tmp_path, ".html", timeline=Timeline((compute(name, 0, 1),), (), 1))
    assert text.count("</script>") == 2, "the data's and the script's own"
    page = page_of(text)
    assert json.loads(page.data)["operations"][0]["name"] == name
    assert [item["data-of"] for item in page.items["measured"]] == [name]
