"""The user's options for the server, and the salt of everything that rows depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

import mla_client
from mla_client import errors
from mla_client.serving.layers import check_projected_dtype

LEASE_MS = 60_000        # of sequences, which the client renews
MODEL_LEASE_MS = 600_000  # of a model that nothing names: an engine that was killed leaves it
AWAY_S = 20.0
BOUNDS = {"away_s": (0.0, 3600.0)}
MOST_PAGE_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one engine. `arguments` are passed to Client.connect."""

    targets: Tuple[str, ...]
    model_id: str
    prefix_cache: bool = True
    keep_model: bool = False  # leave the model registered when the engine ends
    projected: bool = False   # the server has W_UQ and W_O, too: PROJECTED
    projected_dtype: str = ""  # in which it holds them; "": as the checkpoint has them
    # A server that is away for so long fails requests; until then they wait or begin again.
    away_s: float = AWAY_S
    page_size: int = 0  # rows of a page, the least that prefixes share; 0: the server's default
    arguments: Dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], model_id: str, client_id: str) -> "Options":
        """Makes the options from a user's JSON: `target` (one or a list, tried in this order),
        `model_id`, `prefix_cache`, `keep_model`, `projected`, `projected_dtype`, `away_s`,
        `page_size`, and arguments of Client.connect."""
        rest = dict(given)
        target = rest.pop("target", None)
        targets = [target] if isinstance(target, str) else target
        if not isinstance(targets, (list, tuple)) or not targets or not all(
                isinstance(one, str) and one for one in targets):
            raise errors.InvalidArgument(
                f'target: got {target!r}, must be the server\'s address, as '
                '"unix:/run/mla-server/mla.sock", or a list of such')
        flags = {name: rest.pop(name, default)
                 for name, default in (("prefix_cache", True), ("keep_model", False),
                                       ("projected", False))}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise errors.InvalidArgument(f"{name}: got {value!r}, must be true or false")
        dtype = rest.pop("projected_dtype", "")
        check_projected_dtype(dtype, flags["projected"])
        away = rest.pop("away_s", AWAY_S)
        low, high = BOUNDS["away_s"]
        if isinstance(away, bool) or not isinstance(away, (int, float)) or not (
                low <= away <= high):
            raise errors.InvalidArgument(
                f"away_s: got {away!r}, must be {low:g}..{high:g}")
        page = rest.pop("page_size", 0)
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page <= MOST_PAGE_ROWS:
            raise errors.InvalidArgument(f"page_size: got {page!r}, must be 0..{MOST_PAGE_ROWS}")
        model = rest.pop("model_id", "") or model_id
        return cls(tuple(targets), model, away_s=float(away), page_size=page, projected_dtype=dtype,
                   arguments={"lease_ms": LEASE_MS, "client_id": client_id, **rest}, **flags)

    def with_defaults(self, arguments: Mapping[str, Any]) -> "Options":
        """These arguments of Client.connect, where the user has not given them."""
        return dataclasses.replace(self, arguments={**arguments, **self.arguments})

    def of_stage(self, stage: int, stages: int) -> "Options":
        """The options of one stage of a pipeline, whose layers are a separate model."""
        return dataclasses.replace(self, model_id=f"{self.model_id}#{stage + 1}of{stages}")

    def connect(self, target: str) -> mla_client.Client:
        """A client of the server at `target`."""
        arguments = dict(self.arguments)
        if arguments.get("follow_moves") is True and arguments.get("tls") is None:
            arguments["follow_moves"] = self.connect
        try:
            return mla_client.Client.connect(target, **arguments)
        except TypeError as error:
            raise errors.InvalidArgument(f"an option that Client.connect does not have: {error}"
                                         ) from error


def salt_of(parts: Mapping[str, Any]) -> str:
    """The salt of prefixes: rows are shared only where all of `parts` are equal. Whatever changes a
    row's value belongs in it: engine, its version, kind of operations, dtype, revision and
    quantisation of the weights, rope. A few bytes, whatever `parts` hold."""
    text = json.dumps(parts, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32] + " "


def checkpoint_of(model: str, text: Any) -> Any:
    """What changes with the weights of a model: of a folder the names, sizes and times of its
    files, because nothing else tells that they were replaced; of a name the commit that was loaded,
    as far as `text`, the model's configuration, says."""
    folder = pathlib.Path(model)
    if not folder.is_dir():
        return getattr(text, "_commit_hash", None)
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]


def salt_of_rows(engine: str, version: str, model: str, text: Any, **parts: Any) -> str:
    """As salt_of, with what every engine has: its name and version, the machine, and the model, its
    checkpoint and the rope of `text`, its configuration."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    return salt_of({**parts, "engine": engine, "version": version, "machine": platform.machine(),
                    "model": model, "checkpoint": checkpoint_of(model, text), "rope": str(rope)})


def refuse(cases: Iterable[Tuple[Any, str]]) -> None:
    """Raises Unimplemented with the text of the first case that is so."""
    for bad, what in cases:
        if bad:
            raise errors.Unimplemented(what)


def options_in(variable: str) -> Dict[str, Any]:
    """The options that a variable of the environment gives as JSON."""
    try:
        given = json.loads(os.environ.get(variable, ""))
    except ValueError:
        given = None
    if not isinstance(given, dict) or "target" not in given:
        raise errors.InvalidArgument(f'{variable} of the environment: must be JSON like '
                                     '{"target": "unix:/run/mla-server/mla.sock"}')
    return given


@dataclasses.dataclass(frozen=True)
class Release:
    """A release of an engine that was tried, or a range of them. With two numbers an end stands for
    all releases that begin with them."""

    first: Tuple[int, ...]
    last: Tuple[int, ...]
    note: str = ""


def check_version(engine: str, version: str, table: Tuple[Release, ...],
                  cure: Optional[Callable[[], str]] = None) -> Release:
    """The row of the table that the version belongs to; Unimplemented names what was tried."""
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit() or digits != part:
            break
        numbers.append(int(part))
    found = tuple(numbers + [0] * (3 - len(numbers)))
    for row in table:
        if numbers and row.first <= found and found[:len(row.last)] <= row.last:
            return row
    tried = ", ".join("{} to {}".format(*(".".join(map(str, one)) for one in (row.first, row.last)))
                      if row.first != row.last else ".".join(map(str, row.first)) for row in table)
    raise errors.Unimplemented(
        f"{engine} {version}: this release of mla-client was tried with {tried}; install one of "
        f"them{', or ' + cure() if cure else ''}")
