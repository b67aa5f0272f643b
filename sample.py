"""Continue a prompt, or chat, with any checkpoint.

    python sample.py "Hello, I'm a language model," -m log/model_19073.pt -n 4
    python sample.py "Once upon" -m gpt2 --temperature 0    OpenAI's, greedy
    python sample.py --chat -m log/chat                     a conversation
    python sample.py -m log/model_00500.pt --export hf      for other programs

The model is a checkpoint, a run's folder (its newest checkpoint), a folder in
Hugging Face format or a name on the Hub. A single sample is printed while it
is generated, several when all of them are done.
"""

import codecs
import contextlib
import io
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave it out

from plumbing.cli import console, flags
from plumbing.cli.console import UserError
from plumbing.run import source_code


@dataclass
class Options:
    prompt: Annotated[str, "positional", "may be empty"] = ""  # the text to continue
    # a checkpoint, a run's folder, a folder in Hugging Face format, or a name on the Hub: gpt2, or OWNER/NAME
    model: Annotated[str, "-m"] = "log"
    num_samples: Annotated[int, "-n", flags.ABOVE_0] = 1  # continuations to generate, all in one batch
    # maximum number of tokens in a continuation; it also ends at <|endoftext|>
    max_new_tokens: flags.Positive[int] = 256
    temperature: float = 1.0  # below 1 favors likely tokens; 0: always the most likely token
    top_k: int = 50  # sample from the k most likely tokens; 0: from all
    # sample from the smallest set of most likely tokens with this total probability
    top_p: flags.Positive[float] = 1.0
    repetition_penalty: flags.Positive[float] = 1.0  # above 1, tokens that the text has already are less likely
    stop: tuple[str, ...] = ()  # a continuation ends before any of these texts
    seed: int = 42  # the same seed gives the same text
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    code: str = ""  # the changed copy of train_gpt2.py that trained the model; by default train_gpt2.py itself
    # hold a conversation, one message per line: /reset starts over, /quit ends it, Ctrl-C stops an answer
    chat: bool = False
    system: str = ""  # a message to the chat model that comes before the conversation
    export: str = ""  # write the model to this new folder in Hugging Face format instead of sampling


def parse_args(args=None):
    """Parse the command line. One UserError lists all mistakes in the flags."""
    options = flags.parse(Options, args)
    flags.check(options, complaints(options))
    return options


def complaints(options):
    if options.top_p > 1:
        yield f"--top-p is {options.top_p}, but it must be at most 1."
    if not (options.prompt or options.chat or options.export):
        yield "The prompt is empty. Give the text to continue in quotes, or --chat for a conversation."
    if options.chat and (options.export or options.num_samples != 1):
        yield "--chat gives one answer at a time and writes nothing. Leave out --num-samples and --export."
    if options.system and not options.chat:
        yield "--system begins a conversation. Add --chat, or leave it out."
    if os.path.lexists(options.export):
        yield f"--export {options.export} exists already. Choose a new folder."


if __name__ == "__main__":
    console.run(parse_args)  # before importing torch, which takes seconds

import torch

from plumbing.data import tokenizers
from plumbing.run.commands import sample_command
from plumbing.run.huggingface import export_huggingface
from plumbing.system.devices import choose_device, choose_dtype


def generate_rows(model, enc, ids, *, options, rows=1):
    """Continue `ids` (at most a block). Yield the rows' next ids, with None for rows that a special token has ended."""
    prompt = torch.tensor([ids] * rows, device=next(model.parameters()).device)
    names = ("temperature", "repetition_penalty", "top_k", "top_p")
    sampling = {name: getattr(options, name) for name in names}
    special_ids = enc._special_tokens.values()
    running = [True] * rows
    for next_ids in model.generate(prompt, options.max_new_tokens, enc.n_vocab, **sampling):
        next_ids = next_ids.tolist()
        running = [on and token not in special_ids for on, token in zip(running, next_ids)]
        if not any(running):
            return
        yield [token if on else None for on, token in zip(running, next_ids)]


def stream_text(model, enc, ids, *, options):
    """Continue the ids and yield pieces of text. A character is yielded when its last byte is there."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for (token,) in generate_rows(model, enc, ids, options=options):
        yield decoder.decode(enc.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def up_to(stops, pieces):
    """Yield pieces of text up to the first of the texts `stops`. What may be the beginning of one is held back."""
    held = ""
    longest = max(map(len, stops), default=1)
    for piece in pieces:
        held += piece
        if places := [held.find(stop) for stop in stops if stop in held]:
            yield held[: min(places)]
            return
        safe = max(0, len(held) - longest + 1)
        yield held[:safe]
        held = held[safe:]
    yield held


def complete(model, enc, options):
    """Print the prompt with each of its continuations."""
    prompt = options.prompt
    num_samples = options.num_samples
    block_size = model.config.block_size
    ids = tokenizers.encode_text(enc, prompt).tolist()
    if len(ids) > block_size:
        raise UserError(
            f"The prompt has {len(ids):,} tokens, but the model reads at most {block_size:,}. Shorten it."
        )
    if num_samples == 1:
        pieces = up_to(options.stop, stream_text(model, enc, ids, options=options))
        for piece in itertools.chain([prompt], pieces):
            print(console.harmless(piece), end="", flush=True)
        print()
        return
    steps = list(generate_rows(model, enc, ids, options=options, rows=num_samples))
    texts = []
    for row in range(num_samples):
        continuation = enc.decode([step[row] for step in steps if step[row] is not None])
        texts.append(console.harmless("".join([prompt, *up_to(options.stop, [continuation])])))
    print(f"\n{'-' * 80}\n".join(texts))


def read_lines():
    """Yield the lines from the user or from a pipe; none if stdin is closed."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = ""
    if sys.stdin and sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401, gives input() a history and the arrow keys
    try:
        while sys.stdin:
            yield input(prompt).strip()
    except (EOFError, OSError):
        if prompt:
            print()  # after Ctrl-D, the shell's prompt starts on a new line


def render_prompt(messages, enc):
    """The ids of a conversation, up to the beginning of the assistant's answer."""
    if tokenizers.has_chat_tokens(enc):
        return tokenizers.render_question(messages, enc)
    # a model without role markers gets the conversation as plain text, like its training data
    text = "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)
    return [enc.eot_token, *tokenizers.encode_text(enc, text + "Assistant:").tolist()]


def fit_prompt(messages, enc, max_length):
    """Render the newest messages that fit, and remove the older ones from the list, but for a system message.

    None if no message fits.
    """
    first = messages[0]["role"] == "system"
    while len(messages) > first:
        ids = render_prompt(messages, enc)
        if len(ids) <= max_length:
            return ids
        del messages[first : first + 2]
    return None


def answer(model, enc, messages, *, options):
    """Print the assistant's answer while it is generated, and append it to `messages`. Ctrl-C ends it."""
    block_size = model.config.block_size
    max_length = block_size - min(options.max_new_tokens, block_size // 2)  # the rest is for the answer
    ids = fit_prompt(messages, enc, max_length)
    if ids is None:
        print(f"(That is too long: at most {max_length:,} tokens fit. The conversation starts over.)")
        return
    text = ""
    try:
        for piece in up_to(options.stop, stream_text(model, enc, ids, options=options)):
            text += piece
            # subtle: a base model would continue with the user's next message
            if "\n" in text.lstrip() and not tokenizers.has_chat_tokens(enc):
                break
            print(console.harmless(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print()
    messages.append({"role": "assistant", "content": text.strip()})


def chat(model, enc, options):
    """Answer line after line until /quit or the end of the input."""
    print("Write a message. /reset starts over, /quit ends the chat, Ctrl-C stops an answer.", file=sys.stderr)
    if not tokenizers.has_chat_tokens(enc):
        console.note(
            f"{options.model} was not trained to chat, so it just continues the text. To teach it to chat, start with "
            f"smoltalk.py --init-from {options.model}.",
            file=sys.stderr,
        )
    messages = [{"role": "system", "content": options.system}] * bool(options.system)
    for line in itertools.chain([options.prompt], read_lines()):
        if line == "/quit":
            return
        if line == "/reset":
            del messages[bool(options.system) :]
        elif line:
            messages.append({"role": "user", "content": line})
            answer(model, enc, messages, options=options)


def main(args=None):
    """Load the model, then export it, chat with it, or continue the prompt."""
    options = parse_args(args)
    device = choose_device(options.device)
    model, enc = source_code.import_trainer(options.code).load_model(options.model)
    if options.export:
        export_huggingface(model, enc, Path(options.export))
        print(
            f"The model is in {options.export}, in Hugging Face format: transformers and other tools can load it."
        )
        console.print_next(sample_command(options.export, enc, options.prompt))
        return
    torch.manual_seed(options.seed)
    name = "auto" if device.startswith("cuda") else "float32"
    dtype = getattr(torch, choose_dtype(name, torch.device(device)))
    model.to(device)
    # once: autocast would convert the weights again for every token. Complex numbers and counts keep their dtype
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    if options.chat:
        chat(model, enc, options)
    else:
        complete(model, enc, options)


if __name__ == "__main__":
    console.run(main, output_is_product=True)
