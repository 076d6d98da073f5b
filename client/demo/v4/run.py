"""The demo of attention to a window, compressed entries and sinks.

The last line begins `demo v4: 64/64 agree` when all went well; window.py says what agrees.
"""

from __future__ import annotations

import pathlib
import sys
from typing import List

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
import corpus
import mla_client
import scenes
from model import Model
from v4.window import Result, Worker, WindowGenerator, check

PROMPT_BYTES = 320
TOKENS = 64
ROWS_A_STEP = 100  # of the prompt, so that steps begin inside entries and pages
MODEL_ID = "demo-deepseek-v4"


def generate(model: Model, service: mla_client.Service, prompt: List[int], count: int,
             say: scenes.Say = lambda text: None) -> Result:
    """Registers the model, generates and checks; the sequence is released."""
    worker = Worker(model)
    registered = service.register_model(worker.spec(MODEL_ID, "bf16"), sinks=worker.sinks)
    with registered.open_sequence() as sequence:
        generator = WindowGenerator(worker, service, sequence)
        logits = generator.prefill(prompt, rows_a_step=ROWS_A_STEP)
        # A draft of three tokens that is rejected whole leaves no trace.
        generator.feed(prompt[:3], keep=0)
        tokens, chosen_from = generator.generate(logits, count)
        say(scenes.text_of(tokens))
        result = check(generator, prompt, tokens, chosen_from)
        say(str(result))
        return result


def run(model: Model, server: str, server_args: List[str], transport: str) -> bool:
    """The whole demo against a server that it starts; the last line says how it went."""
    with scenes.served(server, server_args, transport) as (client, _, say):
        result = generate(model, client, corpus.prompt(PROMPT_BYTES), TOKENS, say)
    print(f"demo v4: {result.tokens.agree}/{result.tokens.positions} agree "
          f"({result.tokens.near_ties} near ties; {result.lists})")
    return result.ok
