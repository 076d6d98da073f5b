"""Tests that wait, have a deadline or start processes, which a slow machine could fail.

`tests/waiting_tests.txt` lists them, a label of Bazel or a path of a Python file a line. Run by
itself, this program writes the list from the tests' sources. tests/tidy checks the list.
"""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/waiting_tests.txt"

WAITS = re.compile(
    r"\b(SleepFor|sleep_for|sleep|WaitFor|WaitUntil|wait_for|wait_until|AwaitWithTimeout|Seconds|"
    r"Milliseconds|deadline|timeout|timeout_s|ServerProcess|TestServer|server_binary|fork|Shell|"
    r"posix_spawn|subprocess|std::thread|threading)\b")
RULE = re.compile(r'^(?:cc|mla)_test\(\n(.*?)^\)', re.M | re.S)


def waiting():
    """The lines that the list should have, from the sources of the tests."""
    found = set()
    files = subprocess.run(["git", "ls-files", "*BUILD.bazel", "*.py"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.split()
    for path in map(pathlib.PurePosixPath, files):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix == ".py":
            if path.name.startswith("test_") and WAITS.search(text):
                found.add(str(path))
            continue
        for rule in RULE.finditer(text):
            name = re.search(r'name = "([^"]+)"', rule[1])[1]
            sources = re.search(r"srcs = \[(.*?)\]", rule[1], re.S)
            for source in re.findall(r'"([^":]+\.cc)"', sources[1] if sources else ""):
                if WAITS.search((ROOT / path.parent / source).read_text(encoding="utf-8")):
                    found.add(f"//{path.parent}:{name}")
    return sorted(found)


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in waiting()), encoding="utf-8")
