"""Every feature of generate() with attention on a server, against the same model with its own.

A run that makes choices (sampled, by beams, with drafts) is recorded with local attention and
repeated with remote attention: the repeat gets the recorded scores, so it makes the same choices,
and its own logits are compared. Greedy runs are free, up to the first difference of a row, which
must be a near tie. The rule is the demo's (client/demo/checks.py): a token is the local best, or
the two best local logits are closer than twice the largest logit difference E; E stays below a
bound.

The choices of an indexer are repeated, too. Rounding in the cache decides the close ones, and in a
random model a chosen position may have any weight: one that is swapped makes E 0.2 to 0.9. Few of
the positions that the second run would choose itself may differ from those of the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import transformers
from mla_client import transformers as adapter
from mla_client.transformers.attachment import cache_name

# The bound of E: four times the value measured with the CPU and the CUDA backend. Logits have a
# deviation of 1.
BOUND = 0.16
# At most one position in this many may be a near tie, or eight positions.
NEAR_TIES_ONE_IN, MAX_NEAR_TIES = 16, 8
# At most one in this many chosen positions may differ.
SWAPPED_ONE_IN = 50
NEW_TOKENS = 32
UNIT = 100  # tokens; a prompt has three of them
END = 7  # a token that ends a row


class Recorder(transformers.LogitsProcessor):
    """Records the scores of a run, or replaces a run's scores with recorded ones."""

    def __init__(self, kept: Optional[List[torch.Tensor]] = None) -> None:
        self.kept: List[torch.Tensor] = [] if kept is None else list(kept)
        self._replay = kept is not None
        self._at = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._replay:
            self.kept.append(scores.clone())
            return scores
        self._at += 1
        return self.kept[self._at - 1]


class Choices:
    """The positions that the indexers of models choose: the first run's are recorded and repeated
    by the second one, call by call, or by the positions of queries where its calls are others."""

    def __init__(self, *models: Any) -> None:
        # By module, of each call: the position of the first query, and [rows, queries, chosen].
        self._calls: Dict[Any, List[Tuple[int, torch.Tensor]]] = {}
        self._turns: Dict[Any, int] = {}
        self._replay = False
        self.listed = self.swapped = 0  # chosen positions of rows that see more than those
        self._hooks = [module.register_forward_hook(self._hook, with_kwargs=True)
                       for model in models if model is not None
                       for name, module in model.named_modules() if name.endswith(".indexer")]

    def replay(self) -> None:
        """The second run begins."""
        self._replay = True

    def close(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, module: Any, args: Any, kwargs: Any, chosen: torch.Tensor) -> torch.Tensor:
        mask = kwargs["attention_mask"] if "attention_mask" in kwargs else args[3]
        begin = mask.shape[-1] - chosen.shape[1]  # mask [rows, queries, positions]
        calls, turn = self._calls.setdefault(module, []), self._turns.setdefault(module, 0)
        if not self._replay:
            calls.append((begin, chosen))
            return chosen
        if turn < len(calls) and calls[turn][0] == begin and calls[turn][1].shape == chosen.shape:
            self._turns[module] += 1
            before = calls[turn][1]
        else:
            before = _by_position(calls, begin, chosen)
        sees = (mask if mask.dtype == torch.bool else mask == 0).sum(-1) > chosen.shape[-1]
        same = (chosen[..., None] == before[..., None, :]).any(-1)
        self.listed += chosen.shape[-1] * int(sees.sum())
        self.swapped += int((~same & sees[..., None]).sum())
        return before


def _by_position(calls: List[Tuple[int, torch.Tensor]], begin: int, chosen: torch.Tensor
                 ) -> torch.Tensor:
    """`chosen` with the last lists of earlier calls, as far as they had queries of its positions
    and as many rows."""
    found, width = chosen.clone(), chosen.shape[-1]
    for first, before in calls:
        for at in range(before.shape[1] if len(before) == len(found) else 0):
            place = first + at - begin
            if 0 <= place < found.shape[1]:
                # A shorter list has all positions there were; the added ones come after the query.
                have = min(before.shape[-1], width)
                found[:, place, :have] = before[:, at, :have]
                found[:, place, have:] = torch.arange(have, width)
    return found


@dataclasses.dataclass
class Result:
    """Result of one compared feature."""

    name: str
    positions: int = 0
    error: float = 0.0      # E
    near_ties: int = 0
    wrong: int = 0          # positions whose token is neither the local best nor a near tie
    first_tie: str = ""     # of a free run: where the two differ
    same: bool = True       # the repeat made the same choices
    listed: int = 0         # positions that indexers chose
    swapped: int = 0        # of these, positions that the repeat would not have chosen

    @property
    def ok(self) -> bool:
        return (self.positions > 0 and self.same and not self.wrong and self.error < BOUND
                and self.swapped * SWAPPED_ONE_IN <= self.listed
                and self.near_ties <= max(MAX_NEAR_TIES, self.positions // NEAR_TIES_ONE_IN))

    def __str__(self) -> str:
        return (f"{self.name:<26}{'ok' if self.ok else 'FAILED':<8}{self.positions:>5} positions  "
                f"E {self.error:.4f}  near ties {self.near_ties}{self.first_tie}"
                + (f"  swapped {self.swapped} of {self.listed}" if self.listed else "")
                + (f"  WRONG {self.wrong}" if self.wrong else "")
                + ("" if self.same else "  OTHER CHOICES"))


def remote_of(client: Any, *models: Any) -> Callable:
    """A context in which the models' attention is remote; yields the first attachment."""
    @contextlib.contextmanager
    def remote() -> Iterator[adapter.Attachment]:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(adapter.attach(model, client)) for model in models][0]
    return remote


@contextlib.contextmanager
def choices_of(model: Any, options: Optional[Dict[str, Any]] = None) -> Iterator[Choices]:
    """The choices of the model's indexers, and of the assistant's in the options."""
    choices = Choices(model, (options or {}).get("assistant_model"))
    try:
        yield choices
    finally:
        choices.close()


def judge(result: Result, local: torch.Tensor, remote: torch.Tensor) -> None:
    """Adds logits [positions, vocab] of both runs."""
    result.positions += len(local)
    result.error = max(result.error, float((local - remote).abs().max()))
    best = local.topk(2, dim=-1)
    other = best.indices[:, 0] != remote.argmax(-1)
    tie = other & (best.values[:, 0] - best.values[:, 1] < 2 * result.error)
    result.near_ties += int(tie.sum())
    result.wrong += int((other & ~tie).sum())


def prompts(device: str, rows: int = 4, unit: int = UNIT) -> Dict[str, torch.Tensor]:
    """Left-padded prompts of at most three units of tokens. Each repeats itself, so that looking up
    helps."""
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(8, 256, (rows, unit), generator=drawn).repeat(1, 3)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :row * (5 * unit // 6)] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def free_greedy(model: Any, inputs: Dict, remote: Callable, name: str, **options: Any) -> Result:
    """Compares two free runs."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "output_logits": True,
               "return_dict_in_generate": True, **options}
    with choices_of(model, options) as choices:
        local = model.generate(**inputs, **options)
        choices.replay()
        with remote():
            got = model.generate(**inputs, **options)
    result = Result(name)
    begin = inputs["input_ids"].shape[1]
    for row in range(len(inputs["input_ids"])):
        a, b = local.sequences[row, begin:], got.sequences[row, begin:]
        count = min(len(a), len(b))
        apart = torch.nonzero(a[:count] != b[:count])
        steps = count if not len(apart) else int(apart[0]) + 1
        judge(result, *(torch.stack([logits[row] for logits in run.logits[:steps]])
                        for run in (local, got)))
        if len(apart):
            result.first_tie += f", row {row} at {int(apart[0])}"
    return result


def replayed(model: Any, inputs: Dict, remote: Callable, name: str, **options: Any) -> Result:
    """Repeats the local run's choices with remote attention."""
    options = {"max_new_tokens": NEW_TOKENS, "output_logits": True,
               "return_dict_in_generate": True, **options}
    recorder = Recorder()
    torch.manual_seed(11)
    with choices_of(model, options) as choices:
        local = model.generate(**inputs, logits_processor=[recorder], **options)
        choices.replay()
        with remote():
            torch.manual_seed(11)
            got = model.generate(**inputs, logits_processor=[Recorder(recorder.kept)], **options)
    result = Result(name, listed=choices.listed, swapped=choices.swapped)
    result.same = (torch.equal(local.sequences, got.sequences)
                   and len(local.logits) == len(got.logits))
    if getattr(local, "beam_indices", None) is not None:
        result.same = result.same and torch.equal(local.beam_indices, got.beam_indices)
    if result.same:
        judge(result, torch.cat(local.logits), torch.cat(got.logits))
    return result


def continued(model: Any, inputs: Dict, remote: Callable, name: str) -> Result:
    """A second call continues from the cache of the first, with more tokens."""
    options = {"do_sample": False, "max_new_tokens": 12, "output_logits": True,
               "return_dict_in_generate": True}
    name_of_cache = cache_name(model)

    def both(cache: Any, second: Optional[torch.Tensor]) -> Any:
        first = model.generate(**inputs, **{name_of_cache: cache}, **options)
        tokens = torch.cat((first.sequences, inputs["input_ids"][:, :20]), dim=1)
        tokens = tokens if second is None else second
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(
            tokens[:, inputs["input_ids"].shape[1]:])), dim=1)
        return tokens, model.generate(input_ids=tokens, attention_mask=mask,
                                      **{name_of_cache: cache}, **options)

    # The run is teacher-forced, because the first continuation may differ by a near tie.
    with choices_of(model) as choices:
        with remote() as attachment:
            tokens, got = both(attachment.cache(), None)
        choices.replay()
        recorder = transformers.DynamicCache(config=model.config)
        mask = torch.ones_like(tokens)
        mask[:, :inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        local = model.generate(input_ids=tokens, attention_mask=mask, **{name_of_cache: recorder},
                               **options)
    result = Result(name)
    begin = tokens.shape[1]
    for row in range(len(tokens)):
        apart = torch.nonzero(local.sequences[row, begin:] != got.sequences[row, begin:])
        steps = 12 if not len(apart) else int(apart[0]) + 1
        judge(result, *(torch.stack([logits[row] for logits in run.logits[:steps]])
                        for run in (local, got)))
    return result


def control(model: Any, inputs: Dict) -> float:
    """E of a run whose rows are shifted by one position, which shows that the comparison can fail.
    """
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0]
    return float((logits[1:] - logits[:-1]).abs().max())


def compare_all(model: Any, assistant: Any, device: str, remote: Callable, both: Callable,
                say: Callable[[str], None], unit: int = UNIT, new: int = NEW_TOKENS
                ) -> List[Result]:
    """Compares all features. `remote()` is a context in which the model's attention is remote,
    `both()` one in which the assistant's is remote too."""
    batch = prompts(device, unit=unit)
    one = {name: tensor[:1] for name, tensor in batch.items()}
    results = []
    free, replay = (functools.partial(compare, model, max_new_tokens=new)
                    for compare in (free_greedy, replayed))
    for make in (
            lambda: free(one, remote, "greedy"),
            lambda: free(batch, remote, "greedy, left-padded batch"),
            lambda: free(batch, remote, "prefill in chunks", prefill_chunk_size=unit // 2),
            lambda: replay(batch, remote, "sampled", do_sample=True),
            lambda: replay(batch, remote, "rows that end early", do_sample=True,
                             eos_token_id=[END, *range(20, 28)], pad_token_id=0),
            lambda: replay(batch, remote, "three of each prompt", do_sample=True,
                             num_return_sequences=3),
            lambda: replay(batch, remote, "four beams", num_beams=4, do_sample=False),
            lambda: replay(batch, remote, "beams, sampled", num_beams=3, do_sample=True,
                             num_return_sequences=2),
            lambda: replay(one, remote, "prompt lookup", do_sample=False,
                             prompt_lookup_num_tokens=5),
            lambda: replay(one, remote, "assisted", do_sample=False,
                             assistant_model=assistant),
            lambda: replay(one, remote, "assisted, sampled", do_sample=True,
                             assistant_model=assistant),
            lambda: free(one, both, "assisted, both remote",
                                assistant_model=assistant),
            lambda: continued(model, batch, remote, "going on from a cache")):
        results.append(make())
        say(str(results[-1]))
    return results


def check(model: Any, assistant: Any, device: str, remote: Callable, both: Callable,
          say: Callable[[str], None], unit: int = UNIT, new: int = NEW_TOKENS) -> bool:
    """Compares all features of a model, and returns whether the comparison can fail."""
    kind = model.config.model_type
    late = control(model, prompts(device, 1, unit))
    say(f"{kind}: rows one position too late differ by {late:.2f}, bound {BOUND}")
    results = compare_all(model, assistant, device, remote, both, say, unit, new)
    ties = max(results, key=lambda result: result.near_ties)
    say(f"{kind}: {sum(result.positions for result in results)} positions, E at most "
        f"{max(result.error for result in results):.4f}, near ties at most {ties.near_ties} of "
        f"{ties.positions}")
    return late > 2 * BOUND and all(result.ok for result in results)
