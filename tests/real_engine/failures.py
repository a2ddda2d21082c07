"""Processes die under load: what did the clients see?

A scenario is one death. While closed-loop clients keep streamed and plain requests open, it happens;
then every exchange is judged against what is promised for that kind of death (`Scenario.forgives`).
"""

import asyncio
import collections
import dataclasses
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable
from typing import Literal

import cluster_facts
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
class Death:
    """When it happened: not before the one moment, not after the other."""

    not_before: float
    not_after: float

    def found_open(self, exchange: Exchange) -> bool:
        """Whether the exchange may have been under way."""
        return exchange.began <= self.not_after and exchange.ended >= self.not_before

    def came_before(self, exchange: Exchange) -> bool:
        """Whether the exchange began after it."""
        return exchange.began > self.not_after


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One kind of death."""

    name: str
    what: str
    victim: Literal["replica", "engine"]
    strike: Callable[[Process], None]
    forgives: Callable[[Exchange, Death], bool]  # whether this failure is within what is promised


def _kill(process: Process) -> None:
    process.kill()
    process.popen.wait()


def _freeze(process: Process) -> None:
    os.killpg(process.popen.pid, signal.SIGSTOP)


def _kill_engine_core(engine: Process) -> None:
    for pid in children_named(engine.popen.pid, "EngineCore"):
        os.kill(pid, signal.SIGKILL)


def _cut_with_its_replica(exchange: Exchange, death: Death) -> bool:
    return death.found_open(exchange) and exchange.outcome in CUTS


def _told_of_broken_stream(exchange: Exchange, death: Death) -> bool:
    return death.found_open(exchange) and exchange.stream and exchange.outcome is Outcome.ERROR_EVENT


def _nothing(_exchange: Exchange, _death: Death) -> bool:
    return False


SCENARIOS = [
    Scenario("replica-kill", "kill -9 of a replica", "replica", _kill, _cut_with_its_replica),
    Scenario("replica-term", "SIGTERM to a replica", "replica", Process.terminate, _nothing),
    Scenario("engine-kill", "kill -9 of an engine", "engine", _kill, _told_of_broken_stream),
    Scenario("engine-term", "SIGTERM to an engine", "engine", Process.terminate, _told_of_broken_stream),
    Scenario(
        "engine-core-kill",
        "kill -9 of an engine's core, its HTTP server left",
        "engine",
        _kill_engine_core,
        _told_of_broken_stream,
    ),
]

# Of the engines of a pair, by their role. KV that was handed over stays with who decodes, so without who computes
# prompts nothing may fail; without who decodes, a stream that had begun ends.
PAIR_SCENARIOS = [
    ("prefill", Scenario("prefill-kill", "kill -9 of the prefill engine", "engine", _kill, _nothing)),
    ("prefill", Scenario("prefill-freeze", "SIGSTOP to the prefill engine", "engine", _freeze, _nothing)),
    (
        "decode",
        Scenario("decode-kill", "kill -9 of the decode engine", "engine", _kill, _told_of_broken_stream),
    ),
]


async def run_scenario(
    label: str,
    scenario: Scenario,
    url: str,
    fleet: Fleet,
    victims: list[Process],
    engines: list[Process],
    engine_logs: dict[str, list[pathlib.Path]],
    legs: int = 1,
) -> tuple[Process, dict]:
    """Plays one scenario; the victim is the one of `victims` that has most requests open.

    Returns it, ended, and what was seen. A request has moved if engines saw it more than `legs` times.
    """
    load = Load(f"{label}-{scenario.name}", url)

    async def death() -> tuple[Process, int, Death]:
        await asyncio.sleep(BEFORE_S)
        busy = {each.name: _open_at(each, load, engine_logs) for each in victims}
        victim = max(victims, key=lambda each: busy[each.name])
        not_before = time.monotonic()
        await asyncio.to_thread(scenario.strike, victim)
        at = Death(not_before, time.monotonic())
        await asyncio.to_thread(fleet.wait_or_kill, victim)
        return victim, busy[victim.name], at

    (victim, open_at_victim, at), _ = await asyncio.gather(death(), load.play())
    load.write(fleet.out / f"exchanges-{load.name}.jsonl", at)
    reached = engine_facts.arrivals(engine_logs)
    seen = {"what": scenario.what, "victim": victim.name, "open_at_victim": open_at_victim}
    moved = {request_id for request_id, engines in reached.items() if len(engines) > legs}
    seen |= _summary(scenario, [exchange for _, exchange in load.played], at, moved)
    survivor = next(engine for engine in engines if engine is not victim)
    return victim, seen | await _compare_texts(survivor.url, load.played, moved)


class Load:
    """Clients in closed loop, half of their requests streamed."""

    def __init__(self, name: str, url: str):
        self.name = name
        self.url = url
        self.played: list[tuple[dict, Exchange]] = []
        self.open: set[str] = set()

    async def play(self) -> None:
        """Plays it to its end."""
        stop_at = time.monotonic() + BEFORE_S + AFTER_S
        await asyncio.gather(*(self._client(number, stop_at) for number in range(CLIENTS)))

    async def _client(self, number: int, stop_at: float) -> None:
        turn = 0
        while time.monotonic() < stop_at:
            text = prompts.words(random.Random(f"{self.name} {number} {turn}"), PROMPT_BYTES)
            stream = (number + turn) % 2 == 0
            body = prompts.chat_body([{"role": "user", "content": text}], ANSWER_TOKENS, stream)
            request_id = f"{self.name}-{number}-{turn}"
            self.open.add(request_id)
            exchange = await chat(self.url, body, request_id, CLIENT_LIMIT_S)
            self.open.remove(request_id)
            self.played.append((body, exchange))
            turn += 1
            if exchange.outcome is not Outcome.OK:
                await asyncio.sleep(0.1)  # a client that fails at once must not spin

    def write(self, path: pathlib.Path, death: Death) -> None:
        """Keeps every exchange, its times counted from the death."""
        with path.open("w") as file:
            for _, exchange in sorted(self.played, key=lambda pair: pair[1].began):
                line = dataclasses.asdict(exchange)
                for moment in ("began", "first_byte", "ended"):
                    if line[moment] is not None:
                        line[moment] = round(line[moment] - death.not_before, 4)
                del line["text"]
                file.write(json.dumps(line) + "\n")


def _open_at(process: Process, load: Load, engine_logs: dict[str, list[pathlib.Path]]) -> int:
    """Requests open at a replica by its own count, at an engine by what it logged of them."""
    if process.admin_url:
        return cluster_facts.cluster(process.admin_url)["in_flight"]
    reached = engine_facts.arrivals({process.name: engine_logs[process.name]})
    return sum(request_id in reached for request_id in load.open)


def _summary(scenario: Scenario, exchanges: list[Exchange], death: Death, moved: set[str]) -> dict:
    failed = [e for e in exchanges if e.outcome is not Outcome.OK]
    seen = {kind: collections.Counter() for kind in ("stream", "plain")}
    for exchange in exchanges:
        seen["stream" if exchange.stream else "plain"][exchange.outcome.value] += 1
    unforgiven = [e for e in failed if not scenario.forgives(e, death)]
    return {
        "requests": len(exchanges),
        "seen": {kind: dict(counts) for kind, counts in seen.items()},
        "open_at_death": sum(death.found_open(e) for e in exchanges),
        "begun_after_death": sum(death.came_before(e) for e in exchanges),
        "failed": len(failed),
        "failed_begun_after_death": sum(death.came_before(e) for e in failed),
        "failed_without_a_byte": sum(e.first_byte is None for e in failed),
        "broken_promises": sum(e.outcome in BROKEN_PROMISES for e in failed),
        "not_forgiven": len(unforgiven),
        "not_forgiven_examples": [_describe(e, death.not_before) for e in unforgiven[:8]],
        "failed_examples": [_describe(e, death.not_before) for e in failed[:8]],
        "moved_and_answered": sum(
            e.outcome is Outcome.OK and e.request_id in moved for e in exchanges
        ),
        "longest_request_s": max(e.ended - e.began for e in exchanges),
        "longest_request_begun_after_death_s": max(
            (e.ended - e.began for e in exchanges if death.came_before(e)), default=0.0
        ),
    }


def _describe(exchange: Exchange, moment: float) -> str:
    kind = "stream" if exchange.stream else "plain"
    first = "no byte" if exchange.first_byte is None else f"first byte {exchange.first_byte - moment:+.2f} s"
    return (
        f"{exchange.request_id} {kind}, begun {exchange.began - moment:+.2f} s, {first}, "
        f"ended {exchange.ended - moment:+.2f} s: {exchange.outcome}: {exchange.detail}"
    )


async def _compare_texts(engine_url: str, played: list[tuple[dict, Exchange]], moved: set[str]) -> dict:
    """Asks an engine directly for answers that had to move, and for as many that had not.

    The answers that stayed are the control: batching alone may flip a near tie of a greedy answer.
    """
    answered = [(body, e) for body, e in played if e.outcome is Outcome.OK]
    pairs_by_label = {
        "moved": [pair for pair in answered if pair[1].request_id in moved],
        "stayed": [pair for pair in answered if pair[1].request_id not in moved],
    }
    result = {}
    for label, pairs in pairs_by_label.items():
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
