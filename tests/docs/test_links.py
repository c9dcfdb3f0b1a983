"""All links between the pages lead to files and headings that exist, and the site has all pages."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

OUTSIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/two_hosts/README.md"]
INSIDE = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
NAVIGATION = (ROOT / "mkdocs.yml").read_text()


def _without_programs(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the site make them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", _without_programs(page), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


@pytest.mark.parametrize("page", [*OUTSIDE, *INSIDE])
def test_the_links_of_a_page_lead_to_files_and_headings(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", _without_programs(path))
    for link, anchor in links:
        target = (path.parent / link).resolve() if link else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in _anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", INSIDE)
def test_a_page_is_in_the_navigation_of_the_site(page: str) -> None:
    assert re.search(rf": {re.escape(page.removeprefix('docs/'))}$", NAVIGATION, re.MULTILINE)


def test_the_navigation_lists_each_page_once() -> None:
    listed = re.findall(r"^ +- [^#\n]*: ([\w/-]+\.md)$", NAVIGATION, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert len(listed) >= len(INSIDE)
