"""The result of a run with a pair of engines as Markdown tables, to paste into docs/results.md."""

from report import checks_table, table


def markdown(result: dict) -> str:
    """Everything worth reading of one run."""
    about = result["about"]
    lines = [
        f"vLLM {about['vllm']} on CPU, HAProxy {about['haproxy']}, {about['cores']} cores, {about['date']}; "
        "`tests/real_engine/pairs.sh`.",
        "",
    ]
    if "stopped_by" in result:
        lines += [f"**Did not run to its end:** {result['stopped_by']}", ""]
    for part in (_answers, _odd, _leavers, _deaths, checks_table):
        lines += part(result)
    return "\n".join(lines).rstrip() + "\n"


def _answers(result: dict) -> list[str]:
    if "answers" not in result:
        return []
    asked = result["answers"]["requests"]
    figures = result["answers"]["figures"]
    rows = []
    for stream, label in ((False, "in one piece"), (True, "streamed")):
        some = [each for each in asked if each["stream"] == stream]
        if not some:
            continue
        rows.append([
            label, len(some), sum(each["equal"] for each in some), sum(each["numbers"] for each in some),
            f"{max(each['number_difference_max'] for each in some):.1e}",
            sum(each["legs"] == {"prefill": 1, "decode": 1} for each in some),
        ])  # fmt: skip
    head = ["requests", "asked", "equal", "log-probabilities compared", "largest difference", "once at each engine"]
    lines = table(head, rows)
    head = ["engine", "prompt tokens computed", "from its own cache", "from the other engine"]
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    rows = [[role, *(round(figures[f"{role}_{source}_tokens"]) for source in sources)] for role in ("prefill", "decode")]
    return lines + table(head, rows)


def _odd(result: dict) -> list[str]:
    if "odd" not in result:
        return []
    rows = [
        [
            each["name"], each["status"], "yes" if each["equal"] else "**no**",
            "yes" if each["legs"]["prefill"] and each["legs"]["decode"] else "no",
            each["legs"]["prefill"], each["legs"]["decode"], each["cached_tokens_plain"], each["cached_tokens"],
        ]
        for each in result["odd"]["requests"]
    ]  # fmt: skip
    head = ["odd request", "status", "equal", "split", "at prefill", "at decode", "cached, plain", "cached, pair"]
    return table(head, rows)


def _leavers(result: dict) -> list[str]:
    if "leavers" not in result:
        return []
    seen = result["leavers"]
    rows = [[
        seen["leavers"], seen["reached_prefill"], seen["reached_decode"], seen["figures"]["kv_released_total"],
        seen["figures"]["kv_stranded"], seen["figures"]["expired"], seen["gone_after_s"],
    ]]  # fmt: skip
    head = [
        "clients that left", "reached the prefill engine", "reached the decode engine", "released", "stranded",
        "expired at the engine", "nothing held after s",
    ]  # fmt: skip
    return table(head, rows)


def _deaths(result: dict) -> list[str]:
    rows = []
    for seen in result.get("deaths", {}).values():
        saw = [f"{count} {kind} {outcome}" for kind, counts in seen["seen"].items() for outcome, count in counts.items()]
        rows.append([
            seen["what"], seen["requests"], seen["open_at_victim"], saw, seen["failed_begun_after_death"],
            seen["moved_and_answered"], f"{seen['moved_texts_differ']} of {seen['moved_texts_checked']}",
            f"{seen['stayed_texts_differ']} of {seen['stayed_texts_checked']}", seen["longest_request_s"],
            seen["requests_again_after_s"],
        ])  # fmt: skip
    head = [
        "death under load", "requests", "open there", "what the clients saw", "failed, begun after it",
        "seen by a third engine leg and answered", "their texts that differ", "other texts that differ",
        "longest request, s", "restarted, used again after s",
    ]  # fmt: skip
    return table(head, rows)
