"""Runs the Python tests (unittest) and writes one JUnit record per case.

Test programs are the files `test_*.py` below FOLDERS; nothing needs registering. With --filter only
the cases whose name contains the text run. Each file runs in its own process, --jobs at a time;
its output is shown when it ends. Constants of a file say how it is run:

  ENVIRONMENT  an engine's name, as "transformers": the file is run by the interpreter of that
               engine's environment (engines/environments.py), with the newest release. With
               --engines only such files run, with every release
  GATE         False: only --engines runs the file
  WEIGHT       how many jobs the file counts as, because it takes more memory and processors than
               others; files of engines count as 2
  RUN_SECONDS  about how long the file runs, if that is long: the longest files begin first
  INPUTS       paths that the file reads: with --skip-unchanged it is not run again while they are
               as they were when all of its cases passed (runner/unchanged.py)
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests/engines"), str(ROOT / "tests/runner")]

# pylint: disable=wrong-import-position
import environments
import unchanged

FOLDERS = ["client/python/tests", "client/demo", "client/demo/sharing", "client/demo/trained",
           "client/demo/v32", "client/demo/v4", "tests"]
MOST_JOBS = 16  # programs at a time; each may start servers of its own
# Products of small matrices are faster with one thread: another one spins for a while after each.
# The server is not linked with OpenBLAS.
THREADS = {"OPENBLAS_NUM_THREADS": "1"}
ENGINE_WEIGHT = 2  # an engine's libraries alone take a gigabyte and use every processor


class RecordingResult(unittest.TextTestResult):
    """Text on the terminal, and a record of every case for the file."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.records = {}
        self.started = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()
        self.records[test.id()] = [None, "", 0.0]

    def stopTest(self, test):
        self.records[test.id()][2] = time.monotonic() - self.started
        super().stopTest(test)

    def _fail(self, test, kind, err):
        # If a class or module cannot be set up, none of its cases starts, so it counts as one case.
        record = self.records.setdefault(test.id(), [None, "", 0.0])
        record[0], record[1] = kind, record[1] + self._exc_info_to_string(err, test)

    def addError(self, test, err):
        super().addError(test, err)
        self._fail(test, "error", err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._fail(test, "failure", err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._fail(test, "failure", err)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.records.setdefault(test.id(), [None, "", 0.0])[:2] = ["skipped", reason]

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.records[test.id()][:2] = ["failure", "unexpected success"]


def write_xml(path, records, seconds, kept=()):
    """Writes the records as a JUnit file, with the processor time of each run of a file. `kept`
    names those that did not run because nothing had changed, with how many cases each has."""
    suite = xml.etree.ElementTree.Element("testsuite", name="python", tests=str(len(records)))
    properties = xml.etree.ElementTree.SubElement(suite, "properties")
    for name, value in seconds.items():
        xml.etree.ElementTree.SubElement(properties, "property", name=f"processor_time:{name}",
                                         value=f"{value:.1f}")
    for name, cases in dict(kept).items():
        xml.etree.ElementTree.SubElement(properties, "property", name=f"unchanged:{name}",
                                         value=str(cases))
    for name, (kind, text, seconds) in records.items():
        owner, _, method = name.rpartition(".")
        case = xml.etree.ElementTree.SubElement(
            suite, "testcase", classname=owner, name=method, time=f"{seconds:.3f}")
        if kind:
            xml.etree.ElementTree.SubElement(case, kind).text = text
    path.parent.mkdir(parents=True, exist_ok=True)
    xml.etree.ElementTree.ElementTree(suite).write(path, encoding="utf-8")


def cases_of(suite):
    """Flattens a suite into its cases."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases_of(item)
        else:
            yield item


def path_for(path):
    """Folders in which the imports of a file's tests are found."""
    return [str(path.parent)] + [str(ROOT / name) for name in (
        "client/python", "client/python/tests", "client/demo", "tests/engines", ".")]


def run_file(path, text, results):
    """Runs the file's cases whose name contains `text` and writes their records to `results`."""
    inputs = constants_of(path).get("INPUTS")
    watch = None
    if inputs is not None:
        # Elsewhere than in the tree: relative paths of the tree could not be told from others.
        os.chdir(results.parent)
        watch = unchanged.Watch(path, inputs)
    sys.path[:0] = path_for(path)
    loaded = unittest.defaultTestLoader.loadTestsFromName(path.stem)
    suite = unittest.TestSuite(case for case in cases_of(loaded) if text in case.id())
    records = {}
    if suite.countTestCases() > 0:
        runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2,
                                         resultclass=RecordingResult)
        records = runner.run(suite).records
        outside = watch.outside() if watch else []
        if outside:
            wrong = f"{path.name} reads what its INPUTS do not name: {', '.join(outside)}"
            print(wrong)
            records[f"{path.stem}.inputs"] = ["error", wrong, 0.0]
    results.write_text(json.dumps(records))


def constants_of(path):
    """The literal constants at the top of a file: {name: value}."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                pass  # computed
    return found


def runs_of(path, engines):
    """The environments in which a file is run; "" is this program's interpreter."""
    constants = constants_of(path)
    engine = constants.get("ENVIRONMENT")
    if engine is None:
        return [] if engines else [""]
    if engine not in environments.RELEASES:
        raise SystemExit(f"{path}: ENVIRONMENT is {engine!r}, must be one of "
                         f"{', '.join(environments.RELEASES)}")
    if engines:
        return [f"{engine}-{release}" for release in environments.RELEASES[engine]]
    return [environments.newest(engine)] if constants.get("GATE", True) else []


@dataclasses.dataclass
class Run:
    """One file of tests in one environment."""

    path: pathlib.Path
    environment: str  # "" is this program's interpreter
    weight: int = 1
    seconds: float = 0.0  # about how long it takes, as the file says
    inputs: tuple | None = None

    @property
    def name(self):
        """Its name in results: the path, after the environment if it has one."""
        path = (self.path.relative_to(ROOT) if ROOT in self.path.parents else self.path)
        return f"{self.environment}:{path}" if self.environment else str(path)

    def key(self):
        """A hash of all that it depends on; None: it is always run."""
        if self.inputs is None:
            return None
        # pylint: disable=protected-access
        packages = environments._folder(self.environment).name if self.environment else ""
        return unchanged.key_of(self.path, self.inputs, packages)


def runs(files, engines, only=""):
    """All runs of these files, the longest first."""
    found = []
    for path in files:
        constants = constants_of(path)
        for name in runs_of(path, engines):
            if only in ("", name):
                weight = constants.get("WEIGHT", ENGINE_WEIGHT if name else 1)
                found.append(Run(path, name, weight, constants.get("RUN_SECONDS", 0.0),
                                 constants.get("INPUTS")))
    return sorted(found, key=lambda run: (-run.seconds, -run.weight, run.name))


def run_side_by_side(work, jobs, function):
    """Calls function(run) for all runs, in their order where there is room: weights of those that
    run at a time add up to at most `jobs`. Yields (run, result) as each ends."""
    waiting, running, free = list(work), {}, jobs
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            for run in list(waiting):
                taken = min(run.weight, jobs)
                if taken <= free:
                    free -= taken
                    waiting.remove(run)
                    running[pool.submit(function, run)] = run
            ended, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                run = running.pop(future)
                free += min(run.weight, jobs)
                yield run, future.result()


def run_and_time(command, environment):
    """The exit status of a command, what it printed, and the seconds of processor time that it and
    the processes it waited for took."""
    with tempfile.TemporaryFile() as printed:
        # pylint: disable=consider-using-with
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=printed,
                                   stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return process.returncode, text, usage.ru_utime + usage.ru_stime


def run_in_process(run, text, plugins):
    """The file's records, by case, what it printed and its processor time. A file that leaves no
    records is a failed case."""
    path, prefix = run.path, f"{run.name} "
    python, environment = sys.executable, THREADS | dict(os.environ)
    if run.environment:
        try:
            python = environments.make(run.environment)
        except environments.NotMade as error:
            return {f"{prefix}begins": ["error", ascii(str(error)), 0.0]}, str(error), 0.0
        # An engine imports thousands of modules in each of its processes, so what the first one
        # has compiled is kept, even where Python is told to keep nothing.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment |= {"PYTHONPATH": os.pathsep.join([plugins, *path_for(path)]),
                        "PYTHONPYCACHEPREFIX": str(python.parents[1] / "bytecode"),
                        "MLA_TEST_RELEASE": run.environment.partition("-")[2]}
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "records.json"
        status, printed, seconds = run_and_time(
            [python, __file__, "--file", path, "--filter", text, "--records", results],
            environment)
        if status == 0 and results.exists():
            records = {prefix + case.removeprefix(f"{path.stem}."): record
                       for case, record in json.loads(results.read_text()).items()}
            return records, printed, seconds
    last = ascii(printed[-4000:])  # XML cannot represent most control characters
    return {f"{prefix}ends": ["error", last, 0.0]}, printed, seconds


def run_all(work, jobs, text, skip_unchanged):
    """Runs all; returns the records of all cases, the processor time of each run by its name, and
    how many cases each run has that was left out because nothing had changed."""
    records, seconds, left_out = {}, {}, {}
    kept = unchanged.Kept()
    keys = {run.name: run.key() for run in work if not text}
    if skip_unchanged:
        for run in list(work):
            cases = kept.cases(run.name, keys.get(run.name))
            if cases is not None:
                work.remove(run)
                records |= cases
                left_out[run.name] = len(cases)
                print(f"{run.name}: {len(cases)} cases passed before (unchanged)")
    with tempfile.TemporaryDirectory() as plugins:
        environments.write_plugins(pathlib.Path(plugins))
        for run, (more, printed, took) in run_side_by_side(
                work, jobs, lambda run: run_in_process(run, text, plugins)):
            records |= more
            seconds[run.name] = took
            if more:
                print(printed, end="", flush=True)
            if text:  # a part of its cases: a failure counts for the whole file
                failed = any(kind in ("failure", "error") for kind, _, _ in more.values())
                if failed:
                    kept.put(run.name, None, more)
            elif run.inputs is not None:
                # An input that changed during the run may have been read before or after.
                key = keys[run.name]
                kept.put(run.name, key if key and run.key() == key else None, more)
    return records, seconds, left_out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xml", type=pathlib.Path)
    parser.add_argument("--filter", default="")
    parser.add_argument("--only", default="", help="only files whose path contains this text")
    # docs/internals/tests.md: programs wait for nearly half of their time.
    parser.add_argument("--jobs", type=int,
                        default=min(2 * len(os.sched_getaffinity(0)), MOST_JOBS))
    parser.add_argument("--list", type=pathlib.Path, help="only the files that this file names")
    parser.add_argument("--skip-unchanged", action="store_true",
                        help="count files as passed whose INPUTS are as when they last passed")
    parser.add_argument("--engines", action="store_true",
                        help="only files that run in environments of engines, with all releases")
    parser.add_argument("--environment", default="", help="only files that run in this environment")
    parser.add_argument("--file", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        run_file(args.file, args.filter, args.records)
        return 0
    engines = args.engines or bool(args.environment)
    files = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")
                    if args.only in str(path.relative_to(ROOT))})
    if args.list:
        named = set(args.list.read_text(encoding="utf-8").split())
        files = [path for path in files if str(path.relative_to(ROOT)) in named]
    work = runs(files, engines, args.environment)
    records, seconds, left_out = run_all(work, args.jobs, args.filter, args.skip_unchanged)
    if args.xml:
        write_xml(args.xml, records, seconds, left_out)
    failed = [name for name, (kind, _, _) in records.items() if kind not in (None, "skipped")]
    print(f"{len(records)} cases, {len(failed)} failed", *failed, sep="\n  ")
    return 0 if records and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
