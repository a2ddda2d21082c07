"""What the engines themselves say: the truth that the router's own figures can't colour."""

import dataclasses
import pathlib
import re
import urllib.request

from fleet import Process

# `Received request chatcmpl-ID: params ...`; the id is the client's X-Request-Id, kept by the router.
ARRIVAL = re.compile(rb"Received request (?:chatcmpl|cmpl)-(\S+?): ")


@dataclasses.dataclass(frozen=True)
class Counters:
    """An engine's counters since its start, summed over its ranks."""

    prefix_queries_tokens: float
    prefix_hits_tokens: float
    running: float
    waiting: float

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(
            self.prefix_queries_tokens - before.prefix_queries_tokens,
            self.prefix_hits_tokens - before.prefix_hits_tokens,
            self.running,
            self.waiting,
        )


def counters(engine: Process) -> Counters:
    """Reads the engine's metrics page."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=5) as reply:
        page = reply.read().decode()

    def total(name: str) -> float:
        lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, flags=re.M)
        if not lines:
            raise LookupError(f"{engine.name} reports no {name}")
        return sum(float(value) for value in lines)

    return Counters(
        total("vllm:prefix_cache_queries_total"),
        total("vllm:prefix_cache_hits_total"),
        total("vllm:num_requests_running"),
        total("vllm:num_requests_waiting"),
    )


def arrivals(logs: dict[str, list[pathlib.Path]]) -> dict[str, list[str]]:
    """For every request id the engines it reached, in no order; `logs` are each engine's log files."""
    reached: dict[str, list[str]] = {}
    for engine, paths in logs.items():
        for path in paths:
            for match in ARRIVAL.finditer(path.read_bytes()):
                reached.setdefault(match.group(1).decode(), []).append(engine)
    return reached
