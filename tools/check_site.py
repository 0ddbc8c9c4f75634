"""Looks through the built site: every internal link and anchor leads somewhere, and nothing is fetched from elsewhere.

python tools/check_site.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that make a browser fetch something, and the attribute that says what. A link to another site is a link only.
FETCHES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}


class Page(HTMLParser):
    """What one page has: its anchors, the links out of it, and what a browser would fetch for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in FETCHES and FETCHES[tag] in found:
            self.fetched.append(found[FETCHES[tag]])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.fetched.append(found["href"])


def complaints(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.name
        wrong += [f"{name}: fetches {url}" for url in page.fetched if is_elsewhere(url)]
        if name != "404.html":  # its links start at the site's root, wherever that is
            wrong += [f"{name}: {why}" for link in (*page.links, *page.fetched) if (why := fault(link, path, pages))]
    return wrong


def fault(link: str, page: Path, pages: dict[Path, Page]) -> str:
    """Why an internal link leads nowhere; empty if it does lead somewhere."""
    if is_elsewhere(link) or link.startswith(("mailto:", "data:", "javascript:")):
        return ""
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return f"{link} leads nowhere"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return f"{link} has no such anchor"
    return ""


def is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc)


if __name__ == "__main__":
    found = complaints(Path(sys.argv[1]))
    print("\n".join(found) or "All internal links and anchors lead somewhere; nothing is fetched from elsewhere.")
    sys.exit(bool(found))
