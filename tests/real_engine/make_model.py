"""Makes a tiny Llama with generated weights, so that a real engine can run without any download.

What the checks need of it, and a model of random noise lacks, is that the greedy answer depends on
all of the prompt: a router that mixes up two prompts, or continues the wrong stream, then shows.
The script proves this on the weights it made and fails if it does not hold.

usage: make_model.py DIR     (with the Python of the engine's virtual environment)
"""

import json
import pathlib
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
CONTEXT_TOKENS = 4096
SEED = 20
PAD, BOS, EOS, TURN, END = "<pad>", "<bos>", "<eos>", "<turn>", "<end>"
SPECIALS = [PAD, BOS, EOS, TURN, END]

# One line per message, and the prompt of a turn is a prefix of the next turn's prompt: this is what
# lets an engine keep a conversation in its cache.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

# Spread of each matrix. Strong attention and a soft head make the context matter; embeddings at
# unit scale keep it from drowning the last token.
SPREADS = {
    "embed_tokens": 1.0,
    "q_proj": 0.22,
    "k_proj": 0.22,
    "v_proj": 0.18,
    "o_proj": 0.18,
    "lm_head": 0.3,
}
OTHER_SPREAD = 0.06

# The proof: every stretch of this many tokens must move some next token's log-probability by this.
STRETCH_TOKENS = 32
MOVE_MIN = 0.5


def make_tokenizer(directory: pathlib.Path) -> int:
    """Trains a byte-level BPE on the standard library's sources and returns the vocabulary's size."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    sources = [str(path) for path in sorted(library.glob("*.py"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sources, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    write_json(directory / "special_tokens_map.json", names)
    write_json(
        directory / "tokenizer_config.json",
        {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.get_vocab_size()


def make_weights(directory: pathlib.Path, vocabulary: int) -> LlamaForCausalLM:
    """Draws the weights from a fixed seed and saves them as safetensors."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(END),
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                spread = next((s for part, s in SPREADS.items() if part in name), OTHER_SPREAD)
                parameter.normal_(0.0, spread)
    model.save_pretrained(directory, safe_serialization=True)
    return model


def context_shows(model: LlamaForCausalLM) -> dict[str, float]:
    """How far the next token's log-probabilities move when one stretch of the prompt changes."""

    def next_token(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)

    prompt = [(17 * i + 29) % (VOCABULARY - 100) + 50 for i in range(300)]
    plain = next_token(prompt)
    moved = {}
    for start in range(0, len(prompt) - STRETCH_TOKENS, STRETCH_TOKENS):
        changed = prompt.copy()
        changed[start : start + STRETCH_TOKENS] = range(900, 900 + STRETCH_TOKENS)
        moved[f"from {start}"] = float((next_token(changed) - plain).abs().max())
    return moved


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes one JSON file, indented, so that a reader can look at it."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    """Makes the model in the directory named on the command line."""
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = make_tokenizer(directory)
    model = make_weights(directory, vocabulary)
    moved = context_shows(model)
    print(f"{directory}: vocabulary {vocabulary}", {k: round(v, 2) for k, v in moved.items()})
    if min(moved.values()) < MOVE_MIN:
        sys.exit("the answer does not depend on the whole prompt: these weights prove nothing")


if __name__ == "__main__":
    main()
