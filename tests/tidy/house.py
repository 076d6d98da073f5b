"""Figures of the tree's structure and English, at any commit.

    tests/tidy/house.py [COMMIT]     without it, the files of the work tree

Prints, for kernels, scheduler, server and client: rooms (folders with code), arrows (folders that a
folder includes), arrows up (against the floors of test_rooms.py), floors (the longest way down) and
cycles. For the whole tree: folders, files, folders over the bound of units, long files and those of
them that are not one class, classes whose functions lie in two or more sources, types a thousand
lines, host files on the way of an Attend (WAY; of an older commit those that it had already),
marked sentences of comments by folder (test_markers.py), and commits without a body.
"""

import argparse
import collections
import pathlib
import re
import subprocess

from test_markers import shares
from test_rooms import FLOORS, MAX_UNITS, UNIT
from test_tidy import CLASS_OF_FUNCTION

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = (".cc", ".h", ".hip", ".inc")
PACKAGES = ("kernels", "scheduler", "server", "client")
LONG, LONG_CLASS = 500, 1000
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.M)
TYPE = re.compile(r"^\s*(?:struct|class|enum class|enum)\s+\w+[^;]*\{", re.M)
OWN_CLASS = re.compile(r"^(?:class|struct) (\w+)[^;]*\{", re.M)  # one that only a source sees

# The host files that a decode Attend passes on its way, each with a function that it calls there.
# The Attend comes over gRPC with its tensors inline, in the absorbed form and with new KV rows, to
# a server on a GPU; the thread that read it launches it, and the answer goes back to the stream. A
# file is on the way if one of its functions does work for such a request or its launch. Files that
# only define values and types are left out. test_architecture.py checks that the functions exist.
WAY = {
    # The message becomes a request.
    "server/grpc/completion_poller.cc": "HandOver",
    "server/grpc/stream_call.cc": "StartRead",
    "server/attend/attend_stream.cc": "OnReadDone",
    "proto/wire/attend_codec.cc": "ScanAttend",
    "server/attend/attend_message.cc": "Take",
    "server/attend/attend_request_builder.cc": "PrepareAttend",
    "server/grpc/request_validator.cc": "ParseAttend",
    "scheduler/model.cc": "CheckAttend",
    "proto/wire/attend_layout.h": "AttendLayout",
    "server/memory/staging_pool.cc": "Take",
    "proto/wire/thread_team.cc": "Gather",
    # The engine takes it.
    "scheduler/engine/engine.cc": "Submit",
    "scheduler/engine/engine_impl.h": "RunInline",
    "scheduler/steps/answers.cc": "Admit",
    "scheduler/tenant_table.cc": "TryTake",
    "scheduler/steps/step_machine.cc": "AcceptAttend",
    "scheduler/tables/step_table.cc": "CheckAttend",
    # It waits and is chosen.
    "scheduler/steps/launch_queue.cc": "Add",
    "scheduler/batching/waiting_requests.cc": "Add",
    "scheduler/batching/head_slice_table.cc": "Join",
    "scheduler/steps/launches.cc": "Start",
    "scheduler/batching/batch_policy.cc": "Choose",
    "scheduler/batching/batch.cc": "OrderByStage",
    "scheduler/batching/launch_cost.cc": "Nanos",
    "scheduler/kvcache/pool/page_work.cc": "TakeLayer",
    "scheduler/kvcache/kv_cache.cc": "copied_groups",
    # Its launch is put together and planned.
    "scheduler/launching/launcher.cc": "Assemble",
    "scheduler/launching/tensor_stager.cc": "Stage",
    "scheduler/launching/batch_launch.cc": "Clear",
    "scheduler/launching/record_builder.cc": "Build",
    "kernels/launch_layout.cc": "Input",
    "scheduler/planning/cache/plan_cache.cc": "Pin",
    "scheduler/planning/planner.cc": "Build",
    "scheduler/planning/plan_writer.h": "PlaceBalanced",
    # The backend records and submits it.
    "kernels/hip/hip_backend.cc": "Submit",
    "kernels/hip/runtime/call_watch.h": "Scope",
    "kernels/hip/launch/launch_builder.cc": "AddAttention",
    "kernels/hip/launch/stream_work.cc": "Take",
    "kernels/hip/launch/absorbed_work.cc": "Add",
    "kernels/hip/launch/combine.cc": "AddCombine",
    "kernels/hip/launch/gate_work.cc": "AddTimedSignals",
    "kernels/hip/launch/page_work.cc": "AddAppends",
    "kernels/hip/device_state/capabilities.cc": "CheckSupported",
    "kernels/hip/args/arch_traits.h": "ChooseAttend",
    "kernels/hip/slot/launch_slot.cc": "Submit",
    "kernels/hip/slot/launch_recording.cc": "Begin",
    "kernels/hip/slot/submitted_launch.cc": "Enqueue",
    "kernels/hip/slot/tensor_copies.cc": "Reaches",
    "kernels/hip/runtime/device_memory.cc": "Find",
    "kernels/hip/runtime/plan_store.cc": "Get",
    "kernels/hip/runtime/kernel_graphs.cc": "Learn",
    "kernels/hip/runtime/gpu_runtime.cc": "Check",
    # It is answered.
    "base/pauses.cc": "Nap",
    "scheduler/launching/result_check.cc": "CheckResults",
    "server/metrics/histograms.cc": "ObserveLaunch",
}


def git(*arguments):
    """Returns the output of git."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout


class Tree:
    """The code files of a commit, or of the work tree."""

    def __init__(self, commit=""):
        names = (git("ls-tree", "-r", "--name-only", commit) if commit else
                 git("ls-files")).split("\n")
        self.files = [name for name in names if name and not name.startswith("third_party/")]
        self.text = {}
        for name in self.files:
            if name.endswith(CODE) or name.endswith(".py"):
                self.text[name] = (git("show", f"{commit}:{name}") if commit else
                                   (ROOT / name).read_text(encoding="utf-8"))

    def code(self):
        """Names of C++ and device sources."""
        return [name for name in self.text if name.endswith(CODE)]


def folder(name):
    """The folder of a file."""
    return pathlib.PurePosixPath(name).parent.as_posix()


def arrows(tree, package):
    """{folder: folders that its sources include}, within a package and without tests."""
    edges = collections.defaultdict(set)
    for name in tree.code():
        if not name.startswith(package + "/") or "_test." in name:
            continue
        edges[folder(name)]  # pylint: disable=pointless-statement
        for found in INCLUDE.findall(tree.text[name]):
            if found in tree.text and found.startswith(package + "/"):
                if folder(found) != folder(name):
                    edges[folder(name)].add(folder(found))
    return edges


def cycles(edges):
    """Groups of folders that include each other."""
    reach = {start: set(after) for start, after in edges.items()}
    for middle in list(reach):
        for start in reach:
            if middle in reach[start]:
                reach[start] |= reach[middle]
    groups = {frozenset(other for other in reach if other in reach[one] and one in reach[other])
              for one in reach if one in reach[one]}
    return sorted(map(sorted, groups))


def depth(edges):
    """Folders on the longest way down."""
    known = {}

    def measure(one, above):
        if one in above:
            return 0
        if one not in known:
            known[one] = 1 + max((measure(other, above | {one}) for other in edges.get(one, ())),
                                 default=0)
        return known[one]
    return max((measure(one, frozenset()) for one in edges), default=0)


def arrows_up(edges, package):
    """Arrows that lead to a higher floor, or to a folder without one."""
    floors = FLOORS.get(package)
    if floors is None:
        return 0
    place = {(f"{package}/{room}" if room else package): index
             for index, room in enumerate(floors)}
    return sum(place.get(other, len(floors)) > place[one]
               for one, others in edges.items() if one in place for other in others)


def classes_cut(tree):
    """{class: sources} of those with functions in two or more sources."""
    found = collections.defaultdict(set)
    for name in tree.code():
        if name.endswith(".cc") and not name.endswith("_test.cc"):
            own = set(OWN_CLASS.findall(tree.text[name]))
            for match in set(CLASS_OF_FUNCTION.findall(tree.text[name])) - own:
                found[(name.split("/")[0], match)].add(name)
    return {key[1]: sorted(names) for key, names in found.items() if len(names) > 1}


def full_folders(tree):
    """{folder: units} of folders over the bound."""
    units = collections.defaultdict(set)
    for name in tree.files:
        base = name.rsplit("/", 1)[-1]
        if UNIT.search(base):
            units[folder(name)].add(UNIT.sub("", base))
    return {one: len(names) for one, names in units.items() if len(names) > MAX_UNITS}


def report(tree, commit):
    """The lines that are printed."""
    for package in PACKAGES:
        edges = arrows(tree, package)
        yield (f"{package}: {len(edges)} rooms, {sum(map(len, edges.values()))} arrows, "
               f"{arrows_up(edges, package)} up, {depth(edges)} floors, "
               f"{len(cycles(edges))} cycles")
    folders = {folder(name) for name in tree.files}
    yield f"folders {len(folders)}, files {len(tree.files)}"
    full = full_folders(tree)
    yield f"folders over {MAX_UNITS} units: {len(full)} {dict(sorted(full.items()))}"
    long = {name: count for name in tree.code()
            if (count := tree.text[name].count("\n")) > LONG}
    mixed = [name for name in long
             if len(set(CLASS_OF_FUNCTION.findall(tree.text[name]))) != 1]
    yield (f"files over {LONG} lines: {len(long)}, of these not one class: {len(mixed)} "
           f"{sorted(mixed)}, over {LONG_CLASS}: "
           f"{sum(count > LONG_CLASS for count in long.values())}")
    cut = classes_cut(tree)
    yield f"classes in two or more sources: {len(cut)} {sorted(cut)}"
    product = [name for name in tree.code()
               if not name.startswith("tests/") and not name.endswith("_test.cc")]
    lines = sum(tree.text[name].count("\n") for name in product)
    types = sum(len(TYPE.findall(tree.text[name])) for name in product)
    yield f"types {types} in {lines} lines of the product: {1000 * types / lines:.1f} a thousand"
    way = [name for name in WAY if name in tree.text]
    yield (f"host files on the way of an Attend: {len(way)} of {len(WAY)}, "
           f"{sum(tree.text[name].count(chr(10)) for name in way)} lines")
    marks = shares({name: tree.text[name] for name in tree.code()})
    yield "marked sentences: " + ", ".join(f"{top} {100 * marked / total:.1f} % of {total}"
                                           for top, (marked, total) in sorted(marks.items()))
    bodies = git("log", "--no-merges", "--format=%x01%b", commit or "HEAD").split("\x01")[1:]
    yield f"commits {len(bodies)}, without a body {sum(not body.strip() for body in bodies)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="")
    commit = parser.parse_args().commit
    for line in report(Tree(commit), commit):
        print(line)


if __name__ == "__main__":
    main()
