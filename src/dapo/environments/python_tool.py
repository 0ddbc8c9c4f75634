"""`python`: a Python interpreter for one episode, in the jail of verifier `code`. A turn without a call is final."""

from __future__ import annotations

import re

from dapo.environments.calls import Call, calls_in
from dapo.environments.interpreter import Interpreter, Ran
from dapo.environments.protocol import Turn
from dapo.errors import ConfigError
from dapo.rewards import code
from dapo.rewards.code import MAX_PROGRAM_CHARS, Allowance
from dapo.types import Problem

LANGUAGES = ("python", "py", "python3")
PROMPT = (
    "You can run Python. Write a ```python block and end your turn: you are given what it prints, and variables are "
    "kept for the next block. When you know the answer, give it without a code block."
)
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-fA-F]+")  # of an object: another one in every process


class PythonTool:
    """Blocks of one turn run in order, to the first that fails; they share the turn's CPU time."""

    stop = (("```py", "\n```\n"),)  # a model that goes on after its block invents what it prints
    seconds = 5.0  # CPU time of a turn, and time asleep
    max_output_chars = 2_000
    max_calls = 4  # of one turn

    def start(self, problem: Problem, seed: int) -> str:  # noqa: ARG002  a problem changes nothing here
        if why := code.isolation_error():
            raise ConfigError(f"data.environment = 'python': {why}", remedy=code.ISOLATION_REMEDY)
        self._interpreter = Interpreter(seed)
        return PROMPT

    def respond(self, said: str) -> Turn:
        calls, is_tool_call = calls_in(said, tool="python", argument="code", languages=LANGUAGES)
        if not calls:
            return Turn()
        allowance, answers, failed = Allowance(self.seconds), [], False
        for number, call in enumerate(calls, 1):
            answer, failed = self._answer(call, allowance, number)
            answers.append(answer)
            if failed:
                break
        text = "\n".join(answers)
        if is_tool_call:
            return Turn(text, role="tool", called=True, failed=failed)
        return Turn(f"```output\n{text}\n```", called=True, failed=failed)

    def close(self) -> None:
        """End the interpreter now; else that happens when this object goes."""
        self._interpreter.close()

    def _answer(self, call: Call, allowance: Allowance, number: int) -> tuple[str, bool]:
        """The text for the model, and whether the call failed."""
        if number > self.max_calls:
            return f"[not run: a turn may make {self.max_calls} calls]", True
        if call.error or len(call.text) > MAX_PROGRAM_CHARS:
            return f"[not run: {call.error or f'a program of more than {MAX_PROGRAM_CHARS:,} characters'}]", True
        ran = self._interpreter.run(call.text, allowance)
        return self._shown(ran), ran.failed

    def _shown(self, ran: Ran) -> str:
        output = shortened(_ADDRESS.sub("0x...", ran.output.rstrip()), self.max_output_chars)
        ended = f"[{ran.ended}; all variables are gone]" if ran.ended else ""
        return "\n".join(part for part in (output, ended) if part) or "[no output]"


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and its end with what is left out counted."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
