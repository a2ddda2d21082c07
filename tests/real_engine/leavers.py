"""Clients that leave: at moments spread from before the prefill to after the first tokens.

One request that stays is measured first; the others are as long, and each is left at its own share of that time.
"""

import asyncio
import json
import random
import time
import urllib.parse

import prompts
from wire_client import Outcome, chat

NAME = "leaver"
LEAVERS = 48
AT_ONCE = 4
PROMPT_BYTES = 5000
ANSWER_TOKENS = 48
STAY_MAX_S = 120


def _body(number: int, stream: bool) -> dict:
    text = prompts.words(random.Random(f"{NAME} {number}"), PROMPT_BYTES)
    return prompts.chat_body([{"role": "user", "content": text}], ANSWER_TOKENS, stream)


async def play(url: str) -> dict:
    """Plays them, a few at once, half of them streams; a request that stays comes before and after."""
    stayed = [await chat(url, _body(-1, stream=True), f"stayed-{NAME}-1", STAY_MAX_S)]
    stayed.append(await chat(url, _body(-2, stream=True), f"stayed-{NAME}-2", STAY_MAX_S))
    whole_s = stayed[-1].ended - stayed[-1].began
    moments = [whole_s * number / LEAVERS for number in range(LEAVERS)]
    waiting = iter(enumerate(moments))

    async def leave_some() -> None:
        for number, after_s in waiting:
            await _leave(url, _body(number, stream=number % 2 == 0), f"{NAME}-{number}", after_s)

    await asyncio.gather(*(leave_some() for _ in range(AT_ONCE)))
    stayed.append(await chat(url, _body(-3, stream=True), f"stayed-{NAME}-3", STAY_MAX_S))
    return {
        "leavers": LEAVERS,
        "whole_request_s": whole_s,
        "stayed_failed": sum(exchange.outcome is not Outcome.OK for exchange in stayed),
    }


async def _leave(url: str, body: dict, request_id: str, after_s: float) -> None:
    address = urllib.parse.urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"Host: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    sent = time.monotonic()
    writer.write(head.encode() + payload)
    await writer.drain()
    await asyncio.sleep(max(0.0, sent + after_s - time.monotonic()))
    writer.close()
