"""Hooks of mkdocs: publish some files outside of docs/, and turn links to others into links to GitHub."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

# Files of the repository outside of docs/, and their places on the site.
_PUBLISHED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
} | {
    str(path.relative_to(ROOT)): f"plots/{path.name}"
    for path in sorted((ROOT / "bench" / "results").rglob("*.png"))
}
_SOURCES = {site: source for source, site in _PUBLISHED.items()}

_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the published files from outside of docs/."""
    for source, site in _PUBLISHED.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, except in its programs."""
    site = page.file.src_uri
    source = _SOURCES.get(site)
    if source is not None:
        page.edit_url = f"{config.repo_url}/edit/main/{source}"
    path = PurePosixPath(source or f"docs/{site}")

    def rewrite(link: re.Match[str]) -> str:
        return _target(path, PurePosixPath(site), link[1], str(config.repo_url)) + (link[2] or "")

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewrite, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewrite, markdown[end:])])


def _target(path: PurePosixPath, site: PurePosixPath, link: str, repository: str) -> str:
    """Return the target on the site, or on GitHub, of a link in the file at a path of the repository."""
    target = normpath(path.parent / link)
    if not (ROOT / target).exists() or target.startswith(".."):
        raise PluginError(f"{path}: there is no {link}")
    published = _PUBLISHED.get(target)
    if published is None and target.startswith("docs/"):
        published = target.removeprefix("docs/")
    if published is not None:
        return relpath(published, site.parent)
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{repository}/{kind}/main/{target}"
