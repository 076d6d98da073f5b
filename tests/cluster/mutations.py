"""Faults that are planted into the cluster's client, each of which the tests must find.

    mutations.py [--only NAME] [--every N]

Each is a text of a module and what takes its place. The simulation must find it, with faults or by
its measures, else the tests on the service in memory (client/python/tests/cluster).
"""

import argparse
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "client" / "python"
TESTS = PACKAGE / "tests" / "cluster"
RUN_S = 600  # of one command: beyond it a fault counts as found
NO_FAULT = "class ClusterStep(Step):"  # a text of step.py
# Name, module of mla_client.cluster, text, what takes its place.
MUTATIONS = [
    ("all_members_drain_unseen", "client", "if not one.draining]", "if True]"),
    ("failed_servers_are_asked_on", "owners", "self._until = self._now() + min(",
     "self._until = self._now() - min("),
    ("restarted_server_kept", "owners", "        if gone:\n            self.drop()", ""),
    ("last_owner_forgotten", "placement",
     "    add(last or (home if home in with_room else \"\"))\n", "    add(home)\n"),
    ("full_servers_get_more", "placement", "    with_room = bounded(addresses, fills)\n",
     "    with_room = list(addresses)\n"),
    ("steps_are_not_divided_again", "step",
     "            self._abort_others()\n            self._divide()\n", "            break\n"),
    ("conversations_not_remembered", "client",
     "                self._marks.remember(", "                (lambda *_: None)("),
    ("five_candidates", "placement", "return chosen[:MOST_CANDIDATES]",
     "return [*chosen, *rest][:6]"),
    ("rows_that_are_there_count_for_nothing", "placement", "max(0, rows - probe.rows)", "rows"),
    ("fill_counts_for_nothing", "placement", "probe.fill ** 2 * costs.full_s", "0.0"),
    ("cached_rows_are_no_fill", "../types",
     "fill_of(self.bytes_free - self.bytes_cached, self.bytes_total)",
     "fill_of(self.bytes_free, self.bytes_total)"),
    ("draining_server_possible", "placement", "probe is None or probe.draining or",
     "probe is None or"),
    ("server_without_room_possible", "placement", "or probe.bytes_free < bytes_wanted", ""),
    ("dearest_first", "placement", "sorted(choices, key=lambda choice: choice.cost_s)",
     "sorted(choices, key=lambda choice: -choice.cost_s)"),
    ("subset_of_nobody", "placement", "return order[:limit] if limit > 0 else order",
     "return order"),
    ("every_worker_has_one_subset", "placement",
     "hashlib.blake2b(worker.encode(), digest_size=16).digest(), addresses)",
     "hashlib.blake2b(b'', digest_size=16).digest(), addresses)"),
    ("key_without_the_model", "placement", "for text in (model.encode(), prefix.salt.encode()):",
     "for text in (prefix.salt.encode(),):"),
    ("no_server_behind_the_asked_ones", "client",
     "        for some in (addresses, everyone):", "        for some in ():"),
    ("no_spill", "client", "                error = failure\n                continue",
     "                raise failure"),
    ("rows_of_failed_owners_look_right", "step", "array[indices] = _nothing(array)",
     "array[indices] = 0"),
    ("rows_in_another_order", "step", "                    array[indices] = _as(array, values)",
     "                    array[indices] = _as(array, values)[::-1]"),
    ("rows_of_the_neighbour", "step", "first, last = np.searchsorted(self.rows, [begin, "
     "begin + count])", "first, last = np.searchsorted(self.rows, [begin + 1, begin + count])"),
    ("failure_of_one_fails_none", "step", "            self.failed[self.sequences[place]] = error",
     "            pass"),
    ("failed_owner_commits", "step", "            if part.error is not None:\n"
     "                continue\n            kept", "            kept"),
    ("sub_steps_stay_open", "step", "            part.step.service._give_up(part.step)",
     "            pass"),
    ("begin_leaves_others_open", "step", "            self._abort_others()\n"
     "            self.open = False", "            self.open = False"),
    ("recovered_sequence_keeps_its_length", "recovery",
     "sequence.epoch, sequence.length = other.epoch, other.length",
     "sequence.epoch = other.epoch"),
    ("recovered_sequence_keeps_its_id", "recovery",
     "sequence.model, sequence.id = other.model, other.id", "sequence.model = other.model"),
    ("tombstones_not_read", "recovery", "return _take(cluster, sequence, address) if address "
     "else \"\"", "return \"\""),
    ("dead_server_taken_for_alive", "recovery",
     "    except errors.MlaError as error:\n        owner.failed(error)\n        return \"\"\n"
     "    return cluster.address_of(sequence)",
     "    except errors.MlaError as error:\n        pass\n    return owner.address"),
    ("members_forgotten_at_once", "members", "KEEP_S = 600.0", "KEEP_S = 20.0"),
    ("members_never_read_again", "members", "self._at, self._error = self._now(), None",
     "self._at, self._error = self._now(), None\n            self._read = lambda: answer"),
    ("moves_to_another_connection", "moves", "return self._cluster.owners.at(peer).client",
     "return self._cluster.owners.at(self._cluster.home).client"),
    ("marks_of_all_models", "owners", "for text in (model_id.encode(), prefix.salt.encode()):",
     "for text in (prefix.salt.encode(),):"),
]


def planted(folder, module, old, new):
    """A copy of the package with the fault."""
    shutil.copytree(PACKAGE / "mla_client", folder / "mla_client",
                    ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "mla_client" / "cluster" / f"{module}.py"
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{module}: {old!r} is there {text.count(old)} times, must be once")
    path.write_text(text.replace(old, new))


def commands():
    """Yields the commands that must find a fault, the cheapest first."""
    simulate = [sys.executable, str(HERE / "simulate.py")]
    small = ["--servers=12", "--workers=20", "--ops=8000"]
    yield "faults", [*simulate, *small, "--faults=0.08", "--seed=2"]
    yield "tests", [sys.executable, "-m", "unittest", "discover", "-s", str(TESTS)]
    yield "measures", [*simulate, "--servers=24", "--workers=48", "--ops=48000", "--faults=0"]
    for seed in range(3, 9):
        yield "faults", [*simulate, *small, "--faults=0.08", f"--seed={seed}"]


def found_by(module, old, new, most=None):
    """Returns the name of the command that finds a fault, or "" if none does. `most`: only so many
    commands."""
    with tempfile.TemporaryDirectory(prefix="mla-mutant-") as folder:
        planted(pathlib.Path(folder), module, old, new)
        environment = {**os.environ, "CLIENT_UNDER_TEST": folder,
                       "PYTHONPATH": os.pathsep.join([folder, str(TESTS)])}
        for name, command in itertools.islice(commands(), most):
            done = subprocess.run(command, env=environment, capture_output=True, timeout=RUN_S,
                                  check=False)
            if done.returncode != 0:
                return name
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that hold this text")
    parser.add_argument("--every", type=int, default=1, help="one in so many")
    args = parser.parse_args()
    missed = 0
    # A command that always fails would find everything.
    found = found_by("step", NO_FAULT, NO_FAULT, most=2)
    if found:
        raise SystemExit(f"without any fault, {found} fail")
    for name, module, old, new in MUTATIONS[::args.every]:
        if args.only not in name:
            continue
        found = found_by(module, old, new)
        missed += not found
        print(f"{name}: {'found by ' + found if found else 'NOT FOUND'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
