"""The processes of one run: engines, replicas and the balancer, each in a process group of its own.

Whatever is started here is ended by its own pid. The pids alive at any time are in the file `pids`
of the output directory, so that run.sh can end them even if this program is killed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
SHIPPED_BALANCER = PROJECT / "deploy" / "haproxy" / "grapevine.cfg"
LOOPBACK = "127.0.0.1"
MODEL = "tiny"

ENGINE_START_MAX_S = 300  # 40 s on an idle machine; two at once on busy cores take several times that
REPLICA_START_MAX_S = 60
STOP_MAX_S = 30  # from SIGTERM to SIGKILL, Kubernetes' default
STOP_ALL_MAX_S = 10  # at the end of the run, when nobody waits for an answer

# What the engines run with: small enough for two of them on one laptop, prefix caching in blocks of
# 32 tokens, and each request's arrival logged under its id: the log says which engine served it.
ENGINE_FLAGS = [
    "--served-model-name", MODEL,
    "--load-format", "safetensors",
    "--dtype", "float32",
    "--enforce-eager",
    "--block-size", "32",
    "--max-model-len", "2048",
    "--max-num-seqs", "16",
    "--seed", "0",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-log-requests",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
]  # fmt: skip
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; far more than the run fills, so nothing is evicted
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# What an engine of a pair runs with besides: KV goes from one to the other over NIXL, on the loopback.
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PAIR_ENVIRONMENT = {
    "UCX_TLS": "tcp,shm,self",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
}


class NotReady(Exception):
    """A process did not become ready in time, or ended before it did."""


@dataclasses.dataclass
class Process:
    """One started process. `url` is where it serves."""

    name: str
    url: str
    log: pathlib.Path
    popen: subprocess.Popen
    admin_url: str = ""  # of a replica
    role: str = ""  # of an engine of a pair, as the replicas are told it

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    def terminate(self) -> None:
        """SIGTERM to the process alone, as a container runtime sends it; its children are its affair."""
        self.popen.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group: an engine's children go with it, as when a container dies."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)


class Fleet:
    """Everything that was started, and the only place that starts or ends it."""

    def __init__(self, out: pathlib.Path, engine_dir: pathlib.Path, replica_binary: pathlib.Path):
        self.out = out
        self.engine_dir = engine_dir
        self.replica_binary = replica_binary
        self.processes: list[Process] = []
        self._ports_given: set[int] = set()
        self._logs = 0

    # Starting

    def start_engine(self, name: str, port: int | None = None, role: str = "") -> Process:
        """Starts one vLLM, for a role of a pair if it is given; `wait_ready` tells when it serves."""
        port = port or self.free_port()
        command = [
            str(self.engine_dir / "venv" / "bin" / "vllm"), "serve", str(self.engine_dir / "model"),
            "--host", LOOPBACK, "--port", str(port), *ENGINE_FLAGS,
        ]  # fmt: skip
        environment = os.environ | ENGINE_ENVIRONMENT
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # makes every start compile everything
        if role:
            connector = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[role], "kv_buffer_device": "cpu"}
            command += ["--kv-transfer-config", json.dumps(connector)]
            environment |= PAIR_ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.free_port())}
        engine = self._start(name, f"http://{LOOPBACK}:{port}", command, environment)
        engine.role = role
        return engine

    def start_replicas(self, count: int, engines: list[Process], flags: tuple[str, ...] = ()) -> list[Process]:
        """Starts the cluster: every replica is told of every other one and of every engine."""
        key = self.out / "cluster.key"
        key.write_bytes(os.urandom(32).hex().encode())
        key.chmod(0o600)
        self._plans = [
            {"listen": self.free_port(), "admin": self.free_port(), "gossip": self.free_gossip_port()}
            for _ in range(count)
        ]
        self._replica_flags = list(flags)
        for engine in engines:
            role = f",role={engine.role}" if engine.role else ""
            self._replica_flags += ["--endpoint", engine.url + role]
        return [self.start_replica(index) for index in range(count)]

    def start_replica(self, index: int) -> Process:
        """Starts (again) the replica of that index, at the addresses it was given at first."""
        plan = self._plans[index]
        command = [
            str(self.replica_binary), "serve",
            "--replica-id", f"replica-{index + 1}",
            "--listen", f"{LOOPBACK}:{plan['listen']}",
            "--admin", f"{LOOPBACK}:{plan['admin']}",
            "--gossip", f"{LOOPBACK}:{plan['gossip']}",
            "--cluster-key-file", str(self.out / "cluster.key"),
        ]  # fmt: skip
        for other, other_plan in enumerate(self._plans):
            if other != index:
                command += ["--seed", f"{LOOPBACK}:{other_plan['gossip']}"]
        command += self._replica_flags
        replica = self._start(f"replica-{index + 1}", f"http://{LOOPBACK}:{plan['listen']}", command)
        replica.admin_url = f"http://{LOOPBACK}:{plan['admin']}"
        return replica

    def start_balancer(self, name: str, behind: list[Process], ready_path: str) -> Process:
        """Starts HAProxy with the shipped configuration, its addresses replaced."""
        port = self.free_port()
        servers = [f"    server s{n} {p.url.removeprefix('http://')}" for n, p in enumerate(behind, 1)]
        text = SHIPPED_BALANCER.read_text()
        text = re.sub(r"^    server .*\n", "", text, flags=re.M).rstrip() + "\n" + "\n".join(servers)
        text, binds = re.subn(r"^    bind .*$", f"    bind {LOOPBACK}:{port}", text, flags=re.M)
        text, checks = re.subn(r"httpchk GET /readyz", f"httpchk GET {ready_path}", text)
        if (binds, checks) != (1, 1):
            raise ValueError(f"{SHIPPED_BALANCER} has {binds} bind lines and {checks} checks, not one each")
        config = self.out / f"{name}.cfg"
        config.write_text(text + "\n")
        return self._start(name, f"http://{LOOPBACK}:{port}", ["haproxy", "-db", "-f", str(config)])

    def run(self, name: str, command: list[str], seconds_max: float, environment=None) -> tuple[int, str]:
        """Runs a client to its end and returns its exit code and standard output; 124 on a timeout."""
        process = self._start(name, "", command, environment, split_output=True)
        try:
            process.popen.wait(timeout=seconds_max)
            code = process.popen.returncode
        except subprocess.TimeoutExpired:
            code = 124
        self.stop(process)
        return code, process.log.with_suffix(".out").read_text(errors="replace")

    def _start(self, name, url, command, environment=None, split_output=False) -> Process:
        self._logs += 1
        log = self.out / f"{self._logs:02}-{name}.log"
        with log.open("wb") as errors, contextlib.ExitStack() as stack:
            output = stack.enter_context(log.with_suffix(".out").open("wb")) if split_output else errors
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        process = Process(name, url, log, popen)
        self.processes.append(process)
        self._record_pids()
        return process

    # Waiting

    def wait_ready(self, process: Process, path: str, seconds_max: float) -> float:
        """Waits until `path` answers 200 and returns the seconds this took."""
        started = time.monotonic()
        while time.monotonic() - started < seconds_max:
            if not process.alive():
                raise NotReady(f"{process.name} ended with {process.popen.returncode}, see {process.log}")
            if status_of(process.url + path) == 200:
                return time.monotonic() - started
            time.sleep(0.1)
        raise NotReady(f"{process.name}: no 200 from {path} within {seconds_max} s, see {process.log}")

    # Ending

    def stop(self, process: Process, seconds_max: float = STOP_MAX_S) -> None:
        """Asks the process to end; what is left of its group after the limit is killed."""
        process.terminate()
        self.wait_or_kill(process, seconds_max)

    def wait_or_kill(self, process: Process, seconds_max: float = STOP_MAX_S) -> None:
        """Gives the process time to end by itself; what is left of its group then is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(timeout=seconds_max)
        process.kill()
        process.popen.wait()
        if process in self.processes:
            self.processes.remove(process)
        self._record_pids()

    def stop_all(self) -> None:
        """Ends everything. An engine that is still starting may not answer: it is killed."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + STOP_ALL_MAX_S
        for process in self.processes.copy():
            self.stop(process, max(0.0, deadline - time.monotonic()))

    def _record_pids(self) -> None:
        (self.out / "pids").write_text("".join(f"{p.popen.pid}\n" for p in self.processes))

    # Ports

    def free_port(self) -> int:
        """A TCP port that was free a moment ago and is given out once."""
        while True:
            with socket.socket() as probe:
                probe.bind((LOOPBACK, 0))
                port = probe.getsockname()[1]
            if port not in self._ports_given:
                self._ports_given.add(port)
                return port

    def free_gossip_port(self) -> int:
        """A port P with P/tcp, P/udp and P+1/udp free: what one replica's gossip needs."""
        while True:
            port = self.free_port()
            if port + 1 in self._ports_given:
                continue
            with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as two:
                try:
                    one.bind((LOOPBACK, port))
                    two.bind((LOOPBACK, port + 1))
                except OSError:
                    continue
            self._ports_given.add(port + 1)
            return port


def status_of(url: str) -> int:
    """The status of a GET, 0 if there was no answer."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def children_named(parent: int, part: str) -> list[int]:
    """The pids of the direct children of `parent` whose command line contains `part`."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if part in pathlib.Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    ]
