"""Multi-turn chats: is a follow-up turn sent to the engine that has the chat in its cache?

Every turn is a connection of its own, so the balancer spreads the turns of one chat over the
replicas, and no header names the session: the replicas must agree by the prompt alone. Which engine
served a turn is read from the engines' logs, what was warm from their counters and from `usage`.
"""

import asyncio
import collections
import dataclasses
import itertools
import pathlib
import random
import statistics
from typing import Literal

import engine_facts
import prompts
from fleet import Process
from wire_client import Exchange, Outcome, chat

FIRST_TURN_BYTES = 2500
LATER_TURN_BYTES = 400
ANSWER_TOKENS = 16
BLOCK_TOKENS = 32  # the engines' --block-size
SETTLE_S = 2.0  # the engines' counters lag by about a second


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to play. Each of `clients` plays its share of the chats one request at a time.

    `back-to-back` goes chat by chat, a turn follows the answer at once; `spaced` goes turn by turn, as
    with people: there is time between the turns of a chat.
    """

    seed: str
    chats: int
    turns: int
    clients: int
    pace: Literal["spaced", "back-to-back"]

    def order(self, client: int) -> list[int]:
        """The chats whose turns one client plays, in order."""
        share = range(client, self.chats, self.clients)
        if self.pace == "back-to-back":
            return [number for number in share for _ in range(self.turns)]
        return [number for _ in range(self.turns) for number in share]


async def run_chats(
    url: str, engines: list[Process], engine_logs: dict[str, list[pathlib.Path]], plan: Plan
) -> dict:
    """Plays the chats and says what became of their follow-up turns."""
    before = [engine_facts.counters(engine) for engine in engines]
    played: list[list[Exchange]] = [[] for _ in range(plan.chats)]
    histories = [_opening(plan.seed, number) for number in range(plan.chats)]

    async def client(client_number: int) -> None:
        for number in plan.order(client_number):
            await _turn(url, plan.seed, number, histories[number], played[number])

    await asyncio.gather(*(client(number) for number in range(plan.clients)))
    await asyncio.sleep(SETTLE_S)
    gained = [engine_facts.counters(engine) - was for engine, was in zip(engines, before, strict=True)]
    return _summary(played, engine_facts.arrivals(engine_logs), gained, engines)


def _opening(seed: str, number: int) -> list[dict]:
    first = prompts.words(random.Random(f"{seed} {number}"), FIRST_TURN_BYTES)
    return [prompts.system_message(seed), {"role": "user", "content": first}]


async def _turn(url: str, seed: str, number: int, history: list[dict], played: list[Exchange]) -> None:
    turn = len(played)
    if turn > 0:
        question = prompts.words(random.Random(f"{seed} {number} {turn}"), LATER_TURN_BYTES)
        history.append({"role": "user", "content": question})
    body = prompts.chat_body(history, ANSWER_TOKENS, stream=turn % 2 == 0)
    exchange = await chat(url, body, f"{seed}-{number}-{turn}")
    played.append(exchange)
    history.append({"role": "assistant", "content": exchange.text})


def is_warm(before: Exchange, turn: Exchange) -> bool:
    """Whether all full blocks of the turn before were in the engine's cache (its last token may join
    the answer's first one, so it does not count)."""
    blocks = (before.prompt_tokens - 1) // BLOCK_TOKENS
    return turn.cached_tokens >= blocks * BLOCK_TOKENS


def _summary(played, reached, gained, engines) -> dict:
    pairs = [(chat[0], before, turn) for chat in played for before, turn in itertools.pairwise(chat)]
    everything = [exchange for chat in played for exchange in chat]
    failures = [f"{e.outcome}: {e.detail}" for e in everything if e.outcome is not Outcome.OK]
    engine_of = {e.request_id: reached.get(e.request_id, ["none"])[-1] for e in everything}
    per_engine = collections.Counter({engine.name: 0 for engine in engines})
    per_engine.update(engine_of.values())
    at_home = sum(engine_of[first.request_id] == engine_of[turn.request_id] for first, _, turn in pairs)
    queries = sum(gain.prefix_queries_tokens for gain in gained)
    waits = [e.first_byte - e.began for e in everything if e.stream and e.first_byte]
    return {
        "requests": len(everything),
        "failed": len(failures),
        "failures": sorted(set(failures))[:5],
        "follow_ups": len(pairs),
        "follow_ups_at_home_ratio": at_home / len(pairs),
        "follow_ups_warm_ratio": sum(is_warm(before, turn) for _, before, turn in pairs) / len(pairs),
        "engine_prefix_hit_ratio": sum(gain.prefix_hits_tokens for gain in gained) / queries,
        "engine_prefix_queries_tokens": queries,
        "requests_per_engine": dict(per_engine),
        "busiest_over_mean": max(per_engine.values()) / statistics.mean(per_engine.values()),
        "sent_twice": sum(len(reached.get(e.request_id, [])) > 1 for e in everything),
        "stream_first_byte_mean_ms": statistics.mean(waits) * 1000,
    }
