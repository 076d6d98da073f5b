"""The demo of sparse attention: a model whose rows each attend to 16 others.

The last line begins `demo v32: 64/64 agree` when all went well; sparse.py says what agrees.
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
from attention import register
from model import Model
from v32.sparse import INDEX_DIM, TOP_K, Indexer, Result, SparseGenerator, check

PROMPT_BYTES = 320
TOKENS = 64
MODEL_ID = "demo-deepseek-v32"
PROFILES = (mla_client.Profile.EXPANDED, mla_client.Profile.ABSORBED)


def generate(model: Model, service: mla_client.Service, profile: mla_client.Profile,
             prompt: List[int], count: int, say: scenes.Say = lambda text: None,
             by_service: bool = False) -> Result:
    """Registers the model, generates and checks; the sequence is released. `by_service`: the
    service's indexer makes the lists."""
    name = f"{profile.name.lower()}{', indexer of the server' if by_service else ''}"
    registered = register(service, model, f"{MODEL_ID} {name}", top_k=TOP_K,
                          index_dim=INDEX_DIM if by_service else 0)
    with registered.open_sequence() as sequence:
        generator = SparseGenerator(model, service, sequence, profile,
                                    Indexer(model, rounded=by_service))
        tokens, logits = generator.generate(generator.prefill(prompt), count)
        say(f"{name}: {scenes.text_of(tokens)}")
        result = check(generator, prompt, tokens, logits)
        say(f"{name}: {result}")
        return result


def run(model: Model, server: str, server_args: List[str], transport: str) -> bool:
    """The whole demo against a server that it starts; the last line says how it went."""
    with scenes.served(server, server_args, transport) as (client, info, say):
        prompt = corpus.prompt(PROMPT_BYTES)
        runs = [(profile, False) for profile in PROFILES]
        runs += [(profile, True) for profile in PROFILES if "indexer" in info.capabilities]
        results = [generate(model, client, profile, prompt, TOKENS, say, by_service)
                   for profile, by_service in runs]
    parts = [f"{result.tokens.agree}/{result.tokens.positions} agree "
             f"({profile.name.lower()}{', server' if by_service else ''}, "
             f"{result.tokens.near_ties} near ties; {result.lists})"
             for (profile, by_service), result in zip(runs, results)]
    print("demo v32: " + ", ".join(parts))
    return all(result.ok for result in results)
