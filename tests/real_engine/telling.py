"""What a run says of itself: lines of progress, and what it ran on."""

import datetime
import os
import pathlib
import platform
import signal
import subprocess
import sys


def end_once(*_) -> None:
    """Ends the run at the first SIGTERM; a second one must not disturb the ending of the others."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def about(engine_dir: pathlib.Path) -> dict:
    """What ran, on what, when."""
    python = str(engine_dir / "venv" / "bin" / "python")
    version = "import importlib.metadata as m; print(m.version('vllm'))"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "vllm": output_of([python, "-c", version]).strip(),
        "haproxy": output_of(["haproxy", "-v"]).split()[2],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def output_of(command: list[str]) -> str:
    """What a short command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def say(text: str) -> None:
    """One line of progress."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)
