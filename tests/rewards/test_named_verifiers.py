"""exact, choice and command, and what counts as a usable reference."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from dapo import rewards
from dapo.errors import ConfigError
from dapo.rewards import Task, command
from dapo.rewards.verifiers import BUILT_IN, named
from dapo.types import Verdict

EXAMPLES = Path(__file__).parents[2] / "examples"
VERDICTS = Path(__file__).parents[2] / "docs" / "verdicts.md"


def test_the_table_of_limits_in_the_docs_has_every_verifier_with_its_own():
    rows = re.findall(r"^\| (`.*`) \| ([\d.]+) \| (\d+) \|$", VERDICTS.read_text(), re.MULTILINE)
    told = {name: (float(s), int(mb)) for names, s, mb in rows for name in re.findall("`(.+?)`", names)}
    assert {*told} == {*BUILT_IN, "package.module:function"}
    assert told == {name: (named(name).seconds, named(name).memory_mb) for name in told}


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("Answer: B", "B", "CORRECT"),
        ("Answer: (B)", "B", "CORRECT"),
        ("Answer: **B**", "B", "CORRECT"),
        ("Answer: b", "B", "CORRECT"),
        ("Answer: B) 42", "B", "CORRECT"),
        ("Answer: B. the second", "B", "CORRECT"),
        ("Answer: \\boxed{\\text{B}}", "(B)", "CORRECT"),
        ("\\boxed{\\textbf{(B)}}", "B", "CORRECT"),
        ("Answer: option B", "B", "CORRECT"),
        ("Answer: A", "B", "WRONG"),
        ("Answer: A or B", "B", "WRONG"),
        ("Answer: A, B", "B", "WRONG"),
        ("Answer: AB", "B", "WRONG"),
        ("Answer: not B", "B", "WRONG"),
        ("Answer: A B C D E", "B", "WRONG"),
        ("Answer: B or not", "B", "WRONG"),
        ("Answer: Because", "B", "WRONG"),
        ("Answer: F", "B", "WRONG"),
        ("I like B", "B", "UNPARSEABLE"),
        *[
            (f"Answer: {said}", "B", "CORRECT")
            for said in [
                "B.",
                "b",
                "(b)",
                "B) the value is wrong",
                "B) Not enough information",
                "B. No",
                "B) None of these",
                "B. No, because the sides differ",
                "B) b^2 - 4ac",
                "B: e^x",
                "(B) maybe",
                "B) cannot be determined",
                "B 42",
                "B because 6*7 = 42",
                "B is correct",
                "B is the correct answer.",
                "B) is the answer",
                "[B]",
                "Option B.",
                "choice (B)",
                "B) between 3 and 5",
                "B) more than 10 or less than 2",
                "B)  $\\frac12$",
                "B) both b and c",
                "B: both of them",
                "B\n\nbecause it is even",
                "B\n\nI hope this helps",
                "B\n\nA is wrong since 6*7 = 42.",
                "B\nB",
                "B\n\\boxed{B}",
                "$\\text{B}$",
                "\\textbf{(B)}\\ 42",
                "B) d/dx",
            ]
        ],
        *[
            (said, "B", "CORRECT")
            for said in ["\\boxed{B}", "$\\boxed{B}$.", "\\boxed{B}\n\nDone", "\\boxed{B} is correct"]
        ],
        ("Answer: A", "A", "CORRECT"),
        ("Answer: A 42", "A", "CORRECT"),
        ("Answer: A) number", "A", "CORRECT"),
        ("Answer: A. A number", "A", "CORRECT"),
        ("Answer: A is correct", "A", "CORRECT"),
        *[
            (f"Answer: {said}", "B", "WRONG")
            for said in [
                "B is wrong",
                "B is incorrect, choose the next one",
                "B isn't it",
                "B isnt it",
                "B ain't right",
                "B. No, d",
                "B / c",
                "B) or c)",
                "B or c",
                "B (not really)",
                "B no wait c",
                "B\nc",
                "B\nor c",
                "B\n(c)",
                "B\n\nor maybe d",
                "B\nC",
                "B\n**C**",
                "B is not the answer",
                "B) is wrong",
                "B is not correct",
                "B cannot be right",
                "B, c",
                "B & c",
                "B) and d",
                "B. Wait, d",
                "B maybe",
                "B?",
                "B is the only option that fails",
                "B\n\\boxed{C}",
                "B was false",
                "B never",
                "B. Actually, e",
                "B\nc\nd",
                "B but also c",
            ]
        ],
        *[
            (said, "B", "WRONG")
            for said in ["\\boxed{B} or c", "\\boxed{B}\nc", "$\\boxed{B}$ / $\\boxed{C}$", "\\boxed{B}, c"]
        ],
        ("Answer: A number", "A", "WRONG"),
        ("Answer: A is the only option that fails", "A", "WRONG"),
        ("Answer: A good question", "A", "WRONG"),
    ],
)
def test_choice(response: str, answer: str, expected: str):
    assert rewards.judge(response, answer, verifier="choice").verdict == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("Answer: left(3)", "left(3)", "CORRECT"),
        ("left(3)", "left(3)", "CORRECT"),
        ("Answer: 42.0", "42", "WRONG"),
        ("", "42", "UNPARSEABLE"),
    ],
)
def test_exact(response: str, answer: str, expected: str):
    assert rewards.judge(response, answer, verifier="exact").verdict == expected


@pytest.mark.parametrize(
    ("answer", "verifier", "usable"),
    [
        ("42", "math", True), ("-7", "math", True), ("\\frac{1}{2}", "math", True), ("", "math", False), ("  ", "math", False),  # noqa: E501
        ("1/2 = 3", "math", False), ("((((", "math", False), ("9" * 5_000, "math", False), ("\\text{even}", "math", True),  # noqa: E501
        ("B", "choice", True), ("(C)", "choice", True), ("42", "choice", False), ("A or B", "choice", False),
        ("", "exact", False), ("x", "exact", True), ("", "code", True),
    ],
)  # fmt: skip
def test_reference_error(answer: str, verifier: str, usable: bool):
    error = rewards.reference_error(answer, verifier=verifier)
    assert (error is None) == usable, error


def program(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "checker.py"
    path.write_text("import json, sys\ntask = json.loads(sys.stdin.readline())\n" + body)
    return [sys.executable, str(path)]


def test_command_gets_the_task_and_gives_the_verdict(tmp_path: Path):
    argv = program(
        tmp_path,
        "print('thinking')\n"
        "print(json.dumps({'verdict': 'CORRECT' if task['response'] == task['answer'] else 'WRONG', 'extracted': task['meta']['k']}))",  # noqa: E501
    )
    right = rewards.judge("a", "a", verifier="command", meta={"command": argv, "k": "v"})
    assert (right.verdict, right.extracted, right.value) == (Verdict.CORRECT, "v", 1.0)
    assert rewards.judge("a", "b", verifier="command", meta={"command": argv, "k": "v"}).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit(3)", "code 3"),
        ("print('yes')", "no JSON line"),
        ('print(\'{"verdict": "SUPER"}\')', "neither a verdict"),
        ("raise ValueError('bad proof')", "bad proof"),
    ],
)
def test_command_failures_are_crashes(tmp_path: Path, body: str, message: str):
    judgement = rewards.judge("a", "a", verifier="command", meta={"command": program(tmp_path, body)})
    assert judgement.verdict is Verdict.CRASH
    assert message in judgement.message


def test_command_that_is_missing_or_hangs(tmp_path: Path):
    assert "no command" in rewards.judge("a", "a", verifier="command").message
    gone = rewards.judge("a", "a", verifier="command", meta={"command": ["/no/such/program"]})
    assert (gone.verdict, "No such file" in gone.message) == (Verdict.CRASH, True)
    slow = program(tmp_path, "while True: pass")
    assert rewards.judge("a", "a", verifier="command", meta={"command": slow}, seconds=0.3).verdict is Verdict.TIMEOUT


@pytest.mark.parametrize("n_before", [0, 1, 65_535, 65_536, 65_537, 131_073])
def test_border_the_answer_is_found_behind_what_else_was_said(tmp_path: Path, n_before: int):
    """Read in parts of 65,536 bytes; and with a sign in it that ends a line elsewhere but not in JSON."""
    verdict = '{"verdict": "CORRECT", "extracted": "a\u2028b", "message": "' + "m" * 20 + '"}\n'
    path = tmp_path / "said.txt"
    path.write_text("x" * (n_before - 1) + "\n" * bool(n_before) + verdict, encoding="utf-8")
    found = command.decide(Task("a", "a", None, {"command": ["cat", str(path)]}))
    assert (found.verdict, found.extracted) == (Verdict.CORRECT, "a\u2028b")


@pytest.mark.parametrize("n_more", [-1, 0, 1, 2001])
def test_border_the_end_of_a_long_complaint_is_told(tmp_path: Path, n_more: int):
    argv = program(tmp_path, f"sys.stderr.write('x' * {2000 - 9 + n_more} + 'the cause'); sys.exit(3)")
    with pytest.raises(command.CommandError, match=r"the cause$"):
        command.decide(Task("a", "a", None, {"command": argv}))


def test_command_may_stand_in_the_verifiers_name(tmp_path: Path):
    argv = program(tmp_path, "print(json.dumps({'verdict': 'CORRECT' if 'command' not in task['meta'] else 'WRONG'}))")
    assert rewards.judge("a", "a", verifier=f"command:{shlex.join(argv)}").verdict is Verdict.CORRECT
    with pytest.raises(ConfigError, match="no such verifier"):
        rewards.judge("a", "a", verifier="command:")


def test_command_may_grade(tmp_path: Path):
    argv = program(tmp_path, "print(json.dumps({'value': 0.5}))")
    judgement = rewards.judge("a", "a", verifier="command", meta={"command": argv})
    assert (judgement.value, judgement.graded) == (0.5, True)


def mp(antecedent: str, consequent: str, minor: str, major: str) -> str:
    return f"{antecedent} {consequent} {minor} {major} ax-mp"


# p -> p from ax-1 and ax-2, written as it is found in a textbook.
P_P = "wph wph wi"
P_P_P = f"wph {P_P} wi"
STEP_1 = "wph wph ax-1"  # p -> (p -> p)
STEP_2 = f"wph {P_P} ax-1"  # p -> ((p -> p) -> p)
STEP_3 = f"wph {P_P} wph ax-2"  # STEP_2 -> (STEP_1 -> (p -> p))
PROOF = mp(P_P_P, P_P, STEP_1, mp(f"wph {P_P} wph wi wi", f"{P_P_P} {P_P} wi", STEP_2, STEP_3))
CHECKER = [sys.executable, str(EXAMPLES / "verifiers" / "metamath_proof.py")]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (f"By modus ponens twice:\n```\n{PROOF}\n```", "CORRECT"),
        (f"```\n{PROOF.replace('ax-2', 'ax-1')}\n```", "WRONG"),
        ("```\n?\n```", "WRONG"),
        ("```\n$. goal2 $a |- ( ph -> ph ) $. x $p |- ph $= wph\n```", "WRONG"),
        ("```\ngoal\n```", "WRONG"),
        ("It is obvious.", "UNPARSEABLE"),
    ],
)
def test_the_proof_checker_of_the_examples(response: str, expected: str):
    if shutil.which("metamath") is None:
        pytest.skip("metamath is not installed (Debian and Ubuntu: apt install metamath)")
    judgement = rewards.judge(response, "( ph -> ph )", verifier="command", meta={"command": CHECKER})
    assert judgement.verdict == expected, judgement


def test_the_proof_checker_says_what_is_missing(tmp_path: Path):
    argv = ["/usr/bin/env", f"PATH={tmp_path}", *CHECKER]
    judgement = rewards.judge(PROOF, "( ph -> ph )", verifier="command", meta={"command": argv})
    assert judgement.verdict is Verdict.CRASH
    assert "apt install metamath" in judgement.message
