"""Where the final answer stands: in <answer> tags at the end, else the last "Answer:" line, else the last \\boxed{},
else a last line `#### 42`, else a last sentence "The answer is 42."

An "Answer:" line starts a line or a sentence ("Final answer:", "**Answer:**", "答案："); "answer:" in the middle of a
sentence counts only where nothing clearer exists. A value on the next line belongs to its "Answer:". The search starts
at the end, so that the length of a response costs nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dapo.rewards.limits import MAX_RESPONSE_CHARS, MAX_STATEMENT_CHARS
from dapo.rewards.math.boxes import in_context
from dapo.rewards.math.tokens import NotationError, closing_brace
from dapo.rewards.math.typography import BREAK, without_end_tokens


@dataclass(frozen=True, slots=True)
class Statement:
    """A final answer as written. `rivals` are other answers offered beside it; all must have its value."""

    text: str
    rivals: tuple[str, ...] = ()
    below: str = ""  # what follows it, for verifiers whose answers are no values
    boxed: tuple[str, ...] = ()  # those of the text and its rivals that stood in a box


_COLON = "[:\uff1a\ufe55\ua789\u2236]"
MARKER = re.compile(
    r"(?:(?<![^\W_])answers?(?:\s+is|\s+are)?|\u7b54\u6848(?:\u662f|\u4e3a)?|\u7b54)"
    rf"(?:\}})?[*_`\ \t\u00a0\u3000\u200b\u2060]{{0,6}}{_COLON}",
    re.IGNORECASE,
)
_LEAD_WORDS = re.compile(
    r"(?:\A|[\n.!?;:,\u3002\uff0c\uff1a)\]}$>*_]|\*\*)[\s*_`~>#\-\[\](){}$\\\"'0-9.]{0,12}"
    r"(?:\\text(?:bf)?\{)?"
    r"(?:(?:so|thus|hence|therefore|then|and|the|my|our|its|a|final|correct|exact|numerical|desired|required|short|best"
    r"|\u6700\u7ec8|\u6700\u540e|\u6240\u4ee5|\u56e0\u6b64|\u6b63\u786e)[\s,*_:]{0,3}){0,6}[*_`\"']{0,3}\Z",
    re.IGNORECASE,
)
_DISOWNED = re.compile(r"(?:\b(?:wrong|incorrect|false)|\bnot\s+(?:the|an|a|my))[\s*_]{1,3}\Z", re.IGNORECASE)
_QUOTED = re.compile(r"[*_`]*[\"'\u201d\u2019`]")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_HASHES = re.compile(r"(?:\A|\n)[ \t]*#{4}[ \t]*([^\n#][^\n]*)\Z")
_SAID = re.compile(
    r"(?:\A|[.!?\u3002]\s)[\s*_>#]{0,8}"
    r"(?:(?:(?:so|thus|hence|therefore|then|and|the|my|our|final|correct|exact)[\s,*_]{1,3}){0,6}answers?\s{1,3}(?:is|are)"
    r"(?![A-Za-z'])|(?:\u6240\u4ee5|\u56e0\u6b64)?[\uff0c,]?(?:\u6700\u7ec8|\u6b63\u786e)?\u7b54\u6848(?:\u662f|\u4e3a))",
    re.IGNORECASE,
)
_TAGS = ("<answer>", "</answer>")
_SENTENCE_END = re.compile(r"[.!?\u3002]\s|\n|</?think>")
_OR_AFTER = re.compile(r"[}\s$\\)\]*]*\bor\b[\s$\\(\[*]*([-+]?\d[\d,.]*)", re.IGNORECASE)
_OR_BEFORE = re.compile(r"([-+]?\d[\d,.]*)[\s$\\)\]*]*\bor\b[\s$\\(\[*]*\Z", re.IGNORECASE)
_ALTERNATIVES = frozenset({"or", "either", "maybe", "perhaps", "alternatively", "possibly"})
_ASCII_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_BARE_NUMBER_LINE = re.compile(r"[ \t]*\n[ \t$*(]*([-+]?\d[\d,.]{0,40})[ \t$*).]*(?=\n|\Z)")
# `or 43` on a line below; the words may stand on a line of their own.
_ALTERNATIVE_LINE = re.compile(
    r"[ \t*]*\n[\s*]{0,20}(?:(?:or|and|also|alternatively|otherwise|maybe|perhaps|possibly|either|even|oder"
    r"|\u6216\u8005?|\u548c)(?![A-Za-z])[\s,:*]{0,8}){1,4}([$\\(\[*\s]{0,8}[-+\u2212]?[\d\\][^\n]{0,200})",
    re.IGNORECASE,
)
# What follows a final answer and takes it back: `No wait, 43.`, `Actually, that is wrong`, `Correction: 43`.
_GAP = r"[\s.,;:!*$)\]\-\u2013\u2014]{0,20}"
_SECOND_THOUGHT = (
    r"(?:(?:oh|hm+|no|nope|wait|actually|oops|sorry|correction|apologies|hold\s+on|scratch\s+that|my\s+mistake"
    r"|on\s+second\s+thought|let\s+me\s+(?:reconsider|correct\s+(?:that|this|myself)))(?![A-Za-z])"
    rf"{_GAP}){{1,4}}"
)
_ITSELF = r"(?:that|this|it|(?:the|my)\s+(?:(?:final|correct|right)\s+)?(?:answer|result|value))"
_VALUE = (
    r"[$\\(\[*\s]{0,4}([-+\u2212]?(?:\d[\d,]{0,30}(?:\.\d{1,30})?(?:/\d{1,30})?|\\[dt]?frac\{[^{}]{1,30}\}\{[^{}]{1,30}\}))"
    r"(?=[$)\]*\s\\]{0,4}(?:(?:[a-z]{1,20}\s{0,2})?(?:[.,;!](?!\d)|\n|\Z)|(?:because|since|instead|not)\s))"
)
_RETRACTED = re.compile(
    rf"{_GAP}(?:{_SECOND_THOUGHT}(?:(?:so|then|i\s+meant?|{_ITSELF}(?:'s|\s+is|\s+was|\s+should\s+be))\s{{1,3}}){{0,2}}{_VALUE}"
    rf"|(?:i\s+meant?|{_ITSELF}\s+should\s+(?:be|have\s+been)|(?:the|my)\s+(?:\w+\s+)?answer\s+is)\s{{1,3}}{_VALUE}"
    rf"|(?:{_SECOND_THOUGHT})?(({_ITSELF}(?:\s+is|\s+was|'s)\s+(?:wrong|incorrect|not\s+(?:right|correct)|a\s+mistake)"
    rf"|{_ITSELF}\s+(?:is|was)n't\s+(?:right|correct)|i\s+made\s+(?:a\s+mistake|an\s+error))"
    r"(?=\s*(?:[.,;:!)\u2014-]|\Z|\n|because|since|so\s))))",
    re.IGNORECASE,
)
_BLANK = re.compile(r"(?:[\s*_`]|\$\$?(?=\s*\n)|\\\[(?=\s*\n)|\\\((?=\s*\n))*")
_MAX_BOXES = 20
_MAX_MARKERS = 2_000
_BELOW_CHARS = 400
_MAX_LINE_CHARS = 2 * MAX_STATEMENT_CHARS  # kept of a line that is too long to be read
_WINDOWS = (4_000, 64_000, MAX_RESPONSE_CHARS)


def final_statement(response: str, *, in_prose: bool = True) -> Statement | None:
    """What the response states last as final; None when it states nothing. `in_prose`: "The answer is 42." counts."""
    whole = response.rstrip()[-MAX_RESPONSE_CHARS:]
    tagged = _last_tagged(whole)
    if tagged is None:
        return _unlabelled(without_end_tokens(whole), in_prose=in_prose)
    content, before, is_last = tagged
    if not is_last:
        found = _unlabelled(without_end_tokens(whole), in_prose=in_prose)
        is_rival = found is not None and content.strip() != found.text.strip() and re.search(r"[\d\\]", content)
        return replace(found, rivals=(*found.rivals, content)) if found is not None and is_rival else found
    statement = _unlabelled(content, in_prose=False) or Statement(content)
    before = before.rpartition("</think>")[2]
    other = _unlabelled(before, in_prose=False)
    if other is not None and other.text.strip(" *_`$"):
        statement = replace(
            statement, rivals=(*statement.rivals, other.text, *other.rivals), boxed=(*statement.boxed, *other.boxed)
        )
    beside = _last_tagged(before.rpartition("\n")[2])
    return statement if beside is None else replace(statement, rivals=(*statement.rivals, beside[0]))


def _last_tagged(text: str) -> tuple[str, str, bool] | None:
    """What the last <answer> tags hold, what stands before them, and whether nothing follows."""
    near = text[-_WINDOWS[0] :]
    if "<" not in near or "</" not in near:  # one sign is found faster than two
        return None
    tail = text[-_WINDOWS[1] :]
    lowered = tail.translate(_ASCII_LOWER)
    stop = lowered.rfind(_TAGS[1])
    start = lowered.rfind(_TAGS[0], 0, stop) if stop >= 0 else -1
    if start < 0 or not tail[start + len(_TAGS[0]) : stop].strip():
        return None
    is_last = not without_end_tokens(tail[stop + len(_TAGS[1]) :]).strip("`\n ")
    return tail[start + len(_TAGS[0]) : stop], tail[:start], is_last


def _unlabelled(text: str, *, in_prose: bool) -> Statement | None:
    """The last statement by its marker, its box or its words, whatever tags stand around it."""
    if "\r" in text[-_WINDOWS[0] :]:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    for window in _WINDOWS:
        tail = text[-window:]
        strong, weak = _markers(tail)
        if strong is not None:
            return _after(tail, strong)
        if len(tail) == len(text):
            break
        if weak is None and not _may_hold_marker(text):
            break
    box = _last_box(text)
    if box is not None:
        return box
    if weak is not None:
        return _after(tail, weak)
    if hashes := _HASHES.search(text[-_WINDOWS[0] :]):
        return Statement(hashes[1])
    return _last_sentence(text) if in_prose else None


def _last_sentence(text: str) -> Statement | None:
    """`The answer is 42.` as the last line, or the end of it."""
    line = text[max(text.rfind("\n"), len(text) - MAX_STATEMENT_CHARS - 1) + 1 :]
    said = list(_SAID.finditer(line))
    return Statement(line[said[-1].end() :]) if said else None


def _may_hold_marker(text: str) -> bool:
    return any(spelling in text for spelling in ("nswer", "NSWER", "\u7b54"))


def _marker_starts(text: str) -> Iterator[int]:
    """Where a marker could start, from the end; string search, since most of a response is none."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter whose lower case is two letters
        lowered = text.translate(_ASCII_LOWER)
    english, chinese = lowered.rfind("answer"), lowered.rfind("\u7b54")
    for _ in range(_MAX_MARKERS):
        if max(english, chinese) < 0:
            return
        if english > chinese:
            yield english
            english = lowered.rfind("answer", 0, english)
        else:
            yield chinese
            chinese = lowered.rfind("\u7b54", 0, chinese)


def _markers(text: str) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """The last marker that starts a line or sentence, and the last of any kind."""
    weak = None
    for start in _marker_starts(text):
        match = MARKER.match(text, start)
        if match is None:
            continue
        if start and text[start - 1] in "\"'\u201c\u2018`" and _QUOTED.match(text, match.end()):
            continue  # the instruction repeated: put it after "Answer:"
        before = text[max(0, start - 80) : start]
        if _DISOWNED.search(before):
            continue
        weak = weak or match
        if _LEAD_WORDS.search(before):
            return match, weak
    return None, weak


def _after(text: str, marker: re.Match[str]) -> Statement:
    """The value that follows a marker, with what else is offered as final on that line and in boxes after it."""
    line, stop = _line_from(text, marker.end())
    line = _without_stray_braces(line[:_MAX_LINE_CHARS])
    rivals: list[str] = []
    start = max(text.rfind("\n", 0, marker.start()) + 1, marker.start() - MAX_STATEMENT_CHARS)
    before = list(MARKER.finditer(text, start, marker.start()))[-_MAX_BOXES:]
    for left, right in itertools.pairwise([*before, marker]):
        between = text[left.end() : right.start()].strip(' *_`.,;$\\[](){}"')
        if between and not re.fullmatch(r"(?:the|final|my|so|\s)*", between, re.IGNORECASE):
            rivals.append(between)
    rivals += [*_values_below(text, stop), *_retraction(text, stop)]
    box = _last_box(text[stop:])
    if box is not None:
        if not line.strip(" *_`$") or not re.search(r"[\d\\]", line):
            return box  # "Answer:" was a heading, and its section ends in a box
        rivals += [box.text, *box.rivals]
    return Statement(line, tuple(rivals), text[stop : stop + _BELOW_CHARS], box.boxed if box is not None else ())


def _values_below(text: str, stop: int) -> list[str]:
    """Bare numbers, or `or` with a value, on the lines right below: more answers, in the hope that one fits."""
    values: list[str] = []
    while len(values) < _MAX_BOXES and (
        line := _BARE_NUMBER_LINE.match(text, stop) or _ALTERNATIVE_LINE.match(text, stop)
    ):
        values.append(line[1])
        stop = line.end()
    return values


def _retraction(text: str, stop: int) -> list[str]:
    """The value, or the words, with which the sentence after a final answer takes it back."""
    if stop == len(text):
        return []
    found = _RETRACTED.match(text, stop, stop + _BELOW_CHARS)
    return [group for group in found.groups()[:3] if group] if found else []


def _line_from(text: str, start: int) -> tuple[str, int]:
    """The rest of the line, or the next line that has something; longer where it opens a display, a box or a matrix."""
    blank = _BLANK.match(text, start, start + _WINDOWS[1])
    assert blank is not None, "the pattern matches nothing as well"
    begin = blank.end()
    stop = text.find("\n", begin)
    stop = len(text) if stop < 0 else stop
    line = text[begin:stop]
    for opener, closer in (("\\[", "\\]"), ("\\begin{", "\\end{")):
        if line.count(opener) > line.count(closer):
            close = text.find(closer, stop)
            if 0 <= close - begin < MAX_STATEMENT_CHARS:
                end_of_line = text.find("\n", close)
                stop = len(text) if end_of_line < 0 else end_of_line
                line = text[begin:stop]
    if line.count("$$") % 2:
        close = text.find("$$", stop)
        if 0 <= close - begin < MAX_STATEMENT_CHARS:
            stop = close + 2
            line = text[begin:stop]
    if line.count("{") > line.count("}"):
        balanced = _balanced_stop(text, begin, line)
        if balanced is not None:
            stop = balanced
            line = text[begin:stop]
    return line, stop


def _without_stray_braces(line: str) -> str:
    """Without closing braces that were opened before the marker: `\\text{Answer: } 42`, `\\textbf{Answer: 42}`."""
    if line.count("}") <= line.count("{"):
        return line
    level, kept = 0, []
    for index, char in enumerate(line):
        if char in "{}" and line[index - 1 : index] != "\\":
            level += 1 if char == "{" else -1
            if level < 0:
                level = 0
                kept.append(BREAK)
                continue
        kept.append(char)
    return "".join(kept)


def _balanced_stop(text: str, begin: int, line: str) -> int | None:
    opened = line.find("{")
    try:
        close = closing_brace(text[begin : begin + MAX_STATEMENT_CHARS], opened)
    except NotationError:
        return None
    end_of_line = text.find("\n", begin + close)
    return len(text) if end_of_line < 0 else end_of_line


def _last_box(text: str) -> Statement | None:
    """The last closed box, with what its sentence offers beside it. An unclosed last box is no answer."""
    start = len(text)
    for _ in range(_MAX_BOXES):
        start = max(text.rfind("\\boxed", 0, start), text.rfind("\\fbox", 0, start), text.rfind("\\framebox", 0, start))
        if start < 0:
            return None
        match = _BOX.match(text, start)
        found = _box_content(text, match.end()) if match else None
        if found is not None:
            content, stop = found
            rivals = (*_box_rivals(text, start, stop), *_retraction(text, stop))
            value = in_context(text, start, stop, content)
            return Statement(value, rivals, text[stop : stop + _BELOW_CHARS], (value, *rivals))
    return None


def _box_rivals(text: str, start: int, stop: int) -> tuple[str, ...]:
    """Other values in the sentence of a box: `\\boxed{41} or \\boxed{42}`, `\\boxed{42} or 43`."""
    rivals = []
    before = text[max(0, start - 400) : start]
    sentence = before[max((match.end() for match in _SENTENCE_END.finditer(before)), default=0) :]
    others = list(_BOX.finditer(sentence))[-_MAX_BOXES:]
    for index, other in enumerate(others):
        following = others[index + 1].start() if index + 1 < len(others) else len(sentence)
        found = _box_content(sentence, other.end())
        if found is None:
            continue
        rival, end = found
        words = re.findall(r"[A-Za-z]+", sentence[end:following].lower())
        if len(words) < 3 or _ALTERNATIVES & set(words):
            rivals.append(rival)
    if alternative := _OR_BEFORE.search(sentence):
        rivals.append(alternative[1])
    if alternative := _OR_AFTER.match(text[stop : stop + MAX_STATEMENT_CHARS]):
        rivals.append(alternative[1])
    return tuple(rivals)


def _box_content(text: str, start: int) -> tuple[str, int] | None:
    """What a box holds, and where it ends."""
    while start < len(text) and text[start] in " \t":
        start += 1
    if text[start : start + 1] != "{":
        bare = re.compile(r"-?\d[\d,.]*(?<![,.])|[A-Za-z](?![A-Za-z])").match(text, start)
        return (bare[0], bare.end()) if bare else None
    try:
        stop = closing_brace(text[start : start + MAX_STATEMENT_CHARS + 2], 0)
    except NotationError:
        return None
    return text[start + 1 : start + stop], start + stop + 1
