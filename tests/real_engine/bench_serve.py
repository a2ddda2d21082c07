"""`vllm bench serve`, the engine's own load generator, against any URL."""

import json
import os
import pathlib

from fleet import ENGINE_ENVIRONMENT, MODEL, Fleet

SECONDS_MAX = 300
KEPT = [
    "completed",
    "failed",
    "request_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "total_output_tokens",
]

# Two of its data sets: prompts that share nothing, and prompts that share one of eight long prefixes.
DATA = {
    "random": [
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "16",
        "--num-prompts", "60",
    ],
    "shared-prefixes": [
        "--backend", "openai", "--endpoint", "/v1/completions",
        "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "8",
        "--prefix-repetition-prefix-len", "1200", "--prefix-repetition-suffix-len", "40",
        "--prefix-repetition-output-len", "16",
        "--num-prompts", "80",
    ],
}  # fmt: skip


def run_bench(fleet: Fleet, name: str, url: str, data: list[str], seed: int) -> dict:
    """Runs it to its end and returns the figures of its result file, or why there are none."""
    result = fleet.out / f"{name}.json"
    command = [
        str(fleet.engine_dir / "venv" / "bin" / "vllm"), "bench", "serve",
        "--base-url", url, "--model", MODEL, "--tokenizer", str(fleet.engine_dir / "model"),
        "--request-rate", "5", "--seed", str(seed), "--ignore-eos", "--disable-tqdm",
        "--save-result", "--result-dir", str(fleet.out), "--result-filename", result.name,
        *data,
    ]  # fmt: skip
    code, _ = fleet.run(name, command, SECONDS_MAX, os.environ | ENGINE_ENVIRONMENT)
    if code != 0 or not pathlib.Path(result).exists():
        return {"exit_code": code, "completed": 0, "failed": None}
    figures = json.loads(result.read_text())
    return {"exit_code": code} | {name: figures[name] for name in KEPT}
