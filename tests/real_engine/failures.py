"""Processes die under load: what did the clients see?

A scenario is one death. While closed-loop clients keep streamed and plain requests open, it happens;
then every exchange is judged against what is promised for that kind of death (`Scenario.forgives`).
"""

import asyncio
import collections
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable

import engine_facts
import prompts
from fleet import Fleet, Process, children_named
from wire_client import BROKEN_PROMISES, CUTS, Exchange, Outcome, chat

CLIENTS = 8
BEFORE_S = 6.0  # load before the death
AFTER_S = 12.0  # and after it; requests open at the end are awaited
ANSWER_TOKENS = 200  # long enough that most requests are open at any moment
PROMPT_BYTES = 800
CLIENT_LIMIT_S = 90
TEXTS_CHECKED_MAX = 12  # answers asked for again, to compare their texts


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One kind of death."""

    name: str
    what: str
    victim: str  # "replica" or "engine"
    act: Callable[[Fleet, Process], None]
    forgives: Callable[[Exchange, float], bool]  # an exchange that failed, the moment of the death


def _open_at(exchange: Exchange, moment: float) -> bool:
    return exchange.began <= moment <= exchange.ended


def _cut_with_its_replica(exchange: Exchange, moment: float) -> bool:
    return _open_at(exchange, moment) and exchange.outcome in CUTS


def _told_of_broken_stream(exchange: Exchange, moment: float) -> bool:
    return _open_at(exchange, moment) and exchange.stream and exchange.outcome is Outcome.ERROR_EVENT


def _nothing(_exchange: Exchange, _moment: float) -> bool:
    return False


def _kill_engine_core(_fleet: Fleet, engine: Process) -> None:
    for pid in children_named(engine.popen.pid, "EngineCore"):
        os.kill(pid, signal.SIGKILL)


SCENARIOS = [
    Scenario("replica-kill", "kill -9 of a replica", "replica", Fleet.kill, _cut_with_its_replica),
    Scenario("replica-term", "SIGTERM to a replica", "replica", Fleet.stop, _nothing),
    Scenario("engine-kill", "kill -9 of an engine", "engine", Fleet.kill, _told_of_broken_stream),
    Scenario("engine-term", "SIGTERM to an engine", "engine", Fleet.stop, _told_of_broken_stream),
    Scenario(
        "engine-core-kill",
        "kill -9 of an engine's core, its HTTP server left",
        "engine",
        _kill_engine_core,
        _told_of_broken_stream,
    ),
]


async def run_scenario(
    label: str,
    scenario: Scenario,
    url: str,
    fleet: Fleet,
    victim: Process,
    survivor: Process,
    engine_logs: dict,
) -> dict:
    """Plays one scenario. `survivor` is an engine that lives on: it is asked again afterwards."""
    name = f"{label}-{scenario.name}"
    played: list[tuple[dict, Exchange]] = []
    started = time.monotonic()
    stop_at = started + BEFORE_S + AFTER_S

    async def client(number: int) -> None:
        turn = 0
        while time.monotonic() < stop_at:
            text = prompts.words(random.Random(f"{name} {number} {turn}"), PROMPT_BYTES)
            stream = (number + turn) % 2 == 0
            body = prompts.chat_body([{"role": "user", "content": text}], ANSWER_TOKENS, stream)
            exchange = await chat(url, body, f"{name}-{number}-{turn}", CLIENT_LIMIT_S)
            played.append((body, exchange))
            turn += 1
            if exchange.outcome is not Outcome.OK:
                await asyncio.sleep(0.1)  # a client that fails at once must not spin

    async def death() -> float:
        await asyncio.sleep(BEFORE_S)
        moment = time.monotonic()
        await asyncio.to_thread(scenario.act, fleet, victim)
        return moment

    moment, *_ = await asyncio.gather(death(), *(client(number) for number in range(CLIENTS)))
    reached = engine_facts.arrivals(engine_logs)
    summary = _summary(scenario, [exchange for _, exchange in played], moment, reached)
    summary |= await _compare_texts(survivor.url, played, reached)
    return summary


def _summary(scenario: Scenario, exchanges: list[Exchange], moment: float, reached: dict) -> dict:
    failed = [e for e in exchanges if e.outcome is not Outcome.OK]
    seen = {kind: collections.Counter() for kind in ("stream", "plain")}
    for exchange in exchanges:
        seen["stream" if exchange.stream else "plain"][exchange.outcome.value] += 1
    unforgiven = [e for e in failed if not scenario.forgives(e, moment)]
    return {
        "what": scenario.what,
        "requests": len(exchanges),
        "seen": {kind: dict(counts) for kind, counts in seen.items()},
        "open_at_death": sum(_open_at(e, moment) for e in exchanges),
        "begun_after_death": sum(e.began > moment for e in exchanges),
        "failed": len(failed),
        "failed_begun_after_death": sum(e.began > moment for e in failed),
        "failed_without_a_byte": sum(e.first_byte is None for e in failed),
        "broken_promises": sum(e.outcome in BROKEN_PROMISES for e in failed),
        "not_forgiven": len(unforgiven),
        "not_forgiven_examples": [_describe(e, moment) for e in unforgiven[:8]],
        "failed_examples": [_describe(e, moment) for e in failed[:8]],
        "moved_and_answered": sum(
            e.outcome is Outcome.OK and len(reached.get(e.request_id, [])) > 1 for e in exchanges
        ),
        "longest_request_s": max(e.ended - e.began for e in exchanges),
        "longest_request_begun_after_death_s": max(
            (e.ended - e.began for e in exchanges if e.began > moment), default=0.0
        ),
    }


def _describe(exchange: Exchange, moment: float) -> str:
    kind = "stream" if exchange.stream else "plain"
    first = "no byte" if exchange.first_byte is None else f"first byte {exchange.first_byte - moment:+.2f} s"
    return (
        f"{exchange.request_id} {kind}, begun {exchange.began - moment:+.2f} s, {first}, "
        f"ended {exchange.ended - moment:+.2f} s: {exchange.outcome}: {exchange.detail}"
    )


async def _compare_texts(engine_url: str, played: list[tuple[dict, Exchange]], reached: dict) -> dict:
    """Asks an engine directly for answers that had to move, and for as many that had not.

    The answers that stayed are the control: batching alone may flip a near tie of a greedy answer.
    """
    answered = [(body, e) for body, e in played if e.outcome is Outcome.OK]
    moved = [pair for pair in answered if len(reached.get(pair[1].request_id, [])) > 1]
    stayed = [pair for pair in answered if len(reached.get(pair[1].request_id, [])) == 1]
    result = {}
    for label, pairs in (("moved", moved), ("stayed", stayed)):
        differ = 0
        for body, exchange in pairs[:TEXTS_CHECKED_MAX]:
            again = await chat(engine_url, body, f"again-{exchange.request_id}", CLIENT_LIMIT_S)
            differ += again.text != exchange.text
        result[f"{label}_texts_checked"] = min(len(pairs), TEXTS_CHECKED_MAX)
        result[f"{label}_texts_differ"] = differ
    return result


async def seconds_until_used(url: str, engine: Process, seconds_max: float) -> float | None:
    """Sends new short prompts, a few at a time, until one reaches `engine`; None if none does."""
    started = time.monotonic()
    asked = 0
    while time.monotonic() - started < seconds_max:
        bodies = []
        for _ in range(CLIENTS):
            text = prompts.words(random.Random(f"{engine.log.name} {asked}"), PROMPT_BYTES)
            bodies.append(prompts.chat_body([{"role": "user", "content": text}], 8, stream=False))
            asked += 1
        asking = (
            chat(url, body, f"back-{engine.log.stem}-{asked}-{n}", CLIENT_LIMIT_S)
            for n, body in enumerate(bodies)
        )
        await asyncio.gather(*asking)
        if any(rid.startswith("back-") for rid in engine_facts.arrivals({engine.name: [engine.log]})):
            return time.monotonic() - started
    return None
