"""Continue a prompt, or talk, with any checkpoint.

    python sample.py "Hello, I'm a language model," -m log/model_19073.pt -n 4
    python sample.py "Once upon a time" -m gpt2 --temperature 0        greedy, OpenAI's weights
    python sample.py --chat -m log/chat                                a conversation
    python sample.py -m log/model_00500.pt --export hf                 what a finished run has in hf/

The model is a checkpoint, a run's folder (its newest checkpoint), a folder in Hugging Face format or
the name of a GPT-2. One sample appears as it is made, several when all are done.
"""

import codecs
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import train_gpt2 as t  # before torch: it sets how OpenMP's threads wait

import torch
import tyro

from plumbing import cli
from plumbing.cli import UserError


@dataclass
class Options:
    """Continue a prompt with a GPT-2, or talk to it."""

    prompt: tyro.conf.Positional[str] = ""  # the text to continue
    # a checkpoint, a run's folder, a folder in Hugging Face format, or a GPT-2 name
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "log"
    num_samples: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1  # continuations, made together
    max_new_tokens: int = 256  # the longest continuation; it ends before at <|endoftext|>
    temperature: float = 1.0  # below 1 the likely gets likelier; 0: always the likeliest token
    top_k: int = 50  # choose among the k likeliest tokens; 0: among all
    top_p: float = 1.0  # choose among the likeliest tokens that have this probability together
    seed: int = 42  # the same seed gives the same text
    device: str = "auto"  # cpu, cuda or mps; auto takes the best there is
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights
    # a conversation: one line is one message; /reset begins anew, /quit ends, Ctrl-C stops an answer
    chat: bool = False
    export: str = ""  # write the model to this folder in Hugging Face format, and sample nothing


def check_options(options):
    """Raise one UserError with everything that is wrong with the flags."""
    wrong = []
    for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 0)):
        value = getattr(options, name)
        if not least <= value < math.inf:
            wrong.append(f"got --{name.replace('_', '-')} {value}, needed {least} or more")
    if not 0 < options.top_p <= 1:
        wrong.append(f"got --top-p {options.top_p}, needed more than 0 and at most 1")
    if not options.prompt and not options.chat and not options.export:
        wrong.append("got an empty prompt, needed some text to continue, give it in quotes")
    if options.export and Path(options.export).exists() and (
        not Path(options.export).is_dir() or any(Path(options.export).iterdir())
    ):
        wrong.append(f"got --export {options.export}, which is there already, needed a new folder, name another")
    if wrong:
        raise UserError("; ".join(wrong))


def continue_rows(model, enc, ids, options, generator, rows=1, stops=()):
    """Continue the token ids `rows` times: yields each row's next id, in a list, None once it has stopped.

    A row stops at <|endoftext|> or an id of `stops`, which is not yielded. The ids of the whole list
    are not longer than the block; what is added may go beyond it.
    """
    stops = {enc.eot_token, *stops}
    device = next(model.parameters()).device
    prompt = torch.tensor([ids] * rows, device=device)
    how = dict(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, generator=generator)
    running = [True] * rows
    for next_ids in model.generate(prompt, options.max_new_tokens, enc.n_vocab, **how):
        next_ids = next_ids.tolist()
        running = [on and token not in stops for on, token in zip(running, next_ids)]
        if not any(running):
            return
        yield [token if on else None for on, token in zip(running, next_ids)]


def stream_text(enc, tokens):
    """The text of an iterable of ids, piece by piece: a character comes when its last byte is there."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(enc.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def complete(model, enc, options, generator):
    """Print the prompt with each of its continuations."""
    ids = enc.encode_ordinary(options.prompt)
    if len(ids) > model.config.block_size:
        raise UserError(
            f"got a prompt of {len(ids):,} tokens, needed at most the model's {model.config.block_size:,}, shorten it"
        )
    prompt = enc.decode(ids)
    steps = continue_rows(model, enc, ids, options, generator, options.num_samples)
    if options.num_samples == 1:
        print(prompt, end="", flush=True)
        for piece in stream_text(enc, (token for (token,) in steps)):
            print(piece, end="", flush=True)
        print()
        return
    rows = zip(*steps)
    samples = [prompt + enc.decode([token for token in row if token is not None]) for row in rows]
    print(f"\n{'-' * 80}\n".join(samples or [prompt] * options.num_samples))


# -----------------------------------------------------------------------------
# Chat


def read_lines():
    """The lines that the user types, or that come from a pipe."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return


def is_tuned(enc):
    """Whether a tokenizer has role markers: the model was then trained on conversations."""
    return "<|assistant|>" in enc._special_tokens


def render_prompt(messages, enc):
    """The ids of a conversation up to where the assistant answers."""
    import smoltalk  # only talking needs it

    if is_tuned(enc):
        return smoltalk.render_conversation(messages, enc)[0] + [enc.encode_single_token("<|assistant|>")]
    # a model without the markers sees the conversation as a text like those that it has read
    text = "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)
    return [enc.eot_token, *enc.encode_ordinary(text + "Assistant:")]


def fit_prompt(messages, enc, block_size, room):
    """`render_prompt` of the newest messages, from one of the user's on, that leave room for an answer.

    Drops from `messages` what is too old. None where the last message alone is too long.
    """
    while True:
        ids = render_prompt(messages, enc)
        if len(ids) + room <= block_size:
            return ids
        newer = [i for i, message in enumerate(messages) if i and message["role"] == "user"]
        if not newer:
            return None
        del messages[: newer[0]]


def answer(model, enc, messages, options, generator):
    """Print the assistant's answer to `messages` as it comes, and add it to them. Ctrl-C ends it."""
    block_size = model.config.block_size
    ids = fit_prompt(messages, enc, block_size, room=min(options.max_new_tokens, block_size // 2))
    if ids is None:
        messages.clear()
        print(f"(too long: the model reads {block_size:,} tokens, half of them for the answer)", flush=True)
        return
    tuned, text = is_tuned(enc), ""
    try:
        steps = continue_rows(model, enc, ids, options, generator, stops=enc._special_tokens.values())
        for piece in stream_text(enc, (token for (token,) in steps)):
            # subtle: a model that only continues text would go on with the user's next line
            over = not tuned and text.strip() and "\n" in piece
            piece = piece.split("\n")[0] if over else piece
            text += piece
            print(piece, end="", flush=True)
            if over:
                break
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    messages.append({"role": "assistant", "content": text.strip()})


def chat(model, enc, options, generator):
    """Answer line after line until /quit or the end of the input."""
    if not is_tuned(enc):
        print(
            f"note: {options.model} was not tuned for chat, its tokenizer {enc.name} has no role markers: it only "
            "continues the conversation as text. Fine-tune it: smoltalk.py, then train_gpt2.py --preset chat",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    messages = []
    for line in itertools.chain([options.prompt] if options.prompt else [], read_lines()):
        if line == "/quit":
            return
        if line == "/reset":
            messages.clear()
        elif line:
            messages.append({"role": "user", "content": line})
            answer(model, enc, messages, options, generator)


# -----------------------------------------------------------------------------


def main(args=None):
    options = cli.parse(Options, args)
    check_options(options)
    device = t.choose_device(options)
    if options.dtype == "auto" and not device.startswith("cuda"):
        options.dtype = "float32"
    dtype = t.choose_dtype(options, device.split(":")[0])
    model, enc = t.load_model(options.model)
    if options.export:
        t.export_huggingface(model, enc, options.export)
        print(f"{options.export} holds the model as Hugging Face transformers reads it")
        return
    # one dtype for all weights: autocast would convert them again for every token
    model.to(device, dtype).eval().residual_dtype = dtype
    generator = torch.Generator(device).manual_seed(options.seed)
    try:
        (chat if options.chat else complete)(model, enc, options, generator)
    except KeyboardInterrupt:  # between two answers, or in the middle of a continuation
        print()


if __name__ == "__main__":
    cli.run(main)
