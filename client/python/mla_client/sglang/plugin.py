"""The entry point of `sglang.srt.plugins`: SGLang calls it in every process."""

from __future__ import annotations

from typing import Any

NAME = "mla_server"


def register() -> None:
    """Makes `--attention-backend mla_server` known. An engine that is started without it stays as
    it is."""
    # pylint: disable=import-outside-toplevel
    from sglang.srt.layers.attention.attention_registry import (ATTENTION_BACKENDS,
                                                                register_attention_backend)
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    known = ATTENTION_BACKENDS.get(NAME)
    if known not in (None, _create):
        raise RuntimeError(f"attention backend {NAME} is registered already, as {known}")
    register_attention_backend(NAME)(_create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _create(runner: Any) -> Any:
    """The backend of a model runner."""
    # pylint: disable=import-outside-toplevel
    from mla_client.sglang.backend import RemoteMlaBackend

    return RemoteMlaBackend(runner)
