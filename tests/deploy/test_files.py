"""The container and cluster files: they parse, and every path, command, option, key and recipe in them exists."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.cli.main import COMMANDS
from dapo.config.load import load_recipe, recipe_names

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {"FROM", "RUN", "USER", "WORKDIR", "ARG", "ENV", "COPY", "CMD", "ENTRYPOINT"}


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with its continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]  # type: ignore[misc]


def test_the_dockerfile_has_known_instructions_and_copies_what_is_there_and_not_ignored():
    made: set[str] = set()
    for instruction, rest in instructions():
        assert instruction in INSTRUCTIONS
        words = [word for word in rest.split() if not word.startswith("--")]
        if instruction == "ARG" and rest.startswith("BASE="):
            assert ":" in rest, "no tag"
            made.add("${BASE}")
        elif instruction == "FROM":
            assert words[0] in made
            made.add(words[2])
        elif instruction == "COPY" and "--from=" not in rest:
            assert all((ROOT / word).exists() and (word == "." or is_kept(word.split("/")[0])) for word in words[:-1])
        elif instruction == "COPY":
            assert re.search(r"--from=(\w+)", rest)[1] in made  # type: ignore[index]
    assert instructions()[-2:] == [("ENTRYPOINT", '["dapo"]'), ("CMD", '["quickstart"]')]
    assert "quickstart" in COMMANDS


def is_kept(name: str) -> bool:
    return f"!{name}" in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()


def test_what_the_tests_read_is_in_the_image():
    """Everything that git has at the root, but for what concerns git alone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: the image itself, or a source distribution")
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    names = {name.split("/")[0] for name in kept if name} - {".gitignore", ".github", ".gitattributes"}
    assert not {name for name in names if not is_kept(name) and not name.startswith("requirements-")}


def test_the_dockerfiles_own_examples_and_make_targets_exist():
    text = (DEPLOY / "Dockerfile").read_text()
    (words,) = re.findall(r"dapo (train .*)", text)
    check_command(shlex.split(words))
    assert re.search(r"(?m)^test:", (ROOT / "Makefile").read_text())
    extras = re.findall(r"source\[([\w,]+)\]\"", text)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"(?m)^{extra} = \[", project) for part in extras for extra in part.split(","))


def check_command(words: list[str]) -> None:
    command, target, *options = words
    assert command in COMMANDS
    sets = [value for flag, value in zip(options[::2], options[1::2], strict=True) if flag == "--set"]
    assert set(options[::2]) <= {"--set", "--out"}
    if command == "train":
        assert target in recipe_names()
        load_recipe(target, sets)


def test_the_kuberay_job_names_what_exists():
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay-job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    for words in re.findall(r"exec dapo ([^;]*);", spec["entrypoint"]):
        check_command(shlex.split(words))
    assert subprocess.run(["sh", "-n", "-c", spec["entrypoint"]], check=False).returncode == 0
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"].startswith("2.60")  # pyproject.toml's
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert f"cluster.gpus={gpus}" in spec["entrypoint"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert pod["securityContext"] == {"fsGroup": 1000}, "the image's user could not write to a volume of root's"


def test_the_image_has_what_kuberay_calls_in_a_pod():
    """Its probes call wget, its jobs `ray job submit`, and its shells may be login shells, which set PATH anew."""
    found = dict.fromkeys(("wget=", '"ray[default]"', "> /etc/profile.d/dapo.sh"), False)
    for instruction, rest in instructions():
        found |= {part: True for part in found if instruction == "RUN" and part in rest}
        if instruction == "FROM" and rest.endswith(" AS run"):
            assert rest == "packages AS run", "the stage that these are in"
    assert all(found.values()), found


def test_the_skypilot_task_names_what_exists(tmp_path: Path):
    task: dict[str, Any] = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["sh", "-n", "-c", script], check=False).returncode == 0
    (new,) = re.findall(r"set -- (train .*)", task["run"])
    check_command(shlex.split(new.replace("$RECIPE", task["envs"]["RECIPE"]).replace("$gpus", "16")))
    assert task["envs"]["RUN"].startswith("/runs/")
    assert "/runs" in task["file_mounts"]
    assert run_with_stubs(task, tmp_path) == "train dapo-math-7b-8x80gb"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert run_with_stubs(task, tmp_path) == f"resume {tmp_path / 'run'}"


def run_with_stubs(task: dict[str, Any], folder: Path) -> str:
    """The task's command with SkyPilot's variables and a torchrun that says what it was given: the first two words."""
    stub = folder / "dapo" / "bin" / "torchrun"
    stub.parent.mkdir(parents=True, exist_ok=True)
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)
    names = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NODE_RANK": "1", "NUM_GPUS_PER_NODE": "8"}
    own = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "RUN": str(folder / "run"), "RECIPE": task["envs"]["RECIPE"]}
    env = own | {f"SKYPILOT_{name}": value for name, value in names.items()}
    said = subprocess.run(["sh", "-c", task["run"]], env=env, capture_output=True, text=True, check=True).stdout
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1" in said
    assert "--set cluster.gpus=16" in said, "a recipe may name another number"
    return " ".join(said.partition("-m dapo ")[2].split()[:2])


@pytest.mark.parametrize("path", sorted(path.name for path in DEPLOY.iterdir()))
def test_every_file_is_in_the_docs(path: str):
    docs = (ROOT / "docs" / "scaling.md").read_text()
    assert path.removesuffix(".dockerignore") in docs
