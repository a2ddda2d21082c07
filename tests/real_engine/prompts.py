"""Prompts made from a seed: plain sentences, so that a prompt's length in tokens is steady."""

import random

WORDS = (
    "the harbour master wrote down every ship that came before noon and asked pilot about weather "
    "cargo price of rope a letter from north island said two boats were late because wind had turned "
    "so crew waited near old bridge while market opened people sold fish bread salt lamps nobody knew "
    "which captain would sail first or how long storm might last"
).split()
COMMON_SYSTEM_BYTES = 340


def words(rng: random.Random, size_bytes: int) -> str:
    """About `size_bytes` of text."""
    text = ""
    while len(text) < size_bytes:
        text += rng.choice(WORDS) + " "
    return text.rstrip() + "."


def system_message(seed: str) -> dict:
    """A system prompt that all the chats of one check share."""
    return {"role": "system", "content": words(random.Random(f"system {seed}"), COMMON_SYSTEM_BYTES)}


def chat_body(messages: list[dict], tokens: int, stream: bool) -> dict:
    """A chat completion of exactly `tokens` tokens, the same ones each time it is asked."""
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body
