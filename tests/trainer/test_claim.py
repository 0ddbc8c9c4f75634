"""Two processes never train the same run."""

import subprocess
import sys
from pathlib import Path

import pytest

from dapo.errors import ConfigError
from dapo.trainer.claim import claim, release

HOLD = """
import sys
from pathlib import Path
from dapo.trainer.claim import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_another_process_trains_is_refused_until_that_ends(tmp_path: Path):
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match="another process is training this run") as caught:
        claim(tmp_path)
    assert f"dapo watch {tmp_path}" in caught.value.remedy
    other.kill()  # as by kill -9: the claim goes with the process
    other.communicate()
    claim(tmp_path)
    claim(tmp_path)  # a process may go on with its own run
    release(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
