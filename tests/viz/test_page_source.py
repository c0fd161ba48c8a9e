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
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
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
    data = json.loads(page_of(saved(tmp_path, ".html", schedule, timeline)).data)
    predicted, measured = data["panels"]
    assert (predicted["status"], measured["status"]) == ("predicted", "measured")
    assert len(predicted["spans"]) == len(schedule.predicted.spans)
    assert len(measured["waits"]) == len(timeline.waits)
    path = [predicted["spans"][k] for k in predicted["critical"]]
    assert [(s["window"], predicted["operations"][s["op"]]["name"]) for s in path] == list(schedule.critical_path)
    figures = {f["label"]: f["value"] for f in measured["figures"]}
    assert figures["step"] == timeline.diagnostics().step_ms


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "backward </script><b>&"
    text = saved(tmp_path, ".html", timeline=Timeline((compute(name, 0, 1),), (), 1))
    assert text.count("</script>") == 2, "the data's and the script's own"
    assert json.loads(page_of(text).data)["panels"][0]["operations"][0]["name"] == name
