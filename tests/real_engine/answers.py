"""Whole answers, to compare what one engine says with what two say together.

An answer is reduced to what a client reads: texts, tool calls, tokens and their log-probabilities, why each
choice ended, usage, errors. What names the request (id, time, fingerprint) is left out. A stream is put
together to the same form, so that the size of its chunks does not matter; that it begins and ends as one does.
"""

import dataclasses
import http.client
import json
import math
import urllib.parse

# Names of the request, of a tool's call or of the engine, not of the answer.
NAMES = ("id", "created", "system_fingerprint")


@dataclasses.dataclass
class Answer:
    """What came of one request."""

    status: int
    said: dict
    stream: bool = False
    cached_tokens: int | None = None
    prompt_tokens: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)  # of its form


def ask(url: str, path: str, body: dict, request_id: str, seconds_max: float = 120) -> Answer:
    """Sends a request on a connection of its own and reads its answer to the end."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=seconds_max)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, "Connection": "close"}
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        payload = reply.read()
        stream = reply.headers.get("content-type", "").startswith("text/event-stream")
        return read_stream(reply.status, payload) if stream else read_plain(reply.status, payload)
    finally:
        connection.close()


def read_plain(status: int, payload: bytes) -> Answer:
    """A reply in one piece."""
    answer = Answer(status, _nameless(json.loads(payload)))
    _take_usage(answer, answer.said.get("usage"))
    return answer


def _nameless(said):
    if isinstance(said, dict):
        return {key: _nameless(value) for key, value in said.items() if key not in NAMES}
    return [_nameless(value) for value in said] if isinstance(said, list) else said


def read_stream(status: int, payload: bytes) -> Answer:
    """A stream, put together."""
    answer = Answer(status, {"choices": {}}, stream=True)
    lines = [line[5:].strip() for line in payload.split(b"\n") if line.startswith(b"data:")]
    if lines[-1:] != [b"[DONE]"] or lines.count(b"[DONE]") != 1:
        answer.faults.append("does not end in one [DONE]")
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    for number, event in enumerate(events):
        for key, value in event.items():
            if key == "choices":
                for choice in value:
                    _take_choice(answer.said["choices"].setdefault(str(choice["index"]), {}), choice)
            elif key == "usage":
                _take_usage(answer, value)
                answer.said["usage"] = value or answer.said.get("usage")
            elif key not in NAMES and value is not None:
                answer.said[key] = value
        if number == 0 and event.get("object") == "chat.completion.chunk":
            first = event["choices"][0].get("delta", {})
            if first.get("role") != "assistant" or first.get("content"):
                answer.faults.append(f"begins with {first}")
    return answer


def _take_choice(into: dict, choice: dict) -> None:
    delta = choice.get("delta", {})
    for source, name in ((choice, "text"), (delta, "content"), (delta, "reasoning")):
        if source.get(name):
            into[name] = into.get(name, "") + source[name]
    for call in delta.get("tool_calls") or []:
        known = into.setdefault("tool_calls", {}).setdefault(str(call["index"]), {"name": "", "arguments": ""})
        for name in known:
            known[name] += call.get("function", {}).get(name) or ""
    for name in ("token_ids", "prompt_token_ids"):
        if choice.get(name):
            into[name] = into.get(name, []) + choice[name]
    for name, values in (choice.get("logprobs") or {}).items():
        into.setdefault("logprobs", {}).setdefault(name, []).extend(values or [])
    for name in ("finish_reason", "stop_reason"):
        into[name] = choice.get(name) or into.get(name)


def _take_usage(answer: Answer, usage: dict | None) -> None:
    if not usage:
        return
    answer.prompt_tokens = usage.get("prompt_tokens", 0)
    # What was cached is another matter than what was said.
    details = usage.pop("prompt_tokens_details", None) or {}
    answer.cached_tokens = details.get("cached_tokens")


@dataclasses.dataclass
class Comparison:
    """Two answers to one request."""

    differences: list[str]
    logprobs: int = 0  # numbers compared
    logprob_difference_max: float = 0.0

    def equal(self, tolerance: float) -> bool:
        """Whether a client could not tell them apart, by numbers that differ by no more than that."""
        return not self.differences and self.logprob_difference_max <= tolerance


def compare(expected: Answer, seen: Answer) -> Comparison:
    """What differs, by name; numbers within `logprobs` are compared as such."""
    comparison = Comparison([])
    if expected.status != seen.status:
        comparison.differences.append(f"status {seen.status}, not {expected.status}")
    for answer, name in ((expected, "expected"), (seen, "seen")):
        comparison.differences += [f"{name}: {fault}" for fault in answer.faults]
    _compare(expected.said, seen.said, "", comparison)
    return comparison


def _compare(expected, seen, at: str, comparison: Comparison) -> None:
    if isinstance(expected, dict) and isinstance(seen, dict) and expected.keys() == seen.keys():
        for key in expected:
            _compare(expected[key], seen[key], f"{at}.{key}", comparison)
    elif isinstance(expected, list) and isinstance(seen, list) and len(expected) == len(seen):
        for number, (left, right) in enumerate(zip(expected, seen, strict=True)):
            _compare(left, right, f"{at}[{number}]", comparison)
    elif isinstance(expected, float) and isinstance(seen, float):
        difference = abs(expected - seen)
        if math.isnan(difference):
            comparison.differences.append(f"{at}: {seen}, not {expected}")
        comparison.logprobs += 1
        comparison.logprob_difference_max = max(comparison.logprob_difference_max, difference)
    elif expected != seen:
        comparison.differences.append(f"{at}: {str(seen)[:80]}, not {str(expected)[:80]}")
