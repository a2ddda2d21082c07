"""A real engine that computes prompts, a real one that answers, and a real cluster in front: is it as one engine?

Parts, in order (see README.md): answers, odd, leavers, then the deaths of failures.py. What the answers should be is
asked of a plain engine first, which then makes room.
"""

import argparse
import asyncio
import dataclasses
import json
import pathlib
import signal
import sys
import time

import answers
import cluster_facts
import engine_facts
import failures
import leavers
import pair_report
import pair_requests
import verdicts
from fleet import ENGINE_START_MAX_S, REPLICA_START_MAX_S, Fleet, Process
from telling import about, end_once, say

REPLICAS = 3
SETTLE_S = 2.0  # the engines' counters lag by about a second
# A number computed from KV that came over the wire is the one computed in place, bit by bit; this leaves room for an
# engine that adds up in another order.
LOGPROB_TOLERANCE = 1e-5
PROBE_TIMEOUT_MS = 3_000  # two engines that take turns on a busy processor are late, not frozen
LEAVE_NOTHING_MAX_S = 10.0  # well below the lease of 30 s after which vLLM frees KV that nobody fetched
PARTS = ["answers", "odd", "leavers", *(scenario.name for _, scenario in failures.PAIR_SCENARIOS)]


def main() -> int:
    """Plays the run; the exit code is 0 if every check holds."""
    options = parse_options()
    signal.signal(signal.SIGTERM, end_once)
    options.out.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(options.out, options.engine_dir, options.replica_binary)
    run = Pairs(options, fleet)
    try:
        run.play()
    except Exception as error:  # what was seen until then is worth keeping
        run.result["stopped_by"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        fleet.stop_all()
        run.write()
    return 0 if all(check["holds"] for check in run.result["checks"]) else 1


def parse_options() -> argparse.Namespace:
    """The command line, as pairs.sh passes it on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", type=pathlib.Path, required=True)
    parser.add_argument("--replica-binary", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="comma-separated; all by default: %(default)s"
    )
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


class Pairs:
    """The parts of the run, and the result they fill."""

    def __init__(self, options: argparse.Namespace, fleet: Fleet):
        self.options = options
        self.fleet = fleet
        self.result = {"about": about(options.engine_dir), "checks": []}
        self.requests = {
            "answers": pair_requests.compared() if "answers" in options.parts else [],
            "odd": pair_requests.odd() if "odd" in options.parts else [],
        }
        self.expected: dict[str, answers.Answer] = {}
        self.engines: dict[str, Process] = {}
        self.logs: dict[str, list[pathlib.Path]] = {}
        self.replicas: list[Process] = []
        self.url = ""

    def play(self) -> None:
        """Asks the plain engine, starts the pair and the cluster, and plays the parts."""
        if any(self.requests.values()):
            self.ask_plain_engine()
        self.start_cluster()
        for part in ("answers", "odd"):
            if self.requests[part]:
                say(f"{part}: {len(self.requests[part])} requests through the cluster")
                self.result[part] = self.compare(part)
        if "answers" in self.result:
            self.note(judge_answers(self.result["answers"]))
        if "odd" in self.result:
            self.note(judge_odd(self.result["odd"]))
        if "leavers" in self.options.parts:
            say("leavers: clients that leave before, at and after the handoff")
            self.result["leavers"] = self.leave()
            self.note(judge_leavers(self.result["leavers"]))
        for role, scenario in failures.PAIR_SCENARIOS:
            if scenario.name in self.options.parts:
                seen = self.play_death(role, scenario)
                self.result.setdefault("deaths", {})[scenario.name] = seen
                self.note(verdicts.death(seen))

    def ask_plain_engine(self) -> None:
        """What the answers should be."""
        plain = self.fleet.start_engine("plain")
        self.fleet.wait_ready(plain, "/health", ENGINE_START_MAX_S)
        say(f"plain engine serves at {plain.url}")
        for request in [*self.requests["answers"], *self.requests["odd"]]:
            self.expected[request.name] = answers.ask(plain.url, request.path, request.body, "plain")
        self.fleet.stop(plain)

    def start_cluster(self) -> None:
        """Both engines, the replicas and the balancer."""
        for role in ("prefill", "decode"):
            self.engines[role] = self.fleet.start_engine(role, role=role)
        for role, engine in self.engines.items():
            self.fleet.wait_ready(engine, "/health", ENGINE_START_MAX_S)
            self.logs[role] = [engine.log]
            say(f"{role} engine serves at {engine.url}")
        flags = ("--split", "always", "--probe-timeout-ms", f"{PROBE_TIMEOUT_MS}")
        self.replicas = self.fleet.start_replicas(REPLICAS, list(self.engines.values()), flags)
        for replica in self.replicas:
            self.fleet.wait_ready(replica, "/readyz", REPLICA_START_MAX_S)
        cluster_facts.wait_for_whole(self.replicas)
        balancer = self.fleet.start_balancer("haproxy", self.replicas, "/readyz")
        self.fleet.wait_ready(balancer, "/readyz", REPLICA_START_MAX_S)
        self.url = balancer.url
        self.warm_up()

    def warm_up(self) -> None:
        """An engine's first requests of each kind take seconds, in which it answers no probe either."""
        deadline = time.monotonic() + ENGINE_START_MAX_S
        for request in pair_requests.compared()[:8]:
            body = request.body | {"cache_salt": "warm-up"}
            while answers.ask(self.url, request.path, body, "warm-up").status != 200:
                if time.monotonic() > deadline:
                    raise RuntimeError("the cluster does not answer")
                time.sleep(1.0)
        time.sleep(SETTLE_S)

    # The answers

    def compare(self, part: str) -> dict:
        """Asks everything of one part, one request after the other, and compares with the plain engine."""
        before = self.figures()
        asked = [
            self.compare_one(f"{part}-{number:03}", request) for number, request in enumerate(self.requests[part])
        ]
        time.sleep(SETTLE_S)
        after = self.figures()
        return {"requests": asked, "figures": {name: after[name] - before[name] for name in after}}

    def compare_one(self, request_id: str, request: pair_requests.Request) -> dict:
        """One request through the cluster."""
        answer = answers.ask(self.url, request.path, request.body, request_id)
        expected = self.expected[request.name]
        comparison = answers.compare(expected, answer)
        # The engines put a number behind the id, at least of texts, for each prompt of a list.
        reached = engine_facts.arrivals(self.logs)
        ids = [rid for rid in reached if rid == request_id or rid.startswith(f"{request_id}-")]
        visits = [engine for rid in ids for engine in reached[rid]]
        legs = {role: visits.count(role) for role in self.engines}
        if comparison.differences:
            say(f"differs: {request.name}: {comparison.differences[:3]}")
        return {
            "name": request.name,
            "stream": answer.stream,
            "status": answer.status,
            "equal": comparison.equal(LOGPROB_TOLERANCE),
            "differences": comparison.differences[:5],
            "numbers": comparison.logprobs,
            "number_difference_max": comparison.logprob_difference_max,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "cached_tokens_plain": expected.cached_tokens,
            "legs": legs,
            "split_wanted": request.split,
        }

    def figures(self) -> dict:
        """Counters of both engines and of the replicas."""
        figures = {}
        for role, engine in self.engines.items():
            for name, value in engine_facts.prompt_tokens(engine).items():
                figures[f"{role}_{name}_tokens"] = value
        figures["failed_transfers"] = engine_facts.metric(
            self.engines["decode"], "vllm:nixl_num_failed_transfers_total"
        )
        figures["expired"] = engine_facts.metric(
            self.engines["prefill"], "vllm:nixl_num_kv_expired_reqs_total"
        )
        for name in ("pd_fallbacks_total", "handoff_failures_total", "kv_released_total", "kv_stranded"):
            figures[name] = cluster_facts.metric(self.replicas, name)
        return figures

    # Clients that leave

    def leave(self) -> dict:
        """Plays them, then waits for both engines to hold nothing."""
        before = self.figures()
        seen = asyncio.run(leavers.play(self.url))
        started = time.monotonic()
        usage = {}
        while time.monotonic() - started < LEAVE_NOTHING_MAX_S:
            usage = {role: engine_facts.kv_in_use(engine) for role, engine in self.engines.items()}
            if not any(usage.values()):
                break
            time.sleep(0.2)
        seen["gone_after_s"] = None if any(usage.values()) else time.monotonic() - started
        seen["kv_in_use_ratio"] = usage
        reached = engine_facts.arrivals(self.logs)
        for role in self.engines:
            seen[f"reached_{role}"] = sum(
                rid.startswith(leavers.NAME) and role in engines for rid, engines in reached.items()
            )
        after = self.figures()
        seen["figures"] = {name: after[name] - before[name] for name in after}
        admins = [replica.admin_url for replica in self.replicas]
        seen["charges_gone_after_s"] = cluster_facts.seconds_until(
            admins, lambda view: cluster_facts.running(view) == 0
        )
        return seen

    # The deaths

    def play_death(self, role: str, scenario: failures.Scenario) -> dict:
        """Plays the death of one engine under load, brings it back and waits until it is used again."""
        say(f"{scenario.what}, under load")
        victim, seen = asyncio.run(
            failures.run_scenario(
                "pairs", scenario, self.url, self.fleet, [self.engines[role]], list(self.engines.values()),
                self.logs, legs=2,
            )
        )  # fmt: skip
        admins = [replica.admin_url for replica in self.replicas]
        seen["charges_gone_after_s"] = cluster_facts.seconds_until(
            admins, lambda view: cluster_facts.running(view) == 0
        )
        for name in ("kv_stranded", "pd_fallbacks_total", "handoff_failures_total"):
            seen[name] = cluster_facts.metric(self.replicas, name)
        engine = self.fleet.start_engine(role, int(victim.url.rsplit(":", 1)[1]), role)
        self.engines[role] = engine
        self.logs[role].append(engine.log)
        self.fleet.wait_ready(engine, "/health", ENGINE_START_MAX_S)
        seen["requests_again_after_s"] = asyncio.run(
            failures.seconds_until_used(self.url, engine, verdicts.USED_AGAIN_MAX_S)
        )
        return seen

    # The result

    def note(self, found) -> None:
        """Keeps verdicts and shows them."""
        for verdict in found:
            self.result["checks"].append(dataclasses.asdict(verdict))
            word = "holds" if verdict.holds else "FAILS"
            say(f"{word}: {verdict.check}: {verdict.seen} (wanted {verdict.wanted})")

    def write(self) -> None:
        """Writes result.json and result.md into the output directory."""
        text = json.dumps(self.result, indent=1, ensure_ascii=False)
        (self.options.out / "result.json").write_text(text + "\n")
        (self.options.out / "result.md").write_text(pair_report.markdown(self.result))
        say(f"results: {self.options.out}/result.json and result.md")


def judge_answers(seen: dict):
    """The requests that are compared one by one."""
    requests, figures = seen["requests"], seen["figures"]
    count = len(requests)
    equal = sum(each["equal"] for each in requests)
    yield verdicts.Verdict("answers equal to the plain engine's", f"{count}", equal, equal == count)
    odd_ones = [each["name"] for each in requests if each["legs"] != {"prefill": 1, "decode": 1}]
    yield verdicts.none_of("answers: requests not once at each engine", odd_ones)
    prompt = sum(each["prompt_tokens"] for each in requests)
    at_prefill = figures["prefill_local_compute_tokens"] + figures["prefill_local_cache_hit_tokens"]
    what = "answers: prompt tokens that the prefill engine took in"
    yield verdicts.Verdict(what, f"{prompt}", at_prefill, at_prefill == prompt)
    computed = figures["decode_local_compute_tokens"]
    yield verdicts.none_of("answers: prompt tokens that the decode engine computed", computed)
    for name in ("failed_transfers", "expired", "handoff_failures_total", "kv_stranded"):
        yield verdicts.none_of(f"answers: {name}", figures[name])


def judge_odd(seen: dict):
    """The odd requests."""
    requests = seen["requests"]
    yield verdicts.none_of("odd requests: differing", [e["name"] for e in requests if not e["equal"]])
    wanted = {True: {"prefill": 1, "decode": 1}, False: {"prefill": 0}}
    astray = [
        f"{each['name']} {each['legs']}"
        for each in requests
        if any(each["legs"][role] != legs for role, legs in wanted.get(each["split_wanted"], {}).items())
    ]
    yield verdicts.none_of("odd requests: not served as wanted, split or whole", astray)
    for name in ("failed_transfers", "expired", "handoff_failures_total", "kv_stranded"):
        yield verdicts.none_of(f"odd requests: {name}", seen["figures"][name])


def judge_leavers(seen: dict):
    """Clients that left."""
    yield verdicts.Verdict("leavers: reached the prefill engine", "some", seen["reached_prefill"], seen["reached_prefill"] > 0)
    held = seen["kv_in_use_ratio"]
    gone = seen["gone_after_s"]
    what = "leavers: both engines hold nothing"
    yield verdicts.Verdict(what, f"within {LEAVE_NOTHING_MAX_S} s", gone or held, gone is not None)
    for name in ("expired", "kv_stranded"):
        yield verdicts.none_of(f"leavers: {name}", seen["figures"][name])
    yield verdicts.none_of("leavers: requests that stayed and failed", seen["stayed_failed"])
    yield verdicts.Verdict("leavers: charges gone", "soon", seen["charges_gone_after_s"], seen["charges_gone_after_s"] is not None)


if __name__ == "__main__":
    sys.exit(main())
