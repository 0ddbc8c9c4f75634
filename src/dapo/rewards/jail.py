"""Runs one untrusted program, alone: own mounts, processes and network, no rights, little memory, an empty folder.

A script of its own (`python -P -S jail.py JOB_FD STATUS_FD RESULT_FD`), standard library only, started by `code`.
Three processes: the supervisor (waits, reports), the namespace's first process (its death ends everything inside),
and the program: one text, or a session of blocks that come one after the other and share their variables. The job
holds a program and its inputs, never an expected output: there is nothing in here to steal.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 38, 22, 24
PR_SET_THP_DISABLE = 41
SECCOMP_MODE_FILTER = 2

# Per machine: audit architecture, pivot_root, clone, clone3, and the calls a program that computes has no need of.
_X86_DENIED = """
    41 42 43 44 49 50 288 57 58 59 322 101 165 166 155 161 272 308 321 298 248 249 250 310 311 425 426 427 323 246 320
    175 313 176 303 304 135 163 167 168 169 170 171 172 173 434 438 424 428 429 430 431 432 433 442 53 253 294 300
    """
_ARM_DENIED = """
    198 203 202 206 200 201 242 221 281 117 40 39 41 51 97 268 280 241 217 218 219 270 271 425 426 427 282 104 294 105
    273 106 264 265 92 89 224 225 142 161 162 434 438 424 428 429 430 431 432 433 442 199 26 262
    """
# Memory that no limit of a process counts: SysV shared memory, semaphores and messages, POSIX message queues, memfd;
# pages put into a pipe and unmapped (vmsplice, splice, tee), of which a huge one stays whole; prctl, that it stays so.
_X86_UNCOUNTED = "29 30 31 67 64 65 66 220 68 69 70 71 240 241 242 243 244 245 319 447 278 275 276 157"
_ARM_UNCOUNTED = "194 195 196 197 190 191 192 193 186 187 188 189 180 181 182 183 184 185 279 447 75 76 77 167"
MACHINES = {
    "x86_64": (0xC000003E, 155, 56, 435, _X86_DENIED + _X86_UNCOUNTED),
    "aarch64": (0xC00000B7, 41, 220, 435, _ARM_DENIED + _ARM_UNCOUNTED),
}
CLONE_THREAD = 0x00010000
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/bin")
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/run", "/var")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    check(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def enter_namespaces() -> None:
    """Own mounts, processes, network, IPC and host name; without root in a user namespace, which grants the rest."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        check(libc.unshare(flags), "unshare")
        return
    check(libc.unshare(flags | CLONE_NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root() -> None:
    """A file system of the interpreter and the system's libraries, read-only, and an empty /work.

    It is mounted over a folder every system has, in our own mount namespace: nothing is created on disk, so a jail that
    is killed leaves nothing behind.
    """
    root = next(
        (folder for folder in _MOUNT_POINTS if os.path.isdir(folder) and not sys.base_prefix.startswith(folder)), ""
    )
    if not root:
        raise OSError(f"none of {', '.join(_MOUNT_POINTS)} can be mounted over")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=4096,mode=755")
    prefixes = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    folders = [folder for folder in _SYSTEM_FOLDERS if os.path.isdir(folder)]
    folders += sorted(prefix for prefix in prefixes if not prefix.startswith(("/usr/", "/lib")) and prefix != "/usr")
    for folder in folders:
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), root + folder)
            continue
        os.makedirs(root + folder, exist_ok=True)
        mount(folder, root + folder, None, MS_BIND)
        mount(None, root + folder, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.makedirs(root + "/dev")
    for device in _DEVICES:
        with open(root + device, "w"):
            pass
        mount(device, root + device, None, MS_BIND)
    for folder in ("/work", "/tmp"):
        os.makedirs(root + folder, exist_ok=True)
        os.chmod(root + folder, 0o777)
    os.makedirs(root + "/old")
    pivot_root = MACHINES[platform.machine()][1]
    check(libc.syscall(pivot_root, root.encode(), (root + "/old").encode()), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")


def set_limits(job: dict[str, Any]) -> None:
    memory = job["memory_mb"] * 2**20
    cpu_s = int(job["seconds"]) + 1
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 16 * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        resource.setrlimit(kind, (value, value))
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # else one page that is left of a huge one holds 2 MB


def drop_rights(uid: int) -> None:
    """Become nobody, with no capability to regain and no way to gain one."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = struct.pack("=Ii", 0x20080522, 0)
    libc.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(24))
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def forbid_calls() -> None:
    """A seccomp filter: no sockets, no new processes (threads may), no exec, no mounts, no tracing, no hidden memory.

    With one process, its address space, the 64 MB of its file system and 1 MB in each of some 30 pipes are all the
    memory that a program can hold.
    """
    architecture, _, clone, clone3, denied_text = MACHINES[platform.machine()]
    denied = [int(number) for number in denied_text.split()]
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # errno 1 is EPERM
    no_such_call = 0x00050000 | 38
    load, equal, at_least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [
        (load, 0, 0, 4),  # architecture
        (equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # number of the call
        (at_least, 0, 1, 0x40000000),  # the other numbering of x86
        (give, 0, 0, kill),
        (equal, 0, 1, clone3),  # its flags cannot be seen; the C library then uses clone
        (give, 0, 0, no_such_call),
        (equal, 0, 4, clone),
        (load, 0, 0, 16),  # flags
        (bits, 0, 1, CLONE_THREAD),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    for number in denied:
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    program.append((give, 0, 0, allow))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0), "seccomp")


def run_session(seed: int, result_fd: int) -> None:
    """Blocks of code in one namespace, as in a notebook. Each comes as a JSON line on standard input.

    The line's mark is written back when the block has ended. A block that finds it and writes it early only puts its
    own output into disorder: nobody trusts what is said in here.
    """
    import random
    import threading
    import traceback

    blocks = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # a block that asks for input finds none
    os.dup2(1, 2)
    random.seed(seed)
    stdout, namespace = sys.stdout, {"__name__": "__main__"}
    for line in blocks:
        block = json.loads(line)
        failed = False
        sys.stdout = sys.stderr = stdout  # one stream, in order; a block may have put something in its place
        try:
            run_block(block["code"], namespace)
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        except BaseException as error:  # SystemExit as well: the session goes on
            failed = True
            stdout.write(traceback.format_exception_only(error)[-1])
        stdout.flush()
        os.write(result_fd, json.dumps({"mark": block["mark"], "failed": failed}).encode() + b"\n")


def run_block(code: str, namespace: dict[str, Any]) -> None:
    """The block; the value of a last line that is an expression is shown, as a notebook does."""
    import ast

    tree = ast.parse(code)
    shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, "<python>", "exec"), namespace)
    if shown:
        exec(compile(ast.Interactive(shown), "<python>", "single"), namespace)


def run_program(job: dict[str, Any], result_fd: int) -> None:
    """The untrusted part. What it writes to `result_fd` is an output like any other: it is compared elsewhere."""
    namespace: dict[str, Any] = {"__name__": "__main__" if job["function"] is None else "solution"}
    sys.argv = ["solution.py"]
    exec(compile(job["program"], "solution.py", "exec"), namespace)
    if job["function"] is None:
        return
    function = namespace[job["function"]]
    for call in job["calls"]:
        line = json.dumps({"result": function(*call["args"], **call["kwargs"])})
        os.write(result_fd, line.encode() + b"\n")


def become_program(job: dict[str, Any], result_fd: int) -> None:
    """From a trusted process to the program; never returns."""
    status = 1
    try:
        os.setsid()
        os.chdir("/work")
        os.environ.clear()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        keep = sorted({0, 1, 2, result_fd})
        for low, high in zip([-1, *keep], [*keep, 1024], strict=True):
            if low + 1 < high:  # an empty range would close everything
                os.closerange(low + 1, high)
        set_limits(job)
        drop_rights(job["uid"])
        forbid_calls()
        if "session" in job:
            run_session(job["session"], result_fd)
        else:
            run_program(job, result_fd)
        sys.stdout.flush()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        status &= 0xFF
        try:
            sys.stdout.flush()
        except BaseException:
            status = 1
    except BaseException as error:
        try:
            sys.stdout.flush()
            sys.stderr.write(f"{type(error).__name__}: {error}"[:2_000])
            sys.stderr.flush()
        except BaseException:
            status = 1
    finally:
        os._exit(status)


def exit_status(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main() -> None:
    job_fd, status_fd, result_fd = (int(argument) for argument in sys.argv[1:4])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with os.fdopen(job_fd) as file:
        job = json.load(file)

    def report(**message: Any) -> None:
        os.write(status_fd, json.dumps(message).encode() + b"\n")

    try:
        enter_namespaces()
        first = os.fork()
        if first == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            build_root()
            program = os.fork()
            if program == 0:
                os.close(status_fd)
                become_program(job, result_fd)
            for descriptor in (0, 1, 2, result_fd):
                os.close(descriptor)
            while True:
                child, status = os.wait()
                if child == program:
                    report(code=exit_status(status))
                    os._exit(0)
    except OSError as error:
        report(setup_error=str(error))
        os._exit(1)
    for descriptor in (0, 1, 2, result_fd):
        os.close(descriptor)
    os.waitpid(first, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
