"""Pages hang together: links lead somewhere, the site's contents name all of them, the reference all public names."""

from __future__ import annotations

import json
import re
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
import yaml

import tierax
from helpers.doc_blocks import ROOT, pages
from tierax.bench.page import BEGIN, END, NOT_YET, summary, write_page

DOCS = ROOT / "docs"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).strip().lower()
        found.add(re.sub(r"[\s]+", "-", plain))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert page.parent != DOCS or path.is_relative_to(DOCS), f"{page.name}: {target} is not on the site"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def files(entries: list[dict[str, Any]]) -> list[str]:
        return [
            name
            for entry in entries
            for value in entry.values()
            for name in (files(value) if isinstance(value, list) else [value])
        ]

    assert sorted(files(site["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))
    assert site["strict"] is True
    assert site["theme"]["font"] is False
    readme = (ROOT / "README.md").read_text()
    assert {name for name in files(site["nav"]) if f"docs/{name}" not in readme} == set()


def test_figures_of_the_readme_are_those_of_the_page(tmp_path: Path) -> None:
    page, figures = DOCS / "benchmarks.md", json.loads((DOCS / "benchmarks.json").read_text())
    (tmp_path / "log.md").touch()
    assert write_page(figures, tmp_path / page.name) == page.read_text()
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())
    assert pictures
    assert all((DOCS / picture).is_file() for picture in pictures)
    readme = (ROOT / "README.md").read_text()
    _, brief, rest = re.split(f"{re.escape(BEGIN)}\n|\n{re.escape(END)}", readme)
    assert brief == summary(figures)
    assert brief in page.read_text() or brief == NOT_YET
    assert not re.search(r'"/\w', (DOCS / "benchmarks.json").read_text()), (
        "a path of the machine that measured"
    )
    # Beside the table the section has no figures.
    section = re.sub(r"\[[^]]*\]\([^)]*\)", "", rest.partition("\n## ")[0])
    assert not re.search(r"\d", section)


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    assert [name for name in tierax.__all__ if not re.search(rf"\b{name}\b", text)] == []
    for home, name in re.findall(r"^::: tierax\.([\w.]+)\.(\w+)$", text, re.MULTILINE):
        assert getattr(tierax, name).__module__ == f"tierax.{home}"


def test_pictures_are_whole_and_load_nothing() -> None:
    for path in (DOCS / "pictures").glob("*.svg"):
        picture = xml.dom.minidom.parse(str(path)).documentElement
        assert picture is not None
        first = next(node for node in picture.childNodes if node.nodeType == node.ELEMENT_NODE)
        assert first.tagName == "title"
        assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")
