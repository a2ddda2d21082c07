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
    page = _page(engine)
    return Counters(
        _total(page, engine, "vllm:prefix_cache_queries_total"),
        _total(page, engine, "vllm:prefix_cache_hits_total"),
        _total(page, engine, "vllm:num_requests_running"),
        _total(page, engine, "vllm:num_requests_waiting"),
    )


def metric(engine: Process, name: str) -> float:
    """One figure of the engine's, summed over its series."""
    return _total(_page(engine), engine, name)


def prompt_tokens(engine: Process) -> dict[str, float]:
    """Prompt tokens that the engine took in since its start, by where their KV came from."""
    series = re.findall(r'^vllm:prompt_tokens_by_source_total{.*source="(\w+)"} (\S+)$', _page(engine), flags=re.M)
    if not series:
        raise LookupError(f"{engine.name} does not tell the source of prompt tokens")
    return {source: float(value) for source, value in series}


def kv_in_use(engine: Process) -> float:
    """The share of its KV blocks that requests hold, kept ones for other engines among them.

    The engine refreshes this figure when it computes something, so it is given one token to compute.
    """
    body = b'{"model":"tiny","prompt":[300],"max_tokens":1}'
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{engine.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()
    return metric(engine, "vllm:kv_cache_usage_perc")


def _page(engine: Process) -> str:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as reply:
        return reply.read().decode()


def _total(page: str, engine: Process, name: str) -> float:
    lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, flags=re.M)
    if not lines:
        raise LookupError(f"{engine.name} reports no {name}")
    return sum(float(value) for value in lines)


def arrivals(logs: dict[str, list[pathlib.Path]]) -> dict[str, list[str]]:
    """For every request id the engines it reached, in no order; `logs` are each engine's log files."""
    reached: dict[str, list[str]] = {}
    for engine, paths in logs.items():
        for path in paths:
            for match in ARRIVAL.finditer(path.read_bytes()):
                reached.setdefault(match.group(1).decode(), []).append(engine)
    return reached
