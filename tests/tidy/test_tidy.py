"""Rules of the tree that a compiler does not check. A failure names file and line.

To change a rule, change it here and in CONTRIBUTING.md.
"""

import ast
import fnmatch
import pathlib
import re
import subprocess
import sys
import unittest

import cpp_text

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import waiting_tests  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_CLASS_LINES = 1000  # for a source that defines the functions of one class
MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100
CPP = (".cc", ".h", ".hip")
# The class of a function that is defined outside of it.
CLASS_OF_FUNCTION = re.compile(r"^(?! )(?:[\w:<>,&* ]*[ *&])?([A-Z]\w+)::~?\w+\(", re.M)
# Main loops of kernels are one function each, to save registers.
LONG_FUNCTIONS_ALLOWED = re.compile(r"kernels/(cpu/[^/]+|hip/(gfx|sm)\w+)/")

# Folder -> includes that it must not contain. The first matching row decides.
FORBIDDEN_INCLUDES = [
    ("base/", r"grpc|google/protobuf|mla/v1/|proto/|kernels/|scheduler/|server/|client/|tests/"),
    ("kernels/", r"grpc|google/protobuf|spdlog|mla/v1/|proto/|scheduler/|server/|client/|tests/"),
    ("scheduler/kvcache/", r"grpc|google/protobuf|spdlog|mla/v1/|proto/|server/|client/|tests/"
                           r"|scheduler/(?!kvcache/|limits\.h|clock\.h)"),
    ("scheduler/", r"grpc|google/protobuf|spdlog|mla/v1/|proto/|server/|client/|tests/"),
    ("server/", r"client/|tests/"),
    ("client/", r"server/|scheduler/|kernels/|tests/"),
    ("proto/", r"server/|scheduler/|kernels/|client/|tests/|relay/"),
    ("relay/", r"server/|scheduler/|kernels/|tests/|grpc|google/protobuf|mla/v1/"),
]

# Folders that depend on their sub-folders: no file below them includes a header that lies in them.
PARENTS = ["client/mlactl/"]

BANNED_CALLS = re.compile(
    r"(?<![\w:.>])(?:std::|::)?(strcpy|strcat|sprintf|vsprintf|gets|rand|srand|strtok|alloca)\s*\(")
# Clang's analysis does not know these; base/mutex.h wraps them.
RAW_LOCKS = re.compile(r"std::(\w*mutex|lock_guard|unique_lock|scoped_lock|shared_lock"
                       r"|condition_variable\w*)\b")
RAW_LOCKS_ALLOWED = (
    "base/mutex.h",
    "kernels/hip/emulator/block/block.cc",  # compiled without Abseil, as device code is
)
# A flag of opt with an effect in optimised code only.
NOT_FOR_TESTS = {"-D_FORTIFY_SOURCE=2"}
SYSTEM_CALL = re.compile(r"(?<![\w:.>])(?:std::|::)?system\s*\(")


def tracked(*suffixes):
    """Files of the tree as git knows them, new ones included, ending in one of the suffixes."""
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                             check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(path for path in listing
                  if path.endswith(suffixes or ("",)) and (ROOT / path).is_file())


def read(path):
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def is_test(path):
    return path.startswith("tests/") or "_test." in path or "/tests/" in path


def is_one_class(path):
    """Returns true if a C++ source defines functions of exactly one class."""
    classes = CLASS_OF_FUNCTION.findall(read(path))
    return path.endswith(".cc") and not path.endswith("_test.cc") and len(set(classes)) == 1


class TidyTest(unittest.TestCase):
    """One rule a test."""

    def report(self, faults):
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_the_tree_is_seen(self):
        self.assertIn("kernels/attention_backend.h", tracked(".h"))
        self.assertGreater(len(tracked(*CPP)), 10)

    def test_files_are_short(self):
        faults = []
        for path in tracked(*CPP, ".py"):
            count = read(path).count("\n")
            most = MAX_CLASS_LINES if is_one_class(path) else MAX_FILE_LINES
            if count > most:
                faults.append(f"{path}: {count} lines, at most {most}")
        self.report(faults)

    def test_functions_are_short(self):
        faults = []
        for path in tracked(*CPP):
            if LONG_FUNCTIONS_ALLOWED.match(path):
                continue
            for first, last, head in cpp_text.functions(read(path)):
                if last - first + 1 > MAX_FUNCTION_LINES:
                    faults.append(f"{path}:{first}: {last - first + 1} lines: {head}")
        for path in tracked(".py"):
            for node in ast.walk(ast.parse(read(path))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    length = node.end_lineno - node.lineno + 1
                    if length > MAX_FUNCTION_LINES:
                        faults.append(f"{path}:{node.lineno}: {length} lines: {node.name}")
        self.report(faults)

    def test_lines_fit_100_columns(self):
        files = tracked(*CPP, ".py", ".proto", ".bazel") + ["dev", ".bazelrc", ".ci/run"]
        self.report([f"{path}:{number}: {len(line)} columns"
                     for path in files
                     for number, line in enumerate(read(path).split("\n"), 1)
                     if len(line) > MAX_COLUMNS and "http" not in line])

    def test_cpp_is_formatted(self):
        files = tracked(*CPP)
        result = subprocess.run(["clang-format-16", "--dry-run", "-Werror", *files], cwd=ROOT,
                                capture_output=True, text=True, check=False)
        places = [line for line in result.stderr.splitlines() if "error:" in line]
        self.assertEqual(result.returncode, 0, "run ./dev fmt\n" + "\n".join(places[:40]))

    def test_every_source_is_in_a_build_file(self):
        faults = []
        for path in tracked(*CPP):
            folder = pathlib.PurePosixPath(path).parent
            while not (ROOT / folder / "BUILD.bazel").exists() and str(folder) != ".":
                folder = folder.parent
            build = ROOT / folder / "BUILD.bazel"
            text = build.read_text() if build.exists() else ""
            name = str(pathlib.PurePosixPath(path).relative_to(folder))
            patterns = [pattern.replace("**/", "*")
                        for pattern in re.findall(r'"([^"\n]+)"', text)]
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                faults.append(f"{path}: not named in {build.relative_to(ROOT)}")
        self.report(faults)

    def test_header_guards_follow_the_path(self):
        faults = []
        for path in tracked(".h"):
            guard = "MLA_" + re.sub(r"[^A-Za-z0-9]", "_", path).upper() + "_"
            text = read(path)
            if f"#ifndef {guard}\n#define {guard}\n" not in text:
                faults.append(f"{path}: no guard {guard}")
        self.report(faults)

    def test_includes_run_one_way(self):
        faults = []
        for path in tracked(*CPP):
            forbidden = next((rule for folder, rule in FORBIDDEN_INCLUDES
                              if path.startswith(folder)), None)
            if forbidden is None:
                continue
            for number, line in enumerate(read(path).split("\n"), 1):
                include = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
                if include and re.match(forbidden, include.group(1)):
                    faults.append(f"{path}:{number}: must not include {include.group(1)}")
        self.report(faults)

    def test_subfolders_include_nothing_of_their_parent(self):
        faults = []
        for parent in PARENTS:
            own = re.compile(rf'^\s*#\s*include\s*"({parent}[^/"]+)"', re.M)
            files = [path for path in tracked(*CPP) if path.startswith(parent)]
            self.assertTrue(files, f"{parent}: no sources")
            faults += [f"{path}: must not include {found.group(1)}"
                       for path in files if "/" in path[len(parent):]
                       for found in own.finditer(read(path))]
        self.report(faults)

    def test_build_files_name_no_upper_layer(self):
        """Checks the same direction in BUILD files, where unused dependencies show too."""
        order = ["kernels", "scheduler/kvcache", "scheduler", "server"]
        faults = []
        for path in tracked("BUILD.bazel"):
            layer = next((layer for layer in order if path.startswith(layer + "/")), None)
            if layer is None:
                continue
            for upper in order[order.index(layer) + 1:] + ["client"]:
                # The narrower folder is the lower layer: //scheduler/kvcache is not //scheduler.
                pattern = rf'^\s*"//{upper}[:"]' if upper == "scheduler" else rf'^\s*"//{upper}[:/]'
                for found in re.finditer(pattern + r'[^"]*"', read(path), re.M):
                    label = found.group(0).strip()
                    if "__pkg__" in label or "__subpackages__" in label:
                        continue  # who may depend on it
                    if layer != "scheduler/kvcache" or not re.search(r":(limits|clock)", label):
                        faults.append(f"{path}: depends on {label}")
        self.report(faults)

    def test_no_leftover_markers(self):
        marker = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) +
                            r")\b")
        faults = []
        for path in tracked():
            for number, line in enumerate(read(path).split("\n"), 1):
                if marker.search(line):
                    faults.append(f"{path}:{number}: {line.strip()[:80]}")
        self.report(faults)

    def test_no_banned_calls(self):
        faults = []
        for path in tracked(*CPP):
            for number, line in enumerate(cpp_text.without_comments(read(path)).split("\n"), 1):
                if BANNED_CALLS.search(line) or (SYSTEM_CALL.search(line) and not is_test(path)):
                    faults.append(f"{path}:{number}: {line.strip()[:80]}")
        self.report(faults)

    def test_locks_are_known_to_the_analysis(self):
        self.report([f"{path}: {found.group(0)}: use base/mutex.h" for path in tracked(*CPP)
                     if not is_test(path) and path not in RAW_LOCKS_ALLOWED
                     for found in RAW_LOCKS.finditer(read(path))])

    def test_one_place_says_what_a_longer_run_is(self):
        self.report([f"{path}: use base/testing/long_runs.h" for path in tracked(*CPP)
                     if not path.startswith("base/testing/") and '"MLA_TEST_LONG"' in read(path)])

    def test_no_test_is_switched_off(self):
        """A test is skipped only at run time, with a reason, if the machine lacks something."""
        pattern = re.compile(r"\bDISABLED_\w|\bGTEST_SKIP\(\)(?! << \")|"
                             r"\bunittest\.(skip|expectedFailure)")
        self.report([f"{path}:{number}: {line.strip()[:80]}"
                     for path in tracked(*CPP, ".py") if path != "tests/tidy/test_tidy.py"
                     for number, line in enumerate(read(path).split("\n"), 1)
                     if pattern.search(line)])

    def test_waiting_tests_are_listed(self):
        listed = waiting_tests.LIST.read_text(encoding="utf-8").split()
        self.assertEqual(listed, waiting_tests.waiting(), "run tests/waiting_tests.py")

    def test_no_path_of_one_machine(self):
        pattern = re.compile(r"(?<![\w.$}])/(root|home/\w+|work)/")
        self.report([f"{path}:{number}: {line.strip()[:80]}"
                     for path in tracked() if path != "tests/tidy/test_tidy.py"
                     for number, line in enumerate(read(path).split("\n"), 1)
                     if pattern.search(line)])


class FlagsTest(unittest.TestCase):
    """Libraries are compiled by the flags of .bazelrc, sources of tests by a list of their own.
    Inline functions of both would differ if only one of them got, for example, a macro."""

    def test_tests_have_the_flags_of_opt_that_change_what_a_program_does(self):
        lines = re.findall(r"^build(?::opt)? (.*)$", (ROOT / ".bazelrc").read_text(), re.M)
        options = re.findall(r"--c(?:xx)?opt=(-(?:std=|D|f)\S+)", " ".join(lines))
        self.assertIn("-std=c++20", options)
        text = (ROOT / "third_party/precompiled/objects.bzl").read_text()
        flags = ast.literal_eval(re.search(r"^CLANG_FLAGS = (\[.*?\n\])", text, re.M | re.S)[1])
        self.assertEqual(set(options) - NOT_FOR_TESTS - set(flags), set())


if __name__ == "__main__":
    unittest.main()
