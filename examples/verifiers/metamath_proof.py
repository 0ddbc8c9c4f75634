"""A verifier for `dapo verify --verifier command:…`: is the response a proof of the reference? Metamath decides.

    apt install metamath
    dapo verify proofs.jsonl --verifier "command:python examples/verifiers/metamath_proof.py"

The reference is a statement such as `( ph -> ph )`; the response ends in a code block with the proof's labels, in
Metamath's order (reverse Polish). Only labels are passed on: a response cannot add an axiom, a definition or a comment.
It is started once and reads one response a line.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DATABASE = Path(__file__).with_name("propositional.mm")
LABEL = re.compile(r"[A-Za-z0-9._-]+")
MAX_LABELS = 20_000


def main() -> None:
    metamath = shutil.which("metamath")
    if metamath is None:
        sys.exit("metamath is not installed; on Debian and Ubuntu: apt install metamath")
    for line in sys.stdin:
        judge(metamath, json.loads(line))


def judge(metamath: str, task: dict) -> None:
    blocks = re.findall(r"```[^\n]*\n(.*?)```", task["response"], re.DOTALL)
    labels = blocks[-1].split() if blocks else []
    if not labels:
        answer("UNPARSEABLE", message="no code block with labels")
    elif len(labels) > MAX_LABELS or not all(LABEL.fullmatch(label) for label in labels):
        answer("WRONG", message="a proof is a list of labels")
    elif (complaint := check(metamath, task["answer"], labels)) is not None:
        answer("WRONG", message=complaint)
    else:
        answer("CORRECT", extracted=" ".join(labels))


def check(metamath: str, statement: str, labels: list[str]) -> str | None:
    """Metamath's complaint about the proof, or None when it holds."""
    if not re.fullmatch(r"[A-Za-z().> -]+", statement):
        sys.exit(f"the reference {statement!r} is no statement of the database")
    with tempfile.TemporaryDirectory() as folder:
        theorem = f"goal $p |- {statement} $= {' '.join(labels)} $.\n"
        Path(folder, "goal.mm").write_text(DATABASE.read_text() + theorem)
        done = subprocess.run(
            [metamath, "read goal.mm", "verify proof goal", "exit"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    complaints = [line for line in done.stdout.splitlines() if line.startswith("?")]
    if complaints:
        return complaints[0]
    return None if "goal" in done.stdout.partition("verify proof goal")[2] else "metamath gave no verdict"


def answer(verdict: str, *, extracted: str | None = None, message: str = "") -> None:
    print(json.dumps({"verdict": verdict, "extracted": extracted, "message": message}), flush=True)


if __name__ == "__main__":
    main()
