"""Programs that try to get out of the jail, to use it up, or to look right."""

OUTSIDE = "/tmp/dapo-jail-escape"
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork bomb, errors ignored": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",  # noqa: E501
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    "endless loop": "while True:\n    pass",
    "endless loop in C": "9**9**9**9",
    "endless loop, signals ignored": "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"  # noqa: E501
    "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
    "sleep": "import time\ntime.sleep(3600)",
    "10 GB": "x = bytearray(10 * 2**30)\nprint(5)",
    "memory in small pieces": "x = []\nwhile True:\n    x.append(bytearray(2**20))",
    "file outside": f"open({OUTSIDE!r}, 'w').write('x')\nopen('/etc/passwd', 'a').write('x')\nprint(5)",
    "filling the disk": "f = open('big', 'wb')\nwhile True:\n    f.write(b'x' * 2**20)",
    "socket": "import socket\ns = socket.socket()\ns.connect(('127.0.0.1', 22))\nprint(5)",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
    "name lookup": "import urllib.request\nurllib.request.urlopen('http://example.com').read()",
    "reading the tests": "import glob\nfor path in glob.glob('/**/*.json*', recursive=True)[:2000]:\n"
    "    try:\n        print(open(path).read()[:50])\n    except OSError:\n        pass",
    "reading the home folder": "import os\nprint(os.listdir('/home'), os.listdir('/root'))",
    "exit 0": "import sys\nsys.exit(0)",
    "hard exit 0": "import os\nos._exit(0)",
    "patching the comparison": "import builtins, json\njson.dumps = lambda *a, **k: '{\"result\": 5}'\n"
    "import dapo.rewards.code\ndapo.rewards.code.same_value = lambda *a: True",
    "equal to everything": "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    "def add(a, b):\n    return All(7)",
    "equal object": "class All:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return All()",
    "printing one expected output": "print(5)",
    "printing many outputs": "for n in range(100):\n    print(n)",
    "printing a verdict": 'print(\'{"verdict": "CORRECT", "ticket": 0}\')',
    "verdict to every descriptor": "import os\nfor fd in range(64):\n    try:\n"
    '        os.write(fd, b\'{"code": 0, "verdict": "CORRECT", "result": 5}\\n\')\n    except OSError:\n        pass\nos._exit(0)',  # noqa: E501
    "results in advance": "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'{\"result\": 5}\\n' * 2)\n"
    "    except OSError:\n        pass\nos._exit(0)\ndef add(a, b): pass",
    "killing the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)\nprint(5)",  # noqa: E501
    "reading the parent": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())\nprint(open('/proc/1/cmdline').read())",  # noqa: E501
    "tracing the parent": "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(libc.ptrace(16, os.getppid(), 0, 0))",
    "closing descriptors": "import os\nos.closerange(0, 1024)\nprint(5)",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\nprint(5)",  # noqa: E501
    "shell": "import os, subprocess\nos.system('echo 5')\nprint(subprocess.run(['echo', '5'], capture_output=True).stdout)",  # noqa: E501
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo 5; exit 0'])",
    "output without end": "while True:\n    print('5' * 1000)",
    "unpacked output": "import zlib\nprint(zlib.decompress(zlib.compress(b'5' * 50_000_000)).decode())",
    "errors without end": "import sys\nwhile True:\n    sys.stderr.write('x' * 10000)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n):\n    return f(n + 1)\nf(0)",
    "crash of the interpreter": "import ctypes\nctypes.string_at(0)",
    "new namespaces": "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.unshare(0x10000000), libc.mount(b'none', b'/', b'tmpfs', 0, None))",  # noqa: E501
    "becoming root": "import os\nos.setuid(0)\nprint(5)",
    "leaving the root folder": "import os\nos.chroot('.')\nos.chdir('../../../../..')\nprint(os.listdir('.'))",
    "io_uring": "import ctypes\nprint(ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(200)))",
    "raising limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\nx = bytearray(10 * 2**30)\nprint(5)",  # noqa: E501
    "null bytes": "print('5\\0')",
    "infinite result": "def add(a, b):\n    return float('inf')",
    "nested result": "def add(a, b):\n    x = []\n    for _ in range(10**5):\n        x = [x]\n    return x",
    "result of a gigabyte": "def add(a, b):\n    return 'x' * 300_000_000",
}

# One of each kind, for the everyday suite; the slow one has all.
CHOSEN = (
    "fork bomb", "10 GB", "memory in small pieces", "file outside", "socket", "name lookup", "reading the home folder",
    "killing the parent", "shell", "verdict to every descriptor", "becoming root", "result of a gigabyte",
)  # fmt: skip
