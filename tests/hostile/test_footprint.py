"""All the memory that a program in the jail can hold is what its limits count: its address space and its files."""

import platform

import pytest

from dapo.rewards import code
from dapo.rewards.jail import MACHINES

pytestmark = pytest.mark.skipif(code.isolation_error() is not None, reason=f"no jail here: {code.isolation_error()}")

# name -> number on x86_64, on aarch64
UNCOUNTED = {
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "msgsnd": (69, 189), "semget": (64, 190),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447), "socketpair": (53, 199),
    "inotify_init1": (294, 26),
}  # fmt: skip
ASK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    ctypes.set_errno(0)
    print(libc.syscall(number, 0, 1 << 20, 0o1600, 0), ctypes.get_errno())
"""
HOLD = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
held = 0
for _ in range(64):  # 64 MB at a time, 4 GB in all
    segment = libc.shmget(0, 64 << 20, 0o1600)
    if segment >= 0:
        held += 64
    try:
        os.posix_fallocate(os.memfd_create("x"), 0, 16 << 20)
        held += 16
    except (OSError, AttributeError):
        pass
try:
    for n in range(200):
        with open(f"file-{n}", "wb") as file:
            file.write(bytes(1 << 20))
        held += 1
except OSError:
    pass
print(held)
"""


def run(program: str) -> str:
    done = code.run_jailed(program, allowance=code.Allowance(20))
    assert done.code == 0, done
    return done.stdout.decode()


def test_calls_that_hold_memory_outside_of_every_limit_are_denied():
    which = list(MACHINES).index(platform.machine())
    numbers = [pair[which] for pair in UNCOUNTED.values()]
    answers = run(ASK.format(numbers=numbers)).splitlines()
    assert dict(zip(UNCOUNTED, answers, strict=True)) == dict.fromkeys(UNCOUNTED, "-1 1")  # EPERM


def test_what_a_program_can_hold_outside_its_address_space_is_its_file_system():
    assert int(run(HOLD)) <= 64
