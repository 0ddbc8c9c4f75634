"""The build of the site: markings leave the code fences, and LaTeX becomes MathML, so that no script is fetched."""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

# ```bash run -> ```bash: the marking is for tests/docs, which run or parse every block.
MARKED_FENCE = re.compile(r"^([ \t]*```\w+)[ \t]+[\w-]+[ \t]*$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


# Pages that are a file of the repository's root.
ROOT = Path(__file__).parents[1]
ROOT_FILES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    if page.file.src_uri in ROOT_FILES:
        text = (ROOT / ROOT_FILES[page.file.src_uri]).read_text(encoding="utf-8")
        markdown = text.replace("](docs/", "](")
        for page_name, name in ROOT_FILES.items():
            markdown = markdown.replace(f"]({name})", f"]({page_name})")
    return MARKED_FENCE.sub(r"\1", markdown)


def on_page_content(content: str, **_: object) -> str:
    return FORMULA.sub(as_mathml, content)


def as_mathml(found: re.Match[str]) -> str:
    r"""\(…\) or \[…\], as arithmatex leaves it, drawn by the browser itself."""
    tag, text = found[1], html.unescape(found[2]).strip()
    formula = text[2:-2].strip()
    drawn = convert(formula, display="block" if tag == "div" else "inline")
    return f'<{tag} class="formula">{drawn}</{tag}>'
