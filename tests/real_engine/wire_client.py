"""An OpenAI client that reports what really came over the wire.

A client library hides the difference between a stream that ended and one that was cut. Here every
request is a connection of its own (so a balancer may send each to another replica), read to its end,
and judged: see `Outcome`.
"""

import asyncio
import dataclasses
import enum
import json
import time
import urllib.parse


class Outcome(enum.StrEnum):
    """What the client saw. Only the first one is an answer."""

    OK = "ok"
    REFUSED = "connection refused"
    CUT_UNANSWERED = "connection cut, no answer"
    CUT_MIDSTREAM = "connection cut inside a stream"
    HTTP_ERROR = "HTTP error"
    ERROR_EVENT = "error event, no [DONE]"
    TIMEOUT = "no end within the client's limit"
    ENDS_SILENTLY = "stream ends without error or [DONE]"
    FALSE_DONE = "[DONE] after an error or before the end"
    BAD_BODY = "200 with a body that is no answer"


# A client can't tell these from an answer, or not for what they are: never, whatever died.
BROKEN_PROMISES = (Outcome.TIMEOUT, Outcome.ENDS_SILENTLY, Outcome.FALSE_DONE, Outcome.BAD_BODY)
# What the clients of a replica that is killed may see: the process that could tell them is gone.
CUTS = (Outcome.CUT_UNANSWERED, Outcome.CUT_MIDSTREAM)


@dataclasses.dataclass
class Exchange:
    """One request and what became of it. Times are seconds of the monotonic clock."""

    request_id: str
    stream: bool
    began: float
    first_byte: float | None = None
    ended: float = 0.0
    outcome: Outcome = Outcome.TIMEOUT
    status: int = 0
    detail: str = ""
    text: str = ""
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


async def chat(url: str, body: dict, request_id: str, seconds_max: float = 60) -> Exchange:
    """Sends one chat completion. `body` must ask for a fixed number of tokens (`ignore_eos`)."""
    exchange = Exchange(request_id, bool(body.get("stream")), time.monotonic())
    try:
        async with asyncio.timeout(seconds_max):
            await _exchange(url, body, exchange)
    except TimeoutError:
        exchange.detail = f"{seconds_max} s"
    exchange.ended = time.monotonic()
    return exchange


async def _exchange(url: str, body: dict, exchange: Exchange) -> None:
    address = urllib.parse.urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 22)
    except OSError as error:
        exchange.outcome, exchange.detail = Outcome.REFUSED, str(error)
        return
    try:
        payload = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\n"
            f"Host: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {exchange.request_id}\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        await writer.drain()
        await _read_reply(reader, body, exchange)
    except (OSError, asyncio.IncompleteReadError) as error:
        # Only before the head: `_read_body` turns a cut of the body into a flag.
        exchange.outcome, exchange.detail = Outcome.CUT_UNANSWERED, repr(error)
    finally:
        writer.close()


async def _read_reply(reader: asyncio.StreamReader, body: dict, exchange: Exchange) -> None:
    status_line = await reader.readuntil(b"\r\n")
    exchange.status = int(status_line.split()[1])
    headers = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    payload, whole = await _read_body(reader, headers, exchange)
    if exchange.status != 200:
        exchange.outcome = Outcome.HTTP_ERROR
        exchange.detail = f"{exchange.status} {payload[:300].decode(errors='replace')}"
    elif headers.get("content-type", "").startswith("text/event-stream"):
        judge_stream(payload, whole, body["max_tokens"], exchange)
    else:
        judge_plain(payload, whole, exchange)


async def _read_body(reader, headers: dict[str, str], exchange: Exchange) -> tuple[bytes, bool]:
    """The body, and whether it ended where its framing says."""
    parts: list[bytes] = []

    async def take(count: int) -> None:
        while count > 0:
            part = await reader.read(count)
            if not part:
                raise EOFError
            exchange.first_byte = exchange.first_byte or time.monotonic()
            parts.append(part)
            count -= len(part)

    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while (size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)) > 0:
                await take(size)
                await reader.readexactly(2)
        elif "content-length" in headers:
            await take(int(headers["content-length"]))
        else:
            while part := await reader.read(1 << 16):
                parts.append(part)
        return b"".join(parts), True
    except (EOFError, OSError, ValueError, asyncio.IncompleteReadError):
        return b"".join(parts), False


def judge_stream(payload: bytes, whole: bool, tokens_asked: int, exchange: Exchange) -> None:
    """Reads the events and decides what a client would believe, against what is true."""
    error = None
    done = False
    finish_reason = None
    for line in payload.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue  # the torn last line of a cut stream
        error = error or event.get("error")
        for choice in event.get("choices", []):
            content = choice.get("delta", {}).get("content") or ""
            exchange.text += content
            exchange.chunks += content != ""
            finish_reason = choice.get("finish_reason") or finish_reason
        _take_usage(event.get("usage"), exchange)
    complete = finish_reason == "length" and exchange.completion_tokens == tokens_asked
    if done and error is None and complete and whole:
        exchange.outcome = Outcome.OK
    elif done:
        exchange.outcome = Outcome.FALSE_DONE
    elif error is not None:
        exchange.outcome = Outcome.ERROR_EVENT
    else:
        exchange.outcome = Outcome.ENDS_SILENTLY if whole else Outcome.CUT_MIDSTREAM
    if exchange.outcome is not Outcome.OK:
        exchange.detail = f"{exchange.chunks} chunks, finish {finish_reason}, error {error}"


def judge_plain(payload: bytes, whole: bool, exchange: Exchange) -> None:
    """A reply that is not streamed is an answer if it is whole and has a choice that ended."""
    try:
        reply = json.loads(payload)
        choice = reply["choices"][0]
        exchange.text = choice["message"]["content"] or ""
        _take_usage(reply["usage"], exchange)
        ended = choice["finish_reason"] == "length"
    except (ValueError, LookupError, TypeError):
        ended = False
    if ended and whole:
        exchange.outcome = Outcome.OK
    elif not whole:
        exchange.outcome, exchange.detail = Outcome.CUT_UNANSWERED, "inside a plain body"
    else:
        exchange.outcome, exchange.detail = Outcome.BAD_BODY, payload[:300].decode(errors="replace")


def _take_usage(usage: dict | None, exchange: Exchange) -> None:
    if usage:
        exchange.prompt_tokens = usage["prompt_tokens"]
        exchange.completion_tokens = usage["completion_tokens"]
        exchange.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
