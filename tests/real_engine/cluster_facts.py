"""What the replicas say of themselves on `GET /cluster` of their admin listeners."""

import json
import time
import urllib.request
from collections.abc import Callable

from fleet import Process

AGREE_MAX_S = 30


def cluster(admin_url: str) -> dict:
    """One replica's picture of the cluster."""
    with urllib.request.urlopen(f"{admin_url}/cluster", timeout=5) as reply:
        return json.load(reply)


def live_replicas(view: dict) -> set[str]:
    """The ids of the replicas believed alive, the speaker among them."""
    return {replica["id"] for replica in view["replicas"] if replica["live"]} | {view["replica"]}


def running(view: dict) -> int:
    """Requests believed to be in flight, over all endpoints."""
    return sum(endpoint["running"] for endpoint in view["endpoints"])


def seconds_until(
    admin_urls: list[str], holds: Callable[[dict], bool], seconds_max: float = AGREE_MAX_S
) -> float | None:
    """Waits until `holds(view)` is true on every replica: the seconds this took, None if too many."""
    started = time.monotonic()
    while True:
        agreed = all(holds(cluster(url)) for url in admin_urls)
        waited = time.monotonic() - started
        if agreed:
            return waited
        if waited > seconds_max:
            return None
        time.sleep(0.05)


def wait_for_whole(replicas: list[Process]) -> None:
    """Waits until every replica believes every other one alive."""
    admins = [replica.admin_url for replica in replicas]
    if seconds_until(admins, lambda view: len(live_replicas(view)) == len(replicas)) is None:
        raise RuntimeError(f"the replicas did not all find each other: {admins}")


def metric(replicas: list[Process], name: str) -> float:
    """A counter's sum over replicas and series."""
    total = 0.0
    for replica in replicas:
        with urllib.request.urlopen(f"{replica.admin_url}/metrics", timeout=5) as reply:
            for line in reply.read().decode().splitlines():
                series, _, value = line.rpartition(" ")
                if series.partition("{")[0] == f"grapevine_{name}":
                    total += float(value)
    return total
