"""Continue a prompt, or chat, with any checkpoint.

    python sample.py "Hello, I'm a language model," -m log/model_19073.pt -n 4
    python sample.py "Once upon" -m gpt2 --temperature 0    OpenAI's, greedy
    python sample.py --chat -m log/chat                     a conversation
    python sample.py -m log/model_00500.pt --export hf      for other programs

The model is a checkpoint, a run's folder (its newest checkpoint), a folder in Hugging Face format or
the name of a GPT-2. A single sample is streamed as it is generated; several are printed when all are done.
"""

import codecs
import dataclasses
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from plumbing import cli
from plumbing.cli import UserError


@dataclass
class Options:
    """Continue a prompt with a GPT-2, or chat with it."""

    prompt: Annotated[str, "positional"] = ""  # the text to continue
    # a checkpoint, a run's folder, a folder in Hugging Face format, or a GPT-2 name
    model: Annotated[str, "-m"] = "log"
    num_samples: Annotated[int, "-n"] = 1  # continuations to generate, all in one batch
    max_new_tokens: int = 256  # maximum length of a continuation, which also ends at <|endoftext|>
    temperature: float = 1.0  # below 1 favors likely tokens; 0: always the most likely token
    top_k: int = 50  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the smallest set of most likely tokens with this total probability
    seed: int = 42  # the same seed gives the same text
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of the weights
    # hold a conversation, one message per line: /reset starts over, /quit ends it, Ctrl-C stops an answer
    chat: bool = False
    export: str = ""  # write the model to this new folder in Hugging Face format instead of sampling


# the names for these in nanoGPT, transformers and others
SYNONYMS = {
    "Give the text in quotes, without a flag.": "prompt start text input",
    "--model": "out-dir init-from model-name-or-path model-type model-path checkpoint ckpt",
    "--num-samples": "num-return-sequences samples nsamples batch-size",
    "--max-new-tokens": "length max-length max-tokens",
    "--top-p": "nucleus",
    "--temperature 0": "greedy",
    "--chat": "interactive",
}


def parse_args(args=None):
    """The Options of a command line. Raises one UserError listing everything that is wrong with the flags."""
    options = cli.parse(Options, args, synonyms=SYNONYMS)
    errors = cli.check_numbers(options, above_0=("num_samples", "max_new_tokens", "top_p"))
    if options.top_p > 1:
        errors.append(f"--top-p is {options.top_p}, but it must be at most 1.")
    if not options.prompt and not options.chat and not options.export:
        errors.append(
            "The prompt is empty or missing. Give the text to continue in quotes, or use --chat for a conversation."
        )
    if options.export and os.path.lexists(options.export):
        errors.append(f"--export {options.export} exists already. Choose a new folder.")
    if errors:
        raise UserError(" ".join(errors))
    return options


if __name__ == "__main__":
    cli.run(parse_args)  # before importing torch, which takes seconds

import torch

import tokenizer
from plumbing.checkpoint import newest_checkpoint
from plumbing.distributed import choose_device, choose_dtype
from plumbing.huggingface import export_huggingface
from train_gpt2 import load_model


def generate_rows(model, enc, ids, options, generator, rows=1, stop_ids=()):
    """Continue the token ids in `rows` rows: yields a list of each row's next id, None for rows that have stopped.

    A row stops at <|endoftext|> or at an id in `stop_ids`, which is not yielded. `ids` must fit into the block
    size; the continuation may go beyond it.
    """
    stop_ids = {enc.eot_token, *stop_ids}
    device = next(model.parameters()).device
    prompt = torch.tensor([ids] * rows, device=device)
    # the flags may be too small for float32; below these values, only the most likely token is left
    temperature = options.temperature if options.temperature > 1e-6 else 0
    sampling = dict(temperature=temperature, top_k=options.top_k, top_p=max(options.top_p, 1e-9), generator=generator)
    running = [True] * rows
    for next_ids in model.generate(prompt, options.max_new_tokens, enc.n_vocab, **sampling):
        next_ids = next_ids.tolist()
        running = [on and token not in stop_ids for on, token in zip(running, next_ids)]
        if not any(running):
            return
        yield [token if on else None for on, token in zip(running, next_ids)]


def stream_text(enc, tokens):
    """Decode an iterable of ids piece by piece: a character is yielded when its last byte has arrived."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(enc.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def complete(model, enc, options, generator):
    """Print the prompt with each of its continuations."""
    ids = enc.encode_ordinary(options.prompt)
    block_size = model.config.block_size
    if len(ids) > block_size:
        raise UserError(
            f"The prompt has {len(ids):,} tokens, but the model can read only {block_size:,}. Shorten the prompt."
        )
    steps = generate_rows(model, enc, ids, options, generator, options.num_samples)
    prompt = enc.decode(ids)
    if options.num_samples == 1:
        for piece in itertools.chain([prompt], stream_text(enc, (token for (token,) in steps))):
            print(piece, end="", flush=True)
        print()
        return
    steps = list(steps)
    rows = [[step[i] for step in steps if step[i] is not None] for i in range(options.num_samples)]
    print(f"\n{'-' * 80}\n".join(prompt + enc.decode(row) for row in rows))


# -----------------------------------------------------------------------------
# Chat


def read_lines():
    """Yield the lines that the user types, or that come from a pipe; none if stdin is closed."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin and sys.stdin.isatty()
    while sys.stdin:
        try:
            yield input("> " if is_terminal else "").strip()
        except (EOFError, OSError):
            if is_terminal:
                print()  # after Ctrl-D the shell's prompt has a line of its own
            return


def render_prompt(messages, enc):
    """Return the ids of a conversation, up to where the assistant answers."""
    import smoltalk  # only needed to chat

    if tokenizer.has_chat_tokens(enc):
        return smoltalk.render_conversation(messages, enc)[0] + [enc.encode_single_token("<|assistant|>")]
    # a model without role markers gets the conversation as plain text, like its training data
    text = "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)
    return [enc.eot_token, *enc.encode_ordinary(text + "Assistant:")]


def fit_prompt(messages, enc, block_size, room):
    """`render_prompt` of the newest messages, starting with a user's, that leave `room` tokens for the answer.

    Removes older ones from `messages`. None if even the last message is too long.
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
    """Print the assistant's answer to `messages` while it is generated, and append it. Ctrl-C ends it."""
    block_size = model.config.block_size
    room = min(options.max_new_tokens, block_size // 2)
    ids = fit_prompt(messages, enc, block_size, room)
    if ids is None:
        messages.clear()
        print(
            f"(That is too long: the model can read {block_size:,} tokens, {room:,} of them kept for its answer. "
            "Write less; the conversation starts over.)",
            flush=True,
        )
        return
    steps = generate_rows(model, enc, ids, options, generator, stop_ids=enc._special_tokens.values())
    is_chat_model, text = tokenizer.has_chat_tokens(enc), ""
    try:
        for piece in stream_text(enc, (token for (token,) in steps)):
            # subtle: a base model would continue with the user's next message
            ends_here = not is_chat_model and text.strip() and "\n" in piece
            if ends_here:
                piece = piece.split("\n")[0]
            text += piece
            print(piece, end="", flush=True)
            if ends_here:
                break
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    messages.append({"role": "assistant", "content": text.strip()})


def chat(model, enc, options, generator):
    """Answer line after line until /quit or the end of the input."""
    said = ["Write a message. /reset starts over, /quit ends the conversation, Ctrl-C stops an answer."]
    if not tokenizer.has_chat_tokens(enc):
        said.append(
            f"note: {options.model} was not trained to chat (tokenizer {enc.name} has no role markers), so it only "
            f"continues the text. To teach it, begin with smoltalk.py --init-from {options.model}."
        )
    print("\n".join(said), file=sys.stderr, flush=True)
    messages = []
    first_lines = [options.prompt] if options.prompt else []
    for line in itertools.chain(first_lines, read_lines()):
        if line == "/quit":
            return
        if line == "/reset":
            messages.clear()
        elif line:
            messages.append({"role": "user", "content": line})
            answer(model, enc, messages, options, generator)


# -----------------------------------------------------------------------------
# Export


def export(model, enc, options):
    """Write the model in Hugging Face format, with a model card if it is in the folder of a run."""
    source = Path(options.model)
    run_folder = source if source.is_dir() else source.parent
    if (run_folder / "run.txt").exists():
        checkpoint = newest_checkpoint(source)
        prompt = options.prompt or checkpoint["config"].get("sample_prompt", "")
        sample = sample_for_card(model.eval(), enc, options, prompt)
        export_huggingface(model, enc, options.export, run_folder, checkpoint["step"], sample)
    else:
        export_huggingface(model, enc, options.export)
    print(f"The model is in {options.export}, in Hugging Face format: transformers and other tools load it.")
    words = ["--chat"] if tokenizer.has_chat_tokens(enc) else [options.prompt or "The "]
    cli.print_next(["python", "sample.py", *words, "-m", options.export])


def sample_for_card(model, enc, options, prompt):
    """Return a text of at most 100 tokens written by the model; a chat model answers the prompt."""
    options = dataclasses.replace(options, max_new_tokens=min(options.max_new_tokens, 100))
    generator = torch.Generator(next(model.parameters()).device).manual_seed(options.seed)
    ids, shown, stop_ids = enc.encode_ordinary(prompt) or [enc.eot_token], prompt, ()
    if tokenizer.has_chat_tokens(enc):
        ids = render_prompt([{"role": "user", "content": prompt}], enc)
        shown, stop_ids = f"User: {prompt}\n\nAssistant: ", enc._special_tokens.values()
    ids = ids[-model.config.block_size :]
    steps = generate_rows(model, enc, ids, options, generator, stop_ids=stop_ids)
    return shown + enc.decode([token for (token,) in steps])


# -----------------------------------------------------------------------------


def main(args=None):
    """Load the model, then export it, chat with it, or continue the prompt."""
    options = parse_args(args)
    device = choose_device(options.device)
    if options.dtype == "auto" and not device.startswith("cuda"):
        options.dtype = "float32"
    if options.chat and sys.stdin and sys.stdin.isatty():
        print(f"Loading {options.model}.", file=sys.stderr, flush=True)
    model, enc = load_model(options.model)
    dtype, _ = choose_dtype(options.dtype, device, model.config.n_embd)
    if options.export:
        export(model, enc, options)
        return
    # cast the weights once: autocast would convert them again for every token
    model.to(device, dtype).eval()
    model.residual_dtype = dtype
    generator = torch.Generator(device).manual_seed(options.seed)
    try:
        if options.chat:
            chat(model, enc, options, generator)
        else:
            complete(model, enc, options, generator)
    except KeyboardInterrupt:  # between two answers, or in the middle of a continuation
        print()


if __name__ == "__main__":
    cli.run(main, output_is_product=True)
