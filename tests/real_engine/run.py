"""Real engines behind a real cluster: plays every part of the run and writes what was seen.

Parts, in order (see README.md): libraries, bench, chats, then the deaths of failures.py. All that need
no replica are also played with the balancer in front of the engines alone, for comparison.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import signal
import sys

import bench_serve
import chats
import cluster_facts
import failures
import report
import verdicts
from fleet import ENGINE_START_MAX_S, HERE, MODEL, REPLICA_START_MAX_S, Fleet, Process
from telling import about, end_once, say

ENGINES = 2
REPLICAS = 3
LIBRARIES_MAX_S = 300
BACK_TO_BACK_CHATS = 20
PEACEFUL_PARTS = ["libraries", "bench", "chats"]


def main() -> int:
    """Plays the run; the exit code is 0 if every check holds."""
    options = parse_options()
    signal.signal(signal.SIGTERM, end_once)
    options.out.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(options.out, options.engine_dir, options.replica_binary)
    run = Run(options, fleet)
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
    """The command line, as run.sh passes it on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", type=pathlib.Path, required=True)
    parser.add_argument("--replica-binary", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--chats", type=int, default=80)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4, help="clients that play the chats")
    parser.add_argument("--engines-only", action="store_true", help="no replicas: only the comparison")
    parser.add_argument("--no-comparison", action="store_true", help="skip what runs without replicas")
    every_part = PEACEFUL_PARTS + [scenario.name for scenario in failures.SCENARIOS]
    parser.add_argument(
        "--parts", default=",".join(every_part), help="comma-separated; all by default: %(default)s"
    )
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(every_part):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(every_part)}")
    return options


class Run:
    """The parts of the run, and the result they fill."""

    def __init__(self, options: argparse.Namespace, fleet: Fleet):
        self.options = options
        self.fleet = fleet
        self.result = {"about": about(options.engine_dir), "checks": [], "engines_only": {}, "cluster": {}}
        self.engines: list[Process] = []
        self.engine_logs: dict[str, list[pathlib.Path]] = {}
        self.replicas: list[Process] = []

    def play(self) -> None:
        """Starts the engines, then plays the comparison and the cluster's parts."""
        self.engines = [self.fleet.start_engine(f"engine-{n}") for n in range(1, ENGINES + 1)]
        for engine in self.engines:
            self.fleet.wait_ready(engine, "/health", ENGINE_START_MAX_S)
            self.engine_logs[engine.name] = [engine.log]
            say(f"{engine.name} serves at {engine.url}")
        if not self.options.no_comparison:
            self.play_comparison()
        if not self.options.engines_only:
            self.play_cluster()

    def play_comparison(self) -> None:
        """Every part that needs no replica, with HAProxy straight in front of the engines. No checks."""
        balancer = self.fleet.start_balancer("haproxy-engines", self.engines, "/health")
        self.fleet.wait_ready(balancer, "/health", REPLICA_START_MAX_S)
        seen = self.result["engines_only"]
        self.play_peaceful_parts("alone", balancer.url, seen)
        for scenario in self.scenarios("engine"):
            seen.setdefault("deaths", {})[scenario.name] = self.play_death("alone", scenario, balancer.url)
        self.fleet.stop(balancer)

    def play_cluster(self) -> None:
        """Every part, through three replicas."""
        self.replicas = self.fleet.start_replicas(REPLICAS, self.engines)
        for replica in self.replicas:
            self.fleet.wait_ready(replica, "/readyz", REPLICA_START_MAX_S)
            say(f"{replica.name} ready at {replica.url}")
        cluster_facts.wait_for_whole(self.replicas)
        balancer = self.fleet.start_balancer("haproxy-replicas", self.replicas, "/readyz")
        self.fleet.wait_ready(balancer, "/readyz", REPLICA_START_MAX_S)
        seen, alone = self.result["cluster"], self.result["engines_only"]
        self.play_peaceful_parts("cluster", balancer.url, seen)
        if "libraries" in seen:
            self.note(verdicts.libraries(seen["libraries"], alone.get("libraries")))
        for name, figures in seen.get("bench", {}).items():
            self.note(verdicts.bench(name, figures))
        for pace, figures in seen.get("chats", {}).items():
            self.note(verdicts.chats(pace, figures))
        for scenario in self.scenarios("replica", "engine"):
            figures = self.play_death("cluster", scenario, balancer.url)
            seen.setdefault("deaths", {})[scenario.name] = figures
            self.note(verdicts.death(figures))

    def scenarios(self, *victims: str) -> list[failures.Scenario]:
        """The deaths asked for, of these victims."""
        return [s for s in failures.SCENARIOS if s.victim in victims and s.name in self.options.parts]

    # The parts without failures

    def play_peaceful_parts(self, label: str, url: str, into: dict) -> None:
        """Libraries, bench and chats against one URL. `label` keeps the prompts of two rounds apart."""
        if "libraries" in self.options.parts:
            say(f"{label}: client libraries")
            into["libraries"] = self.play_libraries(label, url)
        if "bench" in self.options.parts:
            into["bench"] = {}
            for name, data in bench_serve.DATA.items():
                say(f"{label}: vllm bench serve, {name}")
                seed = 1 if label == "alone" else 2
                into["bench"][name] = bench_serve.run_bench(
                    self.fleet, f"bench-{name}-{label}", url, data, seed
                )
        if "chats" in self.options.parts:
            into["chats"] = {}
            for pace, count in (("spaced", self.options.chats), ("back-to-back", BACK_TO_BACK_CHATS)):
                say(f"{label}: {count} chats, {pace}")
                plan = chats.Plan(f"{label}-{pace}", count, self.options.turns, self.options.clients, pace)
                into["chats"][pace] = asyncio.run(chats.run_chats(url, self.engines, self.engine_logs, plan))

    def play_libraries(self, label: str, url: str) -> dict:
        """Runs our client script, then those named in EXTRA_CLIENTS."""
        python = str(self.options.engine_dir / "clients-venv" / "bin" / "python")
        script = str(HERE / "library_clients.py")
        _, output = self.fleet.run(f"libraries-{label}", [python, script, url, MODEL], LIBRARIES_MAX_S)
        cases = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        result = {"cases": {case.pop("case"): case for case in cases}, "extra": {}}
        for path in filter(None, os.environ.get("EXTRA_CLIENTS", "").split(":")):
            command = ["node" if path.endswith((".mjs", ".js")) else python, path, url, MODEL]
            name = f"extra-{label}-{pathlib.Path(path).stem}"
            code, output = self.fleet.run(name, command, LIBRARIES_MAX_S)
            failed = [line for line in output.splitlines() if "FAIL" in line]
            result["extra"][path] = {"exit_code": code, "failed": failed}
        return result

    # The deaths

    def play_death(self, label: str, scenario: failures.Scenario, url: str) -> dict:
        """Plays one scenario, brings the victim back and returns what was seen."""
        say(f"{label}: {scenario.what}, under load")
        group = self.replicas if scenario.victim == "replica" else self.engines
        victim, seen = asyncio.run(
            failures.run_scenario(label, scenario, url, self.fleet, group, self.engines, self.engine_logs)
        )
        if label == "cluster":
            living = [replica.admin_url for replica in self.replicas if replica is not victim]
            seen["charges_gone_after_s"] = cluster_facts.seconds_until(
                living, lambda view: cluster_facts.running(view) == 0
            )
        index = group.index(victim)
        if scenario.victim == "replica":
            group[index] = self.fleet.start_replica(index)
            seen["ready_again_after_s"] = self.fleet.wait_ready(group[index], "/readyz", REPLICA_START_MAX_S)
            cluster_facts.wait_for_whole(self.replicas)
        else:
            group[index] = self.start_engine_again(victim)
            seen["requests_again_after_s"] = asyncio.run(
                failures.seconds_until_used(url, group[index], verdicts.USED_AGAIN_MAX_S)
            )
        return seen

    def start_engine_again(self, victim: Process) -> Process:
        """Restarts an engine at its port."""
        engine = self.fleet.start_engine(victim.name, int(victim.url.rsplit(":", 1)[1]))
        self.fleet.wait_ready(engine, "/health", ENGINE_START_MAX_S)
        self.engine_logs[engine.name].append(engine.log)
        return engine

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
        (self.options.out / "result.md").write_text(report.markdown(self.result))
        say(f"results: {self.options.out}/result.json and result.md")


if __name__ == "__main__":
    sys.exit(main())
