"""A scene of the demo: two turns of a conversation share their rows."""

from __future__ import annotations

from typing import List

import mla_client
from checks import LocalModel
from generate import Generator
from model import Model
from scenes import Say

TURN_ROWS = 448     # of the first turn's prompt
ANSWER_TOKENS = 16
QUESTION_ROWS = 32  # rows that the second turn adds


def turns(model: Model, registered: mla_client.Model, profile: mla_client.Profile,
          prompt: List[int], local: LocalModel, say: Say) -> bool:
    """Two turns of a conversation: the second one takes the first one's rows from the prefix cache,
    including the answer, and computes only new rows."""
    service = registered.service
    first = prompt[:TURN_ROWS]
    with registered.open_sequence(prefix=mla_client.Prefix(first)) as sequence:
        generator = Generator(model, service, sequence, profile)
        answer, _ = generator.generate(generator.prefill(first), ANSWER_TOKENS)
        # Declares the generated rows; the last token was chosen and does not have a row.
        sequence.match(mla_client.Prefix(answer[:-1]), first_row=len(first))
    second = [*first, *answer, *prompt[TURN_ROWS:TURN_ROWS + QUESTION_ROWS]]
    expected = len(first) + len(answer) - 1
    with registered.open_sequence(prefix=mla_client.Prefix(second, salt="another")) as other:
        apart = other.matched.rows == 0
    with registered.open_sequence(
            prefix=mla_client.Prefix(second, max_rows=len(second) - 1)) as sequence:
        found = sequence.matched.rows
        generator = Generator(model, service, sequence, profile)
        logits = generator.prefill(second[sequence.length:])
        result = local.check(second, *generator.generate(logits, ANSWER_TOKENS))
    say(f"prefix: {found} of {len(second)} rows found, {100 * found / len(second):.0f} % hit, "
        f"{len(second) - found} computed; {result}")
    return result.ok and found == expected and apart
