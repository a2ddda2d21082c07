"""What is asked of a pair of engines and of a plain one: prompts from a seed, and odd but legal requests."""

import dataclasses
import random

import prompts

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPTS = 20
ANSWER_TOKENS = 24
SIZES_BYTES = (30, 200, 900, 2000, 4000)  # from less than a block of 32 tokens to most of the context
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"ships": {"type": "integer"}}, "required": ["ships"]}


@dataclasses.dataclass(frozen=True)
class Request:
    """One request. `split` says whether two engines are to serve it; `None`: it may be refused first."""

    name: str
    path: str
    body: dict
    split: bool | None = True


def compared() -> list[Request]:
    """Every prompt streamed and in one piece, half of them as chats, each with log-probabilities.

    Which form comes first alternates: the second one finds the prompt in the engines' caches.
    """
    requests = []
    for number in range(PROMPTS):
        text = prompts.words(random.Random(f"pairs {number}"), SIZES_BYTES[number % len(SIZES_BYTES)])
        path, body = (_chat(text) if number % 2 else _text(text))
        forms = [{}, {"stream": True, "stream_options": {"include_usage": True}}]
        for form in forms if number % 4 < 2 else reversed(forms):
            requests.append(Request(f"prompt-{number}-{'stream' if form else 'plain'}", path, body | form))
    return requests


def _text(text: str, **more) -> tuple[str, dict]:
    body = {"model": "tiny", "prompt": text, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return TEXT, body | {"logprobs": 3} | more


def _chat(text: str, **more) -> tuple[str, dict]:
    body = prompts.chat_body([{"role": "user", "content": text}], ANSWER_TOKENS, stream=False)
    return CHAT, body | {"logprobs": True, "top_logprobs": 3} | more


def odd() -> list[Request]:
    """Requests that use a corner of the interface."""
    requests = []

    def add(name: str, request: tuple[str, dict], split: bool | None = True, streams: bool = True) -> None:
        path, body = request
        requests.append(Request(name, path, body, split))
        if streams:
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            requests.append(Request(f"{name}, streamed", path, body | usage, split))

    def text(name: str, **more) -> tuple[str, dict]:
        return _text(prompts.words(random.Random(f"odd {name}"), 700), **more)

    def talk(name: str, **more) -> tuple[str, dict]:
        return _chat(prompts.words(random.Random(f"odd {name}"), 700), **more)

    sampled = {"temperature": 0.8, "seed": 7}
    add("n = 2", talk("n", n=2, **sampled), split=False)
    add("n = 2 of a text", text("n text", n=2, **sampled), split=False)
    add("list of prompts", text("list", prompt=["the harbour master wrote", "a letter from"]), split=False)
    add("list of one prompt", text("one", prompt=["the harbour master wrote " * 20]))
    add("token ids", text("ids", prompt=list(range(300, 500)), return_token_ids=True))
    add("seed and temperature", talk("seed", **sampled))
    add("no log-probabilities", talk("none", logprobs=False, top_logprobs=None))
    add("stop text", text("stop", stop=["e"], ignore_eos=False))
    add("min_tokens", talk("min", min_tokens=9, ignore_eos=False, max_tokens=12))
    add("max_completion_tokens", talk("newer", max_completion_tokens=7))
    add("one token", text("one token", max_tokens=1))
    add("usage in every chunk", talk("usage", stream=True, stream_options={"include_usage": True,
        "continuous_usage_stats": True}), streams=False)  # fmt: skip
    add("own part of the cache", talk("salt", cache_salt="pairs"))
    add("penalties and bias", talk("bias", repetition_penalty=1.3, logit_bias={"300": 5.0}))
    add("an unknown field", talk("unknown", nobody_knows={"this": [1, 2.50]}))
    add("tools, any", talk("tools", tools=[TOOL]))
    add("tools, required", talk("required", tools=[TOOL], tool_choice="required", max_tokens=80,
        ignore_eos=False))  # fmt: skip
    choice = {"type": "function", "function": {"name": "get_weather"}}
    add("tools, named", talk("named", tools=[TOOL], tool_choice=choice, max_tokens=80, ignore_eos=False))
    schema = {"type": "json_schema", "json_schema": {"name": "ships", "schema": SCHEMA}}
    add("a JSON schema", talk("schema", response_format=schema, max_tokens=60, ignore_eos=False))
    add("echo", text("echo", echo=True, logprobs=None))
    # Only who computes a prompt knows its probabilities.
    add("echo with log-probabilities", text("echo logprobs", echo=True), split=False, streams=False)
    add("log-probabilities of the prompt", talk("prompt", prompt_logprobs=1), split=False, streams=False)
    add("beam search", text("beam", use_beam_search=True, n=1, logprobs=None), split=False, streams=False)
    # Refused by the engine, some of them only once it sees the whole request.
    add("more tokens than fit", talk("fit", max_tokens=5000), split=None, streams=False)
    add("min_tokens over max_tokens", talk("over", min_tokens=99), split=None, streams=False)
    add("stream options without a stream", talk("options", stream_options={"include_usage": True}),
        split=None, streams=False)  # fmt: skip
    add("a prompt that is too long", text("long", prompt="ship " * 3000), split=None, streams=False)
    return requests
