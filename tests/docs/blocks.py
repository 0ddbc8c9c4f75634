"""The code blocks of README and docs: language, marking, text, line; and the `dapo` command lines in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

# run, slow: by make test-slow. gpu: needs a GPU, weights or a cluster. sketch: needs files or an
# environment of the reader's. The last two are not run; their command lines are parsed like all others.
MARKINGS = ("run", "slow", "gpu", "sketch")
MARKED_LANGUAGES = ("bash", "console", "python")
UNMARKED_LANGUAGES = ("text", "toml", "json")
# Their blocks need a GPU or a cluster throughout, unless they are marked otherwise.
GPU_PAGES = ("benchmarks.md", "results.md", "scaling.md")

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    \S[^\n]*\n(?:^    [^\n]*\n)*)", re.MULTILINE)
HERE_DOCUMENT = re.compile(r"^cat > \S+ <<'EOF'\n.*?^EOF$", re.MULTILINE | re.DOTALL)
BEFORE_DAPO = re.compile(r"-m|\w+=.*")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    marking: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        language, _, marking = fence[1].strip().partition(" ")
        line = text.count("\n", 0, fence.start()) + 1
        if page.name in GPU_PAGES and not language:
            language, marking = "bash", "gpu"
        found.append(Block(page, line, language, marking.strip(), fence[2]))
    if page.name in GPU_PAGES:  # these pages also have indented commands
        outside = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        for piece in INDENTED.finditer(outside):
            line = outside.count("\n", 0, piece.start()) + 1
            lines = [row.removeprefix("    ") for row in piece[0].splitlines()]
            if lines[0].startswith(("dapo ", "torchrun ")):
                found.append(Block(page, line, "bash", "gpu", "\n".join(lines) + "\n"))
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def command_lines(block: Block) -> Iterator[list[str]]:
    """The words after `dapo` of every such command in a bash or console block."""
    if block.language not in ("bash", "console"):
        return
    text = HERE_DOCUMENT.sub("", block.text)
    for line in text.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue  # what the command printed
        words = shlex.split(line.removeprefix("$ "), comments=True)
        at = words.index("dapo") if "dapo" in words else -1
        if at == 0 or (at > 0 and BEFORE_DAPO.fullmatch(words[at - 1])):
            end = next((n for n, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
            yield words[at + 1 : end]
