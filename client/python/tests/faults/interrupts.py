"""Interrupts at chosen instructions: they do what a signal handler that raises does, at every place
where it may."""

import dis
import os
import secrets
import subprocess
import sys


def commit():
    """Returns the commit that is checked out here; "" if there is none."""
    try:
        return subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True,
                              text=True, cwd=os.path.dirname(os.path.abspath(__file__)),
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def seed_of_run(variables=os.environ, head=commit):
    """Returns MLA_TEST_SEED, or else a seed of the commit, so that each commit has its own. Outside
    of a repository every run has its own."""
    given, digits = variables.get("MLA_TEST_SEED"), head()[:8]
    return int(given) if given else int(digits, 16) if digits else secrets.randbelow(1 << 32)


class Interrupt(BaseException):
    """As KeyboardInterrupt, and never mistaken for one."""


class InterruptAt:
    """A `with` block in which an Interrupt is raised at the n-th place where CPython looks for
    signals: at the beginning of a function, when a loop goes on, and after a call. Places count in
    functions of files that `counts` takes."""

    def __init__(self, n, counts):
        self._left = n
        self._counts = counts
        self._ended_a_call = {}  # by frame: True if its last instruction was a call
        self.place = None        # place of the interrupt, once it was raised

    def __enter__(self):
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(None)

    def _enter_function(self, frame, event, arg):
        if not self._counts(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame, event, arg):
        if event == "return":
            self._ended_a_call.pop(frame, None)
        if event != "opcode":
            return self._look
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        looks = (self._ended_a_call.get(frame, False) or name == "RESUME"
                 or "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name)
        self._ended_a_call[frame] = name.startswith("CALL")
        if looks:
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self._ended_a_call.clear()  # the frames hold objects whose end the test expects
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise Interrupt(self.place)
        return self._look
