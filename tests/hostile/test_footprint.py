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
    "inotify_init1": (294, 26), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "prctl": (157, 167),
}  # fmt: skip
ASK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    ctypes.set_errno(0)
    print(libc.syscall(number, 0, 1 << 20, 0o1600, 0), ctypes.get_errno())
"""
HOLD = """
import ctypes, fcntl, mmap, os, threading
libc = ctypes.CDLL(None, use_errno=True)
held = 0

def until_refused(step):
    global held
    try:
        for n in range(4_000):
            held += step(n)
    except (OSError, AttributeError, RuntimeError):
        pass

def segment(n):  # of shared memory
    return 16 << 20 if libc.shmget(0, 16 << 20, 0o1600) >= 0 else 0

def anonymous_file(n):
    os.posix_fallocate(os.memfd_create("x"), 0, 1 << 20)
    return 1 << 20

def child(n):  # each may have as much memory as its parent
    if os.fork() == 0:
        os._exit(0)
    return 512 << 20

def shared_file(n):
    with open(f"/dev/shm/{n}", "wb") as file:
        return file.write(bytes(1 << 20))

def file(n):
    with open(f"/{('tmp', 'work')[n % 2]}/{n}", "wb") as file:
        return file.write(bytes(1 << 20))

pipes = []
def pipe(n):
    pipes.append(os.pipe())
    fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)  # F_SETPIPE_SZ
    os.set_blocking(pipes[-1][1], False)
    return os.write(pipes[-1][1], bytes(1 << 20))

for step in (segment, anonymous_file, child, shared_file, file, pipe):
    until_refused(step)
print(held >> 20)
"""
HUGE = """
import mmap, resource
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
memory[::mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * mmap.PAGESIZE >> 20)
"""
MAPPED = """
import mmap, os
maps = []
with open("file", "w+b") as file:
    file.truncate(16 << 20)
    try:
        while True:
            maps.append(mmap.mmap(file.fileno(), 16 << 20))
    except OSError:
        print(16 * len(maps))
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


def test_what_a_program_can_hold_outside_its_address_space_is_in_its_files_and_pipes():
    assert int(run(HOLD)) <= 64 + 32


def test_a_file_that_is_mapped_counts_as_address_space():
    assert int(run(MAPPED)) < code.PROGRAM_MEMORY_MB


def test_no_page_is_a_huge_one_that_a_part_of_it_would_hold():
    assert int(run(HUGE)) >= 64  # a fault for each page
