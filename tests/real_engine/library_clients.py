"""Drives an OpenAI-style server through the client libraries that people use.

Prints one JSON line per case: {"case", "saw"} or {"case", "raised"}. What a case saw holds nothing
that differs from one run to the next, so two servers that behave alike print the same lines: the run
compares an engine asked directly with the same engine behind the cluster.

usage: library_clients.py URL MODEL      (with the Python of clients-venv)
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm downloads a price list on import

import litellm
import openai
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

BASE, MODEL = sys.argv[1].rstrip("/") + "/v1", sys.argv[2]
SECONDS_MAX = 60
CONNECTION = {"base_url": BASE, "api_key": "none", "max_retries": 0, "timeout": SECONDS_MAX}
CLIENT = openai.OpenAI(**CONNECTION)
QUESTION = [{"role": "user", "content": "Which ship is late, and why?"}]
CHAT = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
TEXT = {"model": MODEL, "max_tokens": 6, "temperature": 0}
RESPONSE = {"model": MODEL, "input": "Which ship?", "max_output_tokens": 6, "temperature": 0}
FULL = CHAT | {"extra_body": {"ignore_eos": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a harbour",
        "parameters": {
            "type": "object",
            "properties": {"harbour": {"type": "string"}, "hours": {"type": "integer"}},
            "required": ["harbour"],
        },
    },
}
TOOL_HISTORY = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"harbour":"north"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "storm — 9 Bft, günstig ab 18 Uhr ☂"},
]

CASES = []


def case(name):
    """Registers a function that returns what the client saw."""

    def register(function):
        CASES.append((name, function))
        return function

    return register


def answer(reply):
    """What matters of a completion."""
    choice, usage = reply.choices[0], reply.usage
    return [choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens]


def streamed(stream):
    """What matters of a stream of chat chunks."""
    text, finish, usage = "", None, None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    return [text, finish, usage and usage.completion_tokens]


@case("openai: models")
def _():
    return [model.id for model in CLIENT.models.list()]


@case("openai: chat, and its request id")
def _():
    reply = CLIENT.chat.completions.create(**FULL, extra_headers={"X-Request-Id": "library-1"})
    return [*answer(reply), reply.id]


@case("openai: chat streamed with usage")
def _():
    asked = FULL | {"stream": True, "stream_options": {"include_usage": True}}
    return streamed(CLIENT.chat.completions.create(**asked))


@case("openai: chat streamed without usage")
def _():
    return streamed(CLIENT.chat.completions.create(**FULL, stream=True))


@case("openai: two choices")
def _():
    reply = CLIENT.chat.completions.create(**FULL | {"temperature": 0.7}, seed=5, n=2)
    return [(choice.index, choice.message.content) for choice in reply.choices]


@case("openai: log-probabilities")
def _():
    reply = CLIENT.chat.completions.create(**FULL, logprobs=True, top_logprobs=2)
    return [(token.token, len(token.top_logprobs)) for token in reply.choices[0].logprobs.content]


@case("openai: tools, choice left to the model")
def _():
    return answer(CLIENT.chat.completions.create(**FULL, tools=[WEATHER], tool_choice="auto"))


@case("openai: tools streamed, named choice")
def _():
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = CHAT | {"max_tokens": 60, "tools": [WEATHER], "tool_choice": choice, "stream": True}
    stream = CLIENT.chat.completions.create(**asked)
    calls, text, finish = "", "", None
    for chunk in stream:
        for part in chunk.choices:
            text += part.delta.content or ""
            calls += "".join(call.function.arguments or "" for call in part.delta.tool_calls or [])
            finish = part.finish_reason or finish
    return [text, calls, finish]


@case("openai: a tool's result in the history")
def _():
    return answer(CLIENT.chat.completions.create(**FULL | {"messages": TOOL_HISTORY}, tools=[WEATHER]))


@case("openai: schema for the answer")
def _():
    schema = {"type": "object", "properties": {"late": {"type": "boolean"}}, "required": ["late"]}
    reply = CLIENT.chat.completions.create(
        **CHAT, response_format={"type": "json_schema", "json_schema": {"name": "late", "schema": schema}}
    )
    return answer(reply)


@case("openai: completion of a text")
def _():
    reply = CLIENT.completions.create(**TEXT, prompt="The wind")
    return [reply.choices[0].text, reply.usage.total_tokens]


@case("openai: completion streamed")
def _():
    stream = CLIENT.completions.create(**TEXT, prompt="The wind", stream=True)
    return "".join(chunk.choices[0].text for chunk in stream)


@case("openai: completions of two texts")
def _():
    reply = CLIENT.completions.create(**TEXT, prompt=["The wind", "The sea"])
    return [choice.text for choice in reply.choices]


@case("openai: completion of token ids")
def _():
    reply = CLIENT.completions.create(**TEXT, prompt=[300, 301, 302, 303])
    return [reply.choices[0].text, reply.usage.prompt_tokens]


@case("openai: response")
def _():
    reply = CLIENT.responses.create(**RESPONSE)
    return [reply.status, reply.output_text]


@case("openai: response streamed")
def _():
    stream = CLIENT.responses.create(**RESPONSE, stream=True)
    kinds = [event.type for event in stream]
    return [kinds[0], kinds[-1], sorted(set(kinds))]


@case("openai: eight chats at once, async")
def _():
    async def ask():
        async with openai.AsyncOpenAI(**CONNECTION) as client:
            asked = [client.chat.completions.create(**FULL) for _ in range(8)]
            return [answer(reply)[1:] for reply in await asyncio.gather(*asked)]

    return asyncio.run(ask())


@case("openai: a stream left early, then another request")
def _():
    stream = CLIENT.chat.completions.create(**FULL | {"max_tokens": 400}, stream=True)
    next(iter(stream))
    stream.close()
    return answer(CLIENT.chat.completions.create(**FULL))


def refusal(function):
    """The error that a call must end in: its class, status and code."""
    try:
        function()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, str(error.code)]
    raise AssertionError("was answered")


@case("openai: an unknown model is refused")
def _():
    # Without the code: an engine says 404; the replicas, who answer this themselves, what OpenAI says.
    return refusal(lambda: CLIENT.chat.completions.create(**CHAT | {"model": "no-such-model"}))[:2]


@case("openai: too many tokens are refused, streamed too")
def _():
    asked = CHAT | {"max_tokens": 100_000}
    return [
        refusal(lambda: CLIENT.chat.completions.create(**asked)),
        refusal(lambda: list(CLIENT.chat.completions.create(**asked, stream=True))),
    ]


@case("openai: messages of a wrong type are refused")
def _():
    return refusal(lambda: CLIENT.chat.completions.create(**CHAT | {"messages": "hello"}))[:2]


@case("openai: embeddings of a chat model are refused")
def _():
    return refusal(lambda: CLIENT.embeddings.create(model=MODEL, input="The wind"))[:2]


def langchain_chat(**more):
    """A langchain model at the server."""
    return ChatOpenAI(
        **CONNECTION,
        model=MODEL,
        max_tokens=12,
        temperature=0,
        **more,
    )


@case("langchain: invoke")
def _():
    reply = langchain_chat().invoke("Which ship is late?")
    return [reply.content, reply.usage_metadata["total_tokens"]]


@case("langchain: stream")
def _():
    return "".join(part.content for part in langchain_chat(stream_usage=True).stream("Which ship is late?"))


@case("langchain: bound tool")
def _():
    @langchain_tool
    def depth(harbour: str) -> int:
        """How deep a harbour is, in metres."""
        return len(harbour)

    reply = langchain_chat().bind_tools([depth]).invoke("How deep is the north harbour?")
    return [reply.content, len(reply.tool_calls)]


LITELLM = {
    "api_base": BASE,
    "api_key": "none",
    "messages": QUESTION,
    "max_tokens": 12,
    "temperature": 0,
    "num_retries": 0,
    "timeout": SECONDS_MAX,
}


@case("litellm: openai/ and hosted_vllm/")
def _():
    providers = ("openai", "hosted_vllm")
    return [answer(litellm.completion(**LITELLM, model=f"{provider}/{MODEL}")) for provider in providers]


@case("litellm: streamed")
def _():
    stream = litellm.completion(**LITELLM, model=f"hosted_vllm/{MODEL}", stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def llama_index_chat():
    """A llama-index model at the server."""
    return OpenAILike(
        model=MODEL,
        api_base=BASE,
        api_key="none",
        is_chat_model=True,
        context_window=2048,
        max_tokens=12,
        temperature=0,
        max_retries=0,
        timeout=SECONDS_MAX,
    )


@case("llama-index: chat")
def _():
    return llama_index_chat().chat([ChatMessage(role="user", content="Which ship?")]).message.content


@case("llama-index: streamed chat")
def _():
    parts = llama_index_chat().stream_chat([ChatMessage(role="user", content="Which ship?")])
    return "".join(part.delta or "" for part in parts)


def main() -> None:
    """Runs every case, whatever the others do."""
    for name, function in CASES:
        line = {"case": name}
        try:
            line["saw"] = function()
        except Exception as error:  # whatever a library raises is the finding
            line["raised"] = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps(line, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
