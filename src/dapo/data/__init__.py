"""Problem sets: reading, cleaning and checking them, prompts, and the order in which problems are visited."""

from dapo.data.order import ProblemOrder
from dapo.data.problems import Drop, ProblemSet, Why, hold_out, load_problems
from dapo.data.prompts import EncodedProblem, PromptFormat, encode_problems

__all__ = [
    "Drop",
    "EncodedProblem",
    "ProblemOrder",
    "ProblemSet",
    "PromptFormat",
    "Why",
    "encode_problems",
    "hold_out",
    "load_problems",
]
