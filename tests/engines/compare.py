"""Compares what an engine says of a model with what the library says of it.

    python3 tests/engines/compare.py REFERENCE.json ENGINE.json [--bf16 REFERENCE_BF16.json]

In float32 log-probabilities differ by at most BOUND. In bf16 the bound is twice what the dtype
alone does. Generated tokens are equal up to the first near tie, where the library's two best are
closer than BOUND. The comparison must be able to fail: log-probabilities of the prompt one position
late differ by at least twice the bound.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any, Dict, List, Optional

BOUND = 0.05
Rows = List[Dict[str, Any]]  # as models.py writes them


@dataclasses.dataclass
class Comparison:
    """What was found."""

    bound: float
    prompt: float = 0.0     # the largest difference at a position of a prompt
    generated: float = 0.0  # the same of generated tokens, until the first that is another
    control: float = 0.0    # one position late
    tokens: int = 0         # that were compared
    ties: List[str] = dataclasses.field(default_factory=list)
    wrong: List[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if all rules hold."""
        return (not self.wrong and self.tokens > 0 and self.control >= 2 * self.bound
                and max(self.prompt, self.generated) <= self.bound)

    def __str__(self) -> str:
        return (f"{'ok' if self.ok else 'FAILED'}: prompt {self.prompt:.4f}, generated "
                f"{self.generated:.4f}, bound {self.bound:.3f}, one position late "
                f"{self.control:.2f}, {self.tokens} tokens"
                + "".join(f"; near tie, {tie}" for tie in self.ties)
                + "".join(f"; WRONG, {wrong}" for wrong in self.wrong))


def compare(want: Rows, got: Rows, bf16: Optional[Rows] = None, length: int = 0) -> Comparison:
    """`got` has the rows of `want` in their order. `length`: generated tokens a row that must be
    there; 0: as many as the library has."""
    found = Comparison(BOUND)
    if bf16 is not None:
        alone = compare(want, bf16)
        found.bound = 2 * max(alone.prompt, alone.generated)
    if len(want) != len(got):
        found.wrong.append(f"{len(got)} rows instead of {len(want)}")
    for number, (right, other) in enumerate(zip(want, got)):
        _compare_row(found, number, right, other, length or len(right["tokens"]))
    return found


def _compare_row(found: Comparison, number: int, want: Dict[str, Any], got: Dict[str, Any],
                 length: int) -> None:
    if len(want["prompt"]) != len(got["prompt"]) or len(got["tokens"]) < length:
        found.wrong.append(f"row {number} has {len(got['prompt'])} and {len(got['tokens'])} tokens")
        return
    found.prompt = max([found.prompt] + [abs(a - b) for a, b in zip(want["prompt"],
                                                                    got["prompt"])])
    found.control = max([found.control] + [abs(a - b) for a, b in zip(want["prompt"][1:],
                                                                      want["prompt"])])
    for step in range(length):
        tops, others = want["tops"][step], got["tops"][step]
        shared = [abs(tops[token] - others[token]) for token in tops if token in others]
        found.generated = max([found.generated] + shared)
        found.tokens += 1
        if not shared:
            found.wrong.append(f"row {number} at {step} has other candidates")
        if want["tokens"][step] != got["tokens"][step]:
            best, second, *_ = sorted(tops.values(), reverse=True)
            place = f"row {number} at {step}, gap {best - second:.4f}"
            (found.ties if best - second < found.bound else found.wrong).append(place)
            return


def main() -> int:
    files = [path for path in sys.argv[1:] if path != "--bf16"]
    rows = [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in files]
    found = compare(*rows)
    print(found)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
