"""Requests and replies in the format of OpenAI's completions and chat completions."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any, Dict, List, Optional, Tuple

from text import Utf8
from worker import Event, Task

MODEL = "trained"
# Tokens of prompt and answer together, which are bytes: length that the model was trained with.
CONTEXT = 1024
CHOICES_MAX = 8
STOPS_MAX, STOP_BYTES_MAX = 4, 64


class Refused(Exception):
    """A request that cannot be served as it is."""

    def __init__(self, message: str, parameter: Optional[str] = None) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request."""

    task: Task
    chat: bool
    stream: bool
    usage: bool  # true if a stream ends with the usage


def parse(body: Any, number: int, chat: bool) -> Request:
    """Checks a request. Refused if a field cannot be used."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    if body.get("model", MODEL) != MODEL:
        raise Refused(f"model must be {MODEL!r}: no other is served", "model")
    prompt = _chat_prompt(body) if chat else _prompt(body)
    tokens = _number(body, "max_completion_tokens" if chat and "max_completion_tokens" in body
                     else "max_tokens", 128, 1, CONTEXT, whole=True)
    if len(prompt) + tokens > CONTEXT:
        raise Refused(f"prompt and answer have {len(prompt)} + {tokens} tokens (bytes), at most "
                      f"{CONTEXT}", "max_tokens")
    seed = body.get("seed")
    if seed is None:
        seed = secrets.randbits(32)
    elif not isinstance(seed, int) or isinstance(seed, bool):
        raise Refused("seed must be a whole number", "seed")
    options = body.get("stream_options") or {}
    return Request(
        Task(number, prompt, int(_number(body, "n", 1, 1, CHOICES_MAX, whole=True)), int(tokens),
             _number(body, "temperature", 1.0, 0.0, 2.0), _number(body, "top_p", 1.0, 0.0, 1.0),
             seed % 2**63, _stops(body.get("stop"))),
        chat, bool(body.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")))


def _prompt(body: Dict) -> bytes:
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise Refused("prompt must be a text that is not empty", "prompt")
    return _bytes(prompt, "prompt")


def _bytes(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON may escape halves of characters
        raise Refused(f"{name} must be a text of whole characters", name) from None


def _chat_prompt(body: Dict) -> bytes:
    """The messages as paragraphs: the model has learned novels, no dialogue with roles."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list that is not empty", "messages")
    texts = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part.get("text") for part in content
                     if isinstance(part, dict) and part.get("type") == "text"]
            content = "".join(part for part in parts if isinstance(part, str))
        if not isinstance(content, str) or not content:
            raise Refused(f"messages[{index}].content must be a text that is not empty", "messages")
        texts.append(content)
    return _bytes("\n".join(texts), "messages")


def _number(body: Dict, name: str, default: float, least: float, most: float,
            whole: bool = False) -> float:
    value = body.get(name)
    value = default if value is None else value
    kinds = (int,) if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{name} must be {'a whole number' if whole else 'a number'} from {least} to "
                      f"{most}", name)
    return value


def _stops(stop: Any) -> Tuple[bytes, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    refused = Refused(f"stop must be at most {STOPS_MAX} texts of 1 to {STOP_BYTES_MAX} bytes",
                      "stop")
    if (not isinstance(stops, list) or len(stops) > STOPS_MAX
            or not all(isinstance(text, str) for text in stops)):
        raise refused
    data = tuple(_bytes(text, "stop") for text in stops)
    if not all(0 < len(stop) <= STOP_BYTES_MAX for stop in data):
        raise refused
    return data


class Answer:
    """Makes the reply of a request, whole or in chunks, from its events."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._id = ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        count = request.task.choices
        self._decoders = [Utf8() for _ in range(count)]
        self._texts = [""] * count
        self._reasons: List[Optional[str]] = [None] * count
        self._tokens = [0] * count

    def chunk(self, event: Event) -> Optional[Dict]:
        """A chunk of the stream; None if there is nothing to show yet."""
        at = event.choice
        text = self._decoders[at].add(event.data, last=bool(event.reason))
        first = not self._tokens[at]
        self._tokens[at] = event.tokens
        self._texts[at] += text
        self._reasons[at] = event.reason or None
        if not text and not event.reason and not first:
            return None
        if self._request.chat:
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            choice: Dict[str, Any] = {"index": at, "delta": delta}
        else:
            choice = {"index": at, "text": text, "logprobs": None}
        return self._head(chunk=True, choices=[{**choice, "finish_reason": self._reasons[at]}])

    def usage_chunk(self) -> Optional[Dict]:
        """The last chunk of a stream, if it was asked for."""
        if not self._request.usage:
            return None
        return {**self._head(chunk=True, choices=[]), "usage": self._usage()}

    def whole(self) -> Dict:
        """The reply, once all events have been taken."""
        choices = []
        for at, (text, reason) in enumerate(zip(self._texts, self._reasons)):
            said: Dict[str, Any] = ({"message": {"role": "assistant", "content": text}}
                                    if self._request.chat else {"text": text, "logprobs": None})
            choices.append({"index": at, **said, "finish_reason": reason})
        return {**self._head(chunk=False, choices=choices), "usage": self._usage()}

    def _head(self, chunk: bool, choices: List[Dict]) -> Dict:
        kind = "text_completion"
        if self._request.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": MODEL,
                "choices": choices}

    def _usage(self) -> Dict[str, int]:
        prompt, said = len(self._request.task.prompt), sum(self._tokens)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def error(message: str, kind: str = "invalid_request_error",
          parameter: Optional[str] = None) -> Dict:
    """The body of a refusal."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}
