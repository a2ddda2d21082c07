"""The result as Markdown tables, to paste into docs/results.md."""


def markdown(result: dict) -> str:
    """Everything worth reading of one run."""
    about = result["about"]
    lines = [
        f"vLLM {about['vllm']} on CPU, HAProxy {about['haproxy']}, {about['cores']} cores, {about['date']}; "
        "`tests/real_engine/run.sh`.",
        "",
    ]
    if "stopped_by" in result:
        lines += [f"**Did not run to its end:** {result['stopped_by']}", ""]
    for part in (_chats, _bench, _deaths, checks_table):
        lines += part(result)
    return "\n".join(lines).rstrip() + "\n"


def table(head: list[str], rows: list[list]) -> list[str]:
    """A table, or nothing if it has no rows."""
    if not rows:
        return []
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return [*lines, ""]


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) if value else "none"
    return str(value).replace("|", "\\|")


def _sides(result: dict, part: str):
    for key, label in (("engines_only", "HAProxy, engines"), ("cluster", "HAProxy, 3 replicas, engines")):
        for name, seen in result[key].get(part, {}).items():
            yield label, name, seen


def _chats(result: dict) -> list[str]:
    rows = [
        [
            name, label, seen["requests"], seen["failed"], f"{seen['follow_ups_at_home_ratio']:.1%}",
            f"{seen['follow_ups_warm_ratio']:.1%}", f"{seen['engine_prefix_hit_ratio']:.1%}",
            round(seen["busiest_over_mean"], 2), seen["stream_first_byte_mean_ms"],
        ]
        for label, name, seen in _sides(result, "chats")
    ]  # fmt: skip
    head = [
        "chats", "through", "requests", "failed", "follow-ups on their engine", "follow-ups warm",
        "engines' own hit ratio", "busiest / mean", "mean first byte, ms",
    ]  # fmt: skip
    return table(head, rows)


def _bench(result: dict) -> list[str]:
    rows = [
        [name, label, seen["completed"], seen["failed"], seen.get("mean_ttft_ms"), seen.get("p99_ttft_ms")]
        for label, name, seen in _sides(result, "bench")
    ]
    head = ["vllm bench serve", "through", "completed", "failed", "mean TTFT, ms", "p99 TTFT, ms"]
    return table(head, rows)


def _deaths(result: dict) -> list[str]:
    rows = []
    for label, _, seen in _sides(result, "deaths"):
        saw = []
        for kind, counts in seen["seen"].items():
            saw += [f"{count} {kind} {outcome}" for outcome, count in counts.items()]
        rows.append([
            seen["what"], label, seen["requests"], seen["open_at_victim"], saw,
            seen["failed_begun_after_death"],
            seen["moved_and_answered"], f"{seen['moved_texts_differ']} of {seen['moved_texts_checked']}",
            seen["longest_request_s"],
        ])  # fmt: skip
    head = [
        "death under load",
        "through", "requests", "open there", "what the clients saw", "failed, begun after it",
        "moved and answered", "their texts that differ", "longest request, s",
    ]  # fmt: skip
    return table(head, rows)


def checks_table(result: dict) -> list[str]:
    """Every check of a run."""
    rows = [[c["check"], c["wanted"], c["seen"], "yes" if c["holds"] else "**no**"] for c in result["checks"]]
    return table(["check", "wanted", "seen", "holds"], rows)
