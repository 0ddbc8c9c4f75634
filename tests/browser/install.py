"""Finds a Chromium for the browser tests, or gets one; prints its path ("bundled" for Playwright's own)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def installed() -> str | None:
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def playwright_has_one() -> bool:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return Path(playwright.chromium.executable_path).exists()


def run(*command: str) -> bool:
    print("+", *command, file=sys.stderr, flush=True)
    try:
        return subprocess.run(command, check=False, timeout=600, stdout=sys.stderr).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_or_get() -> str:
    if path := installed():
        return path
    if playwright_has_one():
        return "bundled"
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get"):  # first: Playwright's own download is out of reach behind many walls
        run(*sudo, "apt-get", "update", "-q")
        run(*sudo, "apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium")
    if installed() is None and run(sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"):
        return "bundled"
    path = installed()
    if path is None:
        sys.exit("no Chromium could be installed: install one and name it, CHROMIUM=/path make test-browser")
    return path


if __name__ == "__main__":
    print(find_or_get())
