"""Graded arithmetic for a small chat model: sums, differences and products of numbers of one and two digits.

    dapo train arithmetic-smollm2-135m --out runs/arithmetic
    dapo eval --model runs/arithmetic --data examples.arithmetic:test_problems --template raw --no-chat --k 8

Run from the root of the repository. The prompt shows four worked problems as earlier turns of the conversation, so
that SmolLM2-135M-Instruct answers in the right form before any training and what training adds is arithmetic. An
unordered pair of numbers is in the training set or in the test set, never in both.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator

from dapo.types import Problem, Score

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SHOTS = (("5 + 3", 8), ("46 + 27", 73), ("82 - 35", 47), ("7 * 6", 42))
HELD_SHARE = 8  # one pair in eight is held out
# Problems of each kind in the training and the test set; the small tables have fewer, and give what they have.
N_TRAIN = {"add-1": 100, "add-2-1": 600, "add-2": 1200, "sub-2": 1200, "mul-1": 100}
N_TEST = {"add-1": 20, "add-2-1": 60, "add-2": 80, "sub-2": 80, "mul-1": 20}

Pair = tuple[int, int]
Ask = Callable[[str], str]


def train_problems() -> Iterator[Problem]:
    """Held-in pairs, in the conversation that `conversation` writes."""
    return problems(is_held=False, sizes=N_TRAIN, ask=conversation)


def test_problems() -> Iterator[Problem]:
    """Held-out pairs, asked like the training problems."""
    return problems(is_held=True, sizes=N_TEST, ask=conversation)


def test_problems_as_text() -> Iterator[Problem]:
    """The test problems with the same examples as plain text, for the base model's score under another prompt."""
    return problems(is_held=True, sizes=N_TEST, ask=text)


def test_questions() -> Iterator[Problem]:
    """The bare questions of the test problems, for the prompt templates of `dapo eval`."""
    return problems(is_held=True, sizes=N_TEST, ask=lambda expression: f"What is {expression}?")


def conversation(expression: str) -> str:
    """Four answered turns, then the question; ChatML, to be sent raw."""
    turns = [f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"]
    for shown, value in SHOTS:
        turns.append(f"<|im_start|>user\nWhat is {shown}?<|im_end|>\n")
        turns.append(f"<|im_start|>assistant\n{shown} = {value}\nAnswer: {value}<|im_end|>\n")
    return "".join(turns) + f"<|im_start|>user\nWhat is {expression}?<|im_end|>\n<|im_start|>assistant\n"


def text(expression: str) -> str:
    shown = (f"Question: What is {shot}?\n{shot} = {value}\nAnswer: {value}<|im_end|>\n" for shot, value in SHOTS)
    return f"{''.join(shown)}Question: What is {expression}?\n"


def problems(*, is_held: bool, sizes: dict[str, int], ask: Ask) -> Iterator[Problem]:
    shown = {frozenset(expression.split()) for expression, _ in SHOTS}  # numbers and sign, in either order
    for kind, size in sizes.items():
        pairs = [pair for pair in all_pairs(kind) if held_out(kind, pair) is is_held]
        random.Random(kind).shuffle(pairs)
        for a, b in pairs[:size]:
            expression, value = written(kind, a, b)
            if frozenset(expression.split()) not in shown:
                yield Problem(f"{kind}:{a},{b}", ask(expression), str(value), source=kind)


def all_pairs(kind: str) -> Iterable[Pair]:
    small, large = range(1, 10), range(10, 100)
    match kind:
        case "add-1":
            return [(a, b) for a in small for b in small]
        case "add-2-1":
            return [(a, b) for a in large for b in small]
        case "add-2":
            return [(a, b) for a in large for b in large]
        case "sub-2":
            return [(a, b) for a in large for b in range(10, a + 1)]
        case "mul-1":
            return [(a, b) for a in range(2, 10) for b in range(2, 10)]
    raise ValueError(f"no such kind of problem: {kind}")


def held_out(kind: str, pair: Pair) -> bool:
    """By the unordered pair: 27 + 46 tells the answer of 46 + 27."""
    low, high = sorted(pair)
    return hashlib.sha256(f"{kind}:{low},{high}".encode()).digest()[0] % HELD_SHARE == 0


def written(kind: str, a: int, b: int) -> tuple[str, int]:
    sign = {"add": "+", "sub": "-", "mul": "*"}[kind.split("-")[0]]
    return f"{a} {sign} {b}", {"+": a + b, "-": a - b, "*": a * b}[sign]


def coin(_response: str, _answer: str, _meta: dict[str, object]) -> Score:
    """A verifier for the control run: right or wrong by chance. Whatever rises under it is not learnt from verdicts."""
    is_right = random.SystemRandom().random() < 0.5
    return Score(1.0 if is_right else -1.0, correct=is_right)
