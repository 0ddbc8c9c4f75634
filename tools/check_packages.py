"""Looks into the built wheel and sdist, installs the wheel into a new environment and runs it from another folder.

    python tools/check_packages.py dist

The new environment sees the packages of the one this runs in through a .pth, so that only `dapo` itself is installed; a
finder for this checkout that stands there is left out, or the test would be of the checkout.
"""

import os
import site
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

WANTED_IN_WHEEL = (
    "dapo/py.typed",
    "dapo/config/presets/dapo.toml",
    "dapo/config/recipes/quickstart.toml",
    "dapo/quickstart/model/model.safetensors",
    "dapo/report/assets/main.js",
    "dapo/report/phrases.toml",
    "dapo/models/kernels/host.c",
    "dapo/models/kernels/attention.c",
    "dapo/models/kernels/decode.c",
    "dapo/models/kernels/exponential.h",
    "dapo/models/kernels/layer.h",
    "dapo/models/kernels/product.h",
)
WANTED_IN_SDIST = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "tests/conftest.py",
    "mkdocs.yml",
)
UNWANTED = (".carry", "runs/", ".venv", "__pycache__", ".git/", ".pytest_cache", ".mypy_cache", ".hypothesis", "site/")


def names_in(package: Path) -> list[str]:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return wheel.namelist()
    with tarfile.open(package) as sdist:
        return [name.partition("/")[2] for name in sdist.getnames()]


def complaints(package: Path, wanted: tuple[str, ...]) -> list[str]:
    names = names_in(package)
    missing = [f"{package.name}: {name} is missing" for name in wanted if name not in names]
    unwanted = [f"{package.name}: {name} does not belong there" for name in names if is_unwanted(name)]
    return missing + unwanted


def is_unwanted(name: str) -> bool:
    return any(name.startswith(part) or f"/{part}" in f"/{name}" for part in UNWANTED)


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; its `dapo` command."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel], Path.cwd())
    own = run([python, "-c", "import site; print(site.getsitepackages()[0])"], Path.cwd()).strip()
    # A plain path, not addsitedir: .pth files of that environment, an editable install's among them, are not read.
    (Path(own) / "project.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin" / "dapo"


def run(command: list[object], folder: Path) -> str:
    start = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    print(f"{time.monotonic() - start:5.1f} s  {Path(str(command[0])).name} {' '.join(map(str, command[1:]))[:90]}")
    return done.stdout


def main(dist: Path) -> None:
    (wheel,), (sdist,) = list(dist.glob("*.whl")), list(dist.glob("*.tar.gz"))
    found = complaints(wheel, WANTED_IN_WHEEL) + complaints(sdist, WANTED_IN_SDIST)
    if found:
        sys.exit("\n".join(found))
    print(f"{wheel.name}: {len(names_in(wheel))} files; {sdist.name}: {len(names_in(sdist))} files")
    with tempfile.TemporaryDirectory() as place:
        elsewhere = Path(place) / "elsewhere"
        elsewhere.mkdir()
        dapo = install(wheel.resolve(), Path(place) / "new")
        where = run([dapo.with_name("python"), "-c", "import dapo; print(dapo.__file__, dapo.__version__)"], elsewhere)
        assert str(Path(place).resolve()) in str(Path(where.split()[0]).resolve()), f"not the wheel: {where}"
        assert f"dapo {where.split()[1]}" in run([dapo, "--version"], elsewhere)
        assert where.split()[1] in wheel.name, f"{wheel.name} says another version than the code: {where}"
        assert "32 prompts x 8 responses" in run([dapo, "explain", "quickstart"], elsewhere)
        tiny = [
            "sampling.prompts_per_step=4",
            "train.steps=2",
            "train.updates_per_step=1",
            "eval.every_steps=2",
            "eval.k=1",
        ]
        sets = [part for key in tiny for part in ("--set", key)]
        shown = run([dapo, "quickstart", "--device", "cpu", "--out", "runs/first", *sets], elsewhere)
        assert "avg@1 on held-out problems" in shown, shown
        assert (elsewhere / "runs" / "first" / "report.html").is_file()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
