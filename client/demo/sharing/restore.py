"""A scene of the demo: the server is killed, and a conversation that it had saved goes on."""

from __future__ import annotations

from typing import Callable, ContextManager, List

import mla_client
from checks import LocalModel
from generate import Generator
from scenes import Run, Say

ANSWER_TOKENS = 16


def crash(run: Run, client: mla_client.Client,
          restarted: Callable[[], ContextManager[mla_client.Model]], question: List[int],
          local: LocalModel, say: Say) -> bool:
    """Saves the run's sequence, of which `client` is the owner, and goes on with a question on a
    server that has forgotten it. `restarted` kills the server, starts it again, and gives the model
    as the new one has it."""
    of = run.generator
    saved, = client.checkpoint([of.sequence])
    text = [*run.prompt, *run.tokens][:saved.length]
    with restarted() as registered:
        service = registered.service
        forgotten = saved.sequence_id not in [one.sequence_id for one in service.sequences()]
        sequence, = service.restore(registered, [saved.sequence_id])
        with sequence:
            whole = sequence.length == saved.length == len(text)
            generator = Generator(of.model, service, sequence, of.profile)
            logits = generator.prefill(question)
            result = local.check([*text, *question], *generator.generate(logits, ANSWER_TOKENS))
        service.drop_checkpoints([saved.sequence_id])
    say(f"restore: {saved.length} rows, {saved.bytes / 1e6:.1f} MB, outlived a killed server, "
        f"{len(question)} computed; {result}")
    return result.ok and whole and forgotten
