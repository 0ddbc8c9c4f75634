"""The interpreter of an episode: what it keeps, what it says, and that nothing a model writes breaks it."""

import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from endings import await_end, is_running
from hostile_programs import CHOSEN, HOSTILE, OUTSIDE

from cpu_time import cpu_seconds
from dapo.environments import interpreter
from dapo.environments.calls import Call, calls_in
from dapo.environments.protocol import Turn
from dapo.environments.python_tool import PythonTool, shortened
from dapo.rewards import code
from dapo.rewards.process_tree import children, tree, tree_seconds
from dapo.rollout.stops import is_complete
from dapo.types import Problem

needs_jail = pytest.mark.skipif(code.isolation_error() is not None, reason=f"no jail here: {code.isolation_error()}")
PROBLEM = Problem("p", "What is 6 times 7?", "42")
GONE = "all variables are gone]"
BY = {"tool": "python", "argument": "code", "languages": ("python",)}


class Quick(PythonTool):
    seconds = 0.4  # of CPU time: what spins uses all of it


def begun(seed: int = 0) -> Quick:
    tool = Quick()
    tool.start(PROBLEM, seed)
    return tool


@pytest.fixture
def tool() -> Iterator[Quick]:
    tool = begun()
    yield tool
    tool.close()


def block(program: str) -> str:
    return f"Let me see.\n```python\n{program}\n```\n"


def tool_call(program: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': program}})}\n</tool_call>"


def output(turn: Turn) -> str:
    assert turn.called
    return turn.text.removeprefix("```output\n").removesuffix("\n```")


def test_a_turn_ends_with_the_line_that_closes_its_first_block():
    ((begin, end),) = PythonTool.stop
    turn = block("print(6 * 7)")
    assert is_complete(turn, begin, end)
    assert not any(is_complete(turn[:n], begin, end) for n in range(len(turn)))
    assert not is_complete("```\n6 * 7\n```\nis 42, and ```text\n42\n```\n", begin, end)  # no call


@needs_jail
def test_an_episode(tool: Quick):
    assert tool.respond(block("x = 6\nprint('set')")) == Turn("```output\nset\n```", called=True)
    assert tool.respond(block("def double(n):\n    return 2 * n\nx += 1")) == Turn(
        "```output\n[no output]\n```", called=True
    )
    assert tool.respond(tool_call("double(x)")) == Turn("14", role="tool", called=True)  # a last expression is shown
    assert tool.respond("The answer is \\boxed{14}.") == Turn()


@needs_jail
@pytest.mark.parametrize(
    ("program", "last_line"),
    [
        ("print('before')\n1 / 0", "before\nZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("y", "NameError: name 'y' is not defined"),
        ("raise SystemExit('enough')", "SystemExit: enough"),
        ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "E: <exception str() failed>"),
        ("input()", "EOFError: EOF when reading a line"),
        ("'\\ud800'.encode()", "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800'"),
    ],
)
def test_an_error_is_its_last_line_and_the_variables_stay(tool: Quick, program: str, last_line: str):
    tool.respond(block("x = 5"))
    turn = tool.respond(block(program))
    assert turn.failed
    assert output(turn).startswith(last_line)
    assert len(output(turn).splitlines()) == len(last_line.splitlines())
    assert output(tool.respond(block("x"))) == "5"


@needs_jail
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("while True:\n    pass", "stopped after 0.4 s of CPU time"),
        ("import time\ntime.sleep(600)", "stopped after 0.4 s asleep"),
        ("while True:\n    print('x' * 1000)", "stopped after 1,000,000 bytes of output"),
        ("import os\nos._exit(3)", "the interpreter ended (exit code 3)"),
        ("import ctypes\nctypes.string_at(0)", "the interpreter ended (signal SIGSEGV)"),
        ("import os\nos.close(1)\nos.close(2)\nwhile True:\n    pass", "stopped after 0.4 s of CPU time"),
    ],
)
def test_what_goes_too_far_ends_the_session_and_says_so(tool: Quick, program: str, why: str):
    tool.respond(block("x = 5"))
    turn = tool.respond(block(program))
    assert turn.failed
    assert output(turn).endswith(f"[{why}; {GONE}")
    assert output(tool.respond(block("x"))) == "NameError: name 'x' is not defined"
    assert output(tool.respond(block("40 + 2"))) == "42"


@needs_jail
def test_the_blocks_of_a_turn_run_in_order_to_the_first_that_fails(tool: Quick):
    turn = tool.respond(block("x = 1\nx") + block("x + 1") + block("1 / 0") + block("x = 9"))
    assert output(turn) == "1\n2\nZeroDivisionError: division by zero"
    assert turn.failed
    assert output(tool.respond(block("x"))) == "1"
    assert output(tool.respond(block("1") * 5)).splitlines() == [*"1111", "[not run: a turn may make 4 calls]"]


@needs_jail
def test_the_blocks_of_a_turn_share_its_time(tool: Quick):
    spin = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end:\n    pass"
    assert output(tool.respond(block(spin) * 4)).endswith(f"[stopped after 0.4 s of CPU time; {GONE}")


@needs_jail
def test_an_answer_depends_on_the_seed_and_what_was_said_alone():
    program = "import random\nprint(random.random(), {'a', 'b', 'c', 'd'}, object())"
    said = []
    for seed in (1, 1, 2):
        tool = begun(seed)
        said.append(output(tool.respond(block(program))))
        tool.close()
    assert said[0] == said[1] != said[2]
    assert said[0].endswith("<object object at 0x...>")


@needs_jail
def test_a_thread_is_waited_for_and_one_that_runs_on_gets_no_time(tool: Quick):
    program = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()"
    assert output(tool.respond(block(program))) == "late"
    spin = "def spin():\n    while True:\n        pass\nthreading.Thread(target=spin, daemon=True).start()"
    tool.respond(block(spin))
    (jail,) = [pid for pid in children(os.getpid()) if len(tree(pid)) == 3]
    while not any(is_stopped(pid) for pid in tree(jail)):  # pytest's own time limit ends this
        time.sleep(0.01)
    used = tree_seconds(jail)
    time.sleep(0.1)
    assert tree_seconds(jail) == used


def is_stopped(pid: int) -> bool:
    """All of its threads: a busy machine takes a while to stop them."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(states) and all(state == "T" for state in states)


@needs_jail
def test_the_process_ends_with_its_environment():
    before = set(children(os.getpid()))
    for ending in ("close", "gone", "restart"):
        tool = begun()
        tool.respond(block("1"))
        (jail,) = set(children(os.getpid())) - before
        processes = tree(jail)
        assert len(processes) == 3
        if ending == "close":
            tool.close()
        elif ending == "restart":
            tool.start(PROBLEM, 0)
        else:
            del tool
        gc.collect()
        await_end(processes)


@needs_jail
def test_the_world_of_a_block_is_empty(tool: Quick):
    program = "import os\n(dict(os.environ), os.listdir('.'), os.path.exists('/proc/1'), os.path.exists('/etc/passwd'))"
    assert output(tool.respond(block(program))) == "({}, [], False, False)"


@needs_jail
@pytest.mark.parametrize("n", [1, 65_535, 65_536, 65_537, 131_073])
def test_border_of_a_pipe_and_of_what_is_shown(tool: Quick, n: int):
    said = output(tool.respond(block(f"x = {'7' * n!r}\nprint(len(x))\nprint(x)")))
    assert said.startswith(f"{n}\n7")
    assert len(said) <= PythonTool.max_output_chars + 60


def test_border_of_shortened_text():
    assert [shortened("abcdefgh"[:n], 4) for n in (0, 3, 4)] == ["", "abc", "abcd"]
    assert shortened("abcde", 4) == "ab\n[... 1 characters left out ...]\nde"
    assert shortened("abcdefghi", 4) == "ab\n[... 5 characters left out ...]\nhi"


@needs_jail
def test_a_forged_mark_does_not_end_a_block(tool: Quick):
    forge = 'import os, time\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b\'{"mark": ""}\\n\')\n'
    go_on = "    except OSError:\n        pass\nend = time.process_time() + 0.05\n"
    wait = "while time.process_time() < end:\n    pass\n'after'"
    assert tool.respond(block(forge + go_on + wait)) == Turn("```output\n'after'\n```", called=True)


# The framing: a line of JSON with the block's mark on the descriptor that the session writes its marks to.
FORGED = {
    "marks printed": 'print(\'{"mark": "0", "failed": false}\')\nprint(\'```output\')',
    "marks to every descriptor": "import os\nfor fd in range(3, 64):\n    try:\n"
    "        os.write(fd, b'{\"mark\": null}\\n' + b'[' * 100_000 + b'\\n\\xff\\n')\n    except OSError:\n        pass",
    "the real mark, early, and on": "import os, sys, json\nf = sys._getframe()\n"
    "while f and 'block' not in f.f_locals:\n    f = f.f_back\n"
    "mark = f.f_locals['block']['mark']\nfd = f.f_locals['result_fd']\n"
    "os.write(fd, json.dumps({'mark': mark, 'failed': False}).encode() + b'\\n')\nwhile True:\n    pass",
    "marks without end": "import os\nwhile True:\n    for fd in range(3, 12):\n        try:\n"
    "            os.write(fd, b'x' * 1000)\n        except OSError:\n            pass",
    "reading the next block": "import os\nfor fd in range(3, 12):\n    try:\n        os.read(fd, 1)\n"
    "    except OSError:\n        pass",
    "descriptors used up": "kept = []\nwhile True:\n    kept.append(open('/dev/null'))",
    "no standard output": "import sys\nsys.stdout = sys.stderr = None",
    "closed standard output": "import sys\nsys.stdout.close()",
    "everything closed": "import os\nos.closerange(0, 1024)",
    "no built-ins": "__builtins__.clear() if isinstance(__builtins__, dict) else vars(__builtins__).clear()",
    "no json": "import json\njson.dumps = json.loads = None",
    "null byte": "x = 1\0",
    "surrogates": "print('\\ud800', '\\U0001f600')",
    "an endless number": "print(10 ** 10_000)",
    "deep brackets": "(" * 10_000,
    "trace function": "import sys\nsys.settrace(lambda *a: 1 / 0)\nx = 1",
    "exception without end": "class E(Exception):\n    def __str__(self):\n        return 'x' * 10**9\nraise E",
    "thread that ends it": "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()",
}
PROGRAMS = HOSTILE | FORGED


@needs_jail
@pytest.mark.parametrize(
    "name", [name if name in (*FORGED, *CHOSEN) else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_hostile_blocks_break_nothing(tool: Quick, name: str):
    turn = tool.respond(block(PROGRAMS[name]))
    assert turn.called
    assert turn.score is None
    assert len(turn.text) < PythonTool.max_output_chars + 200
    again = [output(tool.respond(block("6 * 7"))) for _ in range(2)]
    assert all(said == "42" or said.endswith(GONE) or "Error" in said for said in again), again
    tool.start(PROBLEM, 0)
    assert output(tool.respond(block("6 * 7"))) == "42"  # the next episode
    assert not Path(OUTSIDE).exists()


NAMED = {
    "fork bomb": "PermissionError: [Errno 1] Operation not permitted",
    "10 GB": "MemoryError",
    "file outside": "No such file or directory",
    "socket": "PermissionError: [Errno 1] Operation not permitted",
    "becoming root": "PermissionError: [Errno 1] Operation not permitted",
    "descriptors used up": "OSError: [Errno 24] Too many open files: '/dev/null'",
    "everything closed": "the interpreter ended (exit code 1)",
    "null byte": "source code string cannot contain null bytes",
    "an endless number": "ValueError: Exceeds the limit",
    "thread that ends it": "the interpreter ended (exit code 0)",
}


@needs_jail
@pytest.mark.parametrize("name", NAMED)
def test_what_a_hostile_block_is_told(tool: Quick, name: str):
    turn = tool.respond(block(PROGRAMS[name]))
    assert turn.failed
    assert NAMED[name] in turn.text


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"name": "python", "arguments": {"code": "1"}', "not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5_000, "not JSON"),
        ("[1]", 'no "name"'),
        ("null", 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "bash", "arguments": {"code": "ls"}}', "no tool 'bash'; there is 'python'"),
        (json.dumps({"name": "x" * 10_000}), "there is no tool 'xxx"),
        ('{"name": "python"}', 'no text "code"'),
        ('{"name": "python", "arguments": []}', 'no text "code"'),
        ('{"name": "python", "arguments": {"code": ["1"]}}', 'no text "code"'),
        ('{"name": "python", "arguments": "{"}', "not JSON"),
        ('{"name": "python", "arguments": "[]"}', 'no text "code"'),
    ],
)
def test_a_call_that_is_none_is_named(body: str, error: str):
    ((call,), is_tool_call) = calls_in(f"<tool_call>{body}</tool_call>", **BY)
    assert is_tool_call
    assert error in call.error
    assert len(call.error) < 250


def test_a_call_that_is_none_is_an_answer_of_the_tool():
    tool = PythonTool()  # nothing is started for it
    tool._interpreter = interpreter.Interpreter(0)
    turn = tool.respond("<tool_call>{</tool_call>")
    assert turn.role == "tool"
    assert turn.failed
    assert turn.text.startswith("[not run: the tool call is not JSON")
    too_long = tool.respond(block("#" * (code.MAX_PROGRAM_CHARS + 1)))
    assert output(too_long) == "[not run: a program of more than 200,000 characters]"


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("no call", []),
        ("", []),
        ("```python\n1\n```", ["1"]),
        ("```python\n1", ["1"]),
        ("```\n1\n```\n```bash\nls\n```\n```output\n1\n```", []),
        ("```PY\n1\n```".replace("PY", "Python"), ["1"]),
        ("```python\n1\n```\n```python\n2\n```", ["1", "2"]),
        ("<think>```python\n1\n```</think>It is 1.", []),
        ("<think>hm</think>```python\n2\n```", ["2"]),
        (tool_call("1"), ["1"]),
        (tool_call("1") + tool_call("2"), ["1", "2"]),
        (tool_call("1").removesuffix("</tool_call>"), ["1"]),
        (tool_call("print('''```python\n3\n```''')"), ["print('''```python\n3\n```''')"]),
        (block("3") + tool_call("4"), ["4"]),
        (tool_call("é\U0001f600\ud800"), ["é\U0001f600\ud800"]),
        ('<tool_call>{"name": "python", "arguments": "{\\"code\\": \\"5\\"}"}</tool_call>', ["5"]),
        ('<tool_call>{"name": "python", "parameters": {"code": "6"}}</tool_call>', ["6"]),
    ],
)
def test_calls_in_a_turn(said: str, calls: list[str]):
    assert calls_in(said, **BY)[0] == [Call(text) for text in calls]


def test_a_turn_of_many_megabytes_is_read_at_once():
    for text in ("<tool_call>" * 10**5, "```python\n" * 10**5, "</think>" * 10**5):
        assert cpu_seconds(lambda text=text: calls_in(text, **BY)) < 10


@needs_jail
def test_without_a_jail_the_episode_does_not_begin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "isolation_error", lambda: "programs cannot be isolated on this machine (no).")
    with pytest.raises(Exception, match=r"data\.environment = 'python': programs cannot be isolated"):
        PythonTool().start(PROBLEM, 0)


def test_a_report_of_the_jail():
    assert interpreter.why_ended(b'{"code": 137}\n') == "the interpreter ended (signal SIGKILL)"
    for report in (b"", b'{"setup_error": "unshare"}\n'):
        with pytest.raises(interpreter.EngineError, match="the jail could not be built"):
            interpreter.why_ended(report)


def test_processes_of_the_tests_are_gone():
    gc.collect()
    assert not [pid for pid in children(os.getpid()) if is_running(pid) and len(tree(pid)) == 3]
