"""What must hold of what was seen. Pure: figures in, verdicts out."""

import dataclasses
import pathlib
from collections.abc import Iterator

AT_HOME_RATIO_MIN = 0.98
BUSIEST_OVER_MEAN_MAX = 1.35
CHARGES_GONE_MAX_S = 2.0
USED_AGAIN_MAX_S = 30.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One check: what was wanted, what was seen, whether it holds."""

    check: str
    wanted: str
    seen: object
    holds: bool


def none_of(what: str, seen) -> Verdict:
    """Nothing of the kind may have happened; `seen` is a count or a list."""
    return Verdict(what, "none", seen, seen == 0 or seen == [])


def libraries(seen: dict, alone: dict | None) -> Iterator[Verdict]:
    """The client libraries; `alone` is what they saw at the engines themselves."""
    cases = seen["cases"]
    yield Verdict("client libraries: cases", "some", len(cases), len(cases) > 0)
    yield none_of("client libraries: cases that raise", [n for n, case in cases.items() if "raised" in case])
    if alone:
        differ = [name for name, case in alone["cases"].items() if cases.get(name) != case]
        yield none_of("client libraries: cases that differ from the engine's own", differ)
    for path, extra in seen["extra"].items():
        clean = extra["exit_code"] == 0 and not extra["failed"]
        yield Verdict(f"{pathlib.Path(path).name}", "exit 0, no FAIL", extra["failed"], clean)


def bench(name: str, seen: dict) -> Iterator[Verdict]:
    """One run of `vllm bench serve`."""
    clean = seen["failed"] == 0 and seen["completed"] > 0
    yield Verdict(f"vllm bench serve, {name}: failed", "none", seen["failed"], clean)


def chats(pace: str, seen: dict) -> Iterator[Verdict]:
    """The multi-turn chats at one pace."""
    yield none_of(f"chats {pace}: failed", seen["failed"])
    for figure, what in (("at_home", "on their engine"), ("warm", "warm")):
        ratio = seen[f"follow_ups_{figure}_ratio"]
        what = f"chats {pace}: follow-ups {what}"
        yield Verdict(what, f">= {AT_HOME_RATIO_MIN}", round(ratio, 4), ratio >= AT_HOME_RATIO_MIN)
    if pace == "spaced":  # a few chats at once are too few to spread evenly
        spread = seen["busiest_over_mean"]
        what = f"chats {pace}: busiest engine over the mean"
        yield Verdict(what, f"<= {BUSIEST_OVER_MEAN_MAX}", round(spread, 3), spread <= BUSIEST_OVER_MEAN_MAX)


def death(seen: dict) -> Iterator[Verdict]:
    """One death under load."""
    what = seen["what"]
    # Else what follows would hold for nothing.
    found = seen["open_at_victim"]
    yield Verdict(f"{what}: requests that it found open there", "some", found, found > 0)
    yield none_of(f"{what}: outcomes that are not promised", seen["not_forgiven"])
    yield none_of(f"{what}: requests begun after it that fail", seen["failed_begun_after_death"])
    yield none_of(f"{what}: ends that look whole and are not", seen["broken_promises"])
    gone = seen["charges_gone_after_s"]
    holds = gone is not None and gone <= CHARGES_GONE_MAX_S
    yield Verdict(f"{what}: charges gone after the load", f"<= {CHARGES_GONE_MAX_S} s", gone, holds)
    if "requests_again_after_s" in seen:
        again = seen["requests_again_after_s"]
        yield Verdict(f"{what}: restarted, used again", f"<= {USED_AGAIN_MAX_S} s", again, again is not None)
