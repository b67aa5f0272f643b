"""Turn conversations into token shards, to fine-tune a chat model.

    python smoltalk.py        SmolTalk, from the hub
    python smoltalk.py --dataset OWNER/NAME --split train_sft
    python smoltalk.py --input chats.jsonl --init-from log/quickstart

A line of `--input` is

    {"messages": [{"role": "user", "content": "Hi"}, ...]}

with the roles user, assistant and system (or developer). OpenAI's content parts, a list of messages without
the object around it, ShareGPT's conversations, Alpaca's instructions, and a .json file with an array of any of
these are read, too, and so are columns of these names in Parquet and CSV files, a clone of a data set, or a folder
of save_to_disk. `system` and `history` beside them come first. Messages to and from tools, and rows that are no
conversation, are left out and counted. The line above becomes

    <|endoftext|> <|user|> Hi <|end|> <|assistant|> Hello! <|end|>
                                                    ^^^^^^^^^^^^^^ mask 1

where the markers are single ids after the tokenizer's own; text that spells out a marker stays text.
The shards are like fineweb.py's, with a mask file `x_train_000001.mask` for each `x_train_000001.npy`
(np.save, uint8, same length): 1 where a token counts as a target. An answer with "weight": 0 or "train": false
is none.

A block of `--max-length` tokens holds whole conversations and is filled up with <|end|> (mask 0), so a model
with that sequence length sees each conversation from its first token. A longer conversation is cut after the
last answer that fits.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass

sys.path.append(os.path.dirname(__file__))  # which python -P and -I leave out

from plumbing.cli import console, flags
from plumbing.data.options import DataOptions


@dataclass
class Options(DataOptions):
    dataset: str = "HuggingFaceTB/smoltalk"  # OWNER/NAME on the hub
    config: str = ""  # which of the data set's configs, if it has several; of SmolTalk: all
    # your own files, folders or globs: .jsonl, .json, .csv or .parquet, also .gz or .zst; or a clone of a data set
    input: tuple[str, ...] = ()
    # the model to fine-tune, as train_gpt2.py takes it; it gives the tokenizer and the length
    init_from: str = ""
    tokenizer: str = ""  # gpt2 (the default), bytes, or a .tiktoken file; the role markers are added to it
    shard_size: flags.Positive[int] = 20_000_000  # tokens per shard
    # tokens per block: the sequence length to train with; 0: the model's longest, or 1024 without --init-from
    max_length: int = 0


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import contextlib
import json
import random
from typing import Any, NamedTuple

import numpy as np

from plumbing.data import preparation, tokenizers
from plumbing.data.preparation import Rendered, ShardWriter
from plumbing.data.readers import Unusable

COLUMNS = ["messages", "conversations", "instruction", "input", "output", "system", "history"]  # read of a table
FORMATS = (
    "What is read: messages with role and content, conversations with from and value, or instruction with input and"
    " output; beside them system and history."
)
OPEN_BLOCKS = 64  # blocks that wait for a conversation that fits
# the roles that ShareGPT and OpenAI also have
ROLE_NAMES = {"human": "user", "developer": "system"}
ROLE_NAMES |= dict.fromkeys(["gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"], "assistant")
TOOLS = "function observation function_call function_response tool_call tool_response ipython"
ROLE_NAMES |= dict.fromkeys(TOOLS.split(), "tool")
FLAGS = ("weight", "train", "training", "loss")  # of which 0 or false says that an answer is not to be learned

# ----- Conversations ------------------------------------------------------------------------------------


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]  # with "weight": 0 in the answers that are not to be learned
    num_tools: int  # messages to and from tools that were left out


def read_conversation(record):
    """The Conversation in a row, in one of the formats that are read. Raises Unusable."""
    messages, num_tools = [], 0
    for number, message in enumerate(messages_of(record), 1):
        role, content, is_learned = read_message(message)
        num_tools += role == "tool"
        if role == "tool" or (role == "system" and (content is None or content == "")):
            continue
        message = {"role": role, "content": content}
        if role not in tokenizers.ROLES or not isinstance(content, str) or not content.strip():
            raise Unusable(
                f"is not a conversation: message {number} needs a role ({', '.join(tokenizers.ROLES)}) and content, "
                f"but is {console.plain(message, 60)}"
            )
        if role == "assistant" and not is_learned:
            message["weight"] = 0
        messages.append(message)
    if all(message["role"] != "assistant" for message in messages):
        raise Unusable("has no answer of an assistant")
    return Conversation(messages, num_tools)


def messages_of(record):
    """The messages of a conversation as they stand in a row, behind those of its system and history."""
    if isinstance(record, Unusable):
        raise record
    row = record if isinstance(record, dict) else {"messages": record}
    lists = [parsed(row.get(key)) for key in ("messages", "conversations")]
    messages = next((each for each in lists if each and isinstance(each, list)), [])
    if not messages and row.get("instruction") is not None:  # Alpaca's
        texts = row["instruction"], row.get("input") or ""
        request = "\n\n".join(filter(None, texts)) if all(isinstance(text, str) for text in texts) else None
        messages = turn(request, row.get("output"))
    if not messages:
        raise Unusable("is not a conversation: it has no list of messages or conversations, and no instruction")
    history, earlier = parsed(row.get("history")) or [], []
    for entry in history if isinstance(history, list) else [history]:
        if isinstance(entry, list) and len(entry) == 2:
            earlier += turn(*entry)
        elif isinstance(entry, dict):
            earlier.append(entry)
        else:
            raise Unusable(f"has a history that is not of pairs: {console.plain(entry, 60)}")
    if row.get("system") and read_message(messages[0])[:2] != ("system", row["system"]):
        earlier.insert(0, {"role": "system", "content": row["system"]})
    return earlier + messages


def parsed(value):
    """A value, or what a text in JSON stands for: a CSV file has lists as such."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def turn(request, answer):
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]


def read_message(message):
    """(role, content, whether it is to be learned) of a message of OpenAI's or ShareGPT's; tool is what tools say."""
    if not isinstance(message, dict):
        return "", message, True
    role = str(message.get("role") or message.get("from") or "").lower()
    if message.get("tool_calls") or message.get("function_call"):
        role = "tool"
    content = message.get("content")
    if content is None:
        content = message.get("value")
    if isinstance(content, list) and all(map(is_text, content)):
        content = "".join(part["text"] for part in content)
    for flag in FLAGS:
        if message.get(flag) not in (None, 0, 1):
            found = console.plain(repr(message[flag]), 60)
            raise Unusable(f"has {flag} {found} at a message, but only 0 and 1, false and true are read")
    return ROLE_NAMES.get(role, role), content, all(message.get(flag) not in (0, False) for flag in FLAGS)


def is_text(part):
    """Whether a part of OpenAI's content is text, and not an image or a sound."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


# ----- Blocks and shards --------------------------------------------------------------------------------


def pack(conversations, max_length, pad):
    """Pack conversations, arrays (2, n) of ids and mask, into blocks (2, max_length), filled up with `pad` (2, 1).

    Best fit: 5, 6, 3 and 4 tokens in blocks of 9 make 5 + 4 and 6 + 3, shuffled so that short ones begin blocks, too.
    """
    rng = random.Random(0)
    blocks, free = [], []  # the conversations in each open block, and the tokens it can still take

    def close(number):
        block = blocks.pop(number)
        rng.shuffle(block)
        padding = np.repeat(pad, free.pop(number), axis=1)
        return np.hstack([*block, padding])

    for conversation in conversations:
        length = conversation.shape[1]
        fitting = [number for number in range(len(blocks)) if free[number] >= length]
        if fitting:
            number = min(fitting, key=free.__getitem__)
        else:
            if len(blocks) == OPEN_BLOCKS:
                yield close(free.index(min(free)))
            blocks.append([])
            free.append(max_length)
            number = -1
        blocks[number].append(conversation)
        free[number] -= length
    while blocks:
        yield close(0)


def take_tokens(units, count):
    """The next ones of the units, up to that with which they have `count` tokens."""
    for unit in units:
        yield unit
        count -= unit.tokens.shape[1]
        if count <= 0:
            break


class Conversations(preparation.Renderer):
    """Whole conversations, packed into blocks, with a mask of what is to be learned."""

    columns, noun = COLUMNS, "conversation"

    def __init__(self, enc, max_length, shard_size):
        self.block, self.shard_size = max_length, shard_size
        self.pad = np.array([[enc.encode_single_token("<|end|>")], [0]], dtype=np.uint16)
        self.counted = [
            ("message", "to and from tools left out"),
            ("answer", "not to be learned, as weight or train says"),
            ("conversation", f"cut after the last answer within {max_length} tokens"),
        ]

    def read(self, row):
        conversation = read_conversation(row.values)
        return conversation, sum(sys.getsizeof(message["content"]) for message in conversation.messages)

    def encode(self, enc, entries):
        return [self.render(enc, conversation) for conversation in entries]

    def render(self, enc, conversation):
        """Its ids and mask, up to the last answer that fits into a block."""
        ids, mask, stop = tokenizers.render_conversation(conversation.messages, enc, self.block)
        if not stop:
            return Rendered(Unusable(f"has no answer within {self.block} tokens, the --max-length"))
        tokens = np.array([ids[:stop], mask[:stop]], dtype=np.uint16)
        if not tokens[1].any():
            return Rendered(Unusable("has no answer that is to be learned"))
        num_unlearned = sum("weight" in message for message in conversation.messages)
        return Rendered(tokens, (conversation.num_tools, num_unlearned, int(stop < len(ids))))

    def pack(self, units):
        """Blocks of conversations; those that are packed together are as many as fill a shard."""
        while together := list(take_tokens(units, self.shard_size)):
            for part, block in enumerate(pack([unit.tokens for unit in together], self.block, self.pad)):
                yield together[0]._replace(part=part, tokens=block)

    def explain(self, place, reason):
        held = reason.values
        columns = (
            f" Its columns are {', '.join(held)}: {console.plain(held, 200)}." if isinstance(held, dict) else ""
        )
        return f"{place} {reason}.{columns} {FORMATS}"


def training_command(init_from, folder, is_large, max_length, lengths):
    """The command that fine-tunes a model, at least as large as GPT-2 or smaller, on shards of these lengths."""
    from train_gpt2 import PRESETS  # imports torch

    # a model smaller than GPT-2 learns little in three epochs at the chat preset's rate of 1e-4
    name, least = ("chat", 1) if is_large else ("quickstart", 400)
    preset = PRESETS[name]
    blocks = sum(length // max_length for length in lengths)
    batch = max(1, min(preset.total_batch_size // max_length, blocks // 8))  # 8 steps or more over the data
    batch = 2 ** (batch.bit_length() - 1)
    steps = max(least, min(3000, 3 * blocks // batch))
    out_dir = "chat" if folder == "smoltalk" else os.path.basename(os.path.abspath(folder))
    return [
        "python",
        "train_gpt2.py",
        ("--preset", name),
        ("--init-from", init_from or "log"),
        ("--data", folder),
        ("--out-dir", f"log/{out_dir}"),
        ("--sequence-length", max_length),
        ("--total-batch-size", batch * max_length),
        ("--max-steps", steps),
        ("--warmup-steps", min(preset.warmup_steps, steps // 10)),
    ]


def prepare(options):
    """Make the shards that `options` describe, and print the command that trains on them. Returns their folder."""
    complaints = preparation.complaints_of(options)
    if options.init_from and options.tokenizer:
        complaints.append("--init-from gives the tokenizer, so leave --tokenizer out.")
    flags.check(options, complaints)
    if options.dataset == Options.dataset and not (options.config or options.input):
        options = dataclasses.replace(options, config="all")
    folder, found, meta = preparation.plan(options, {}, types=(".jsonl", ".parquet", ".csv"))
    if options.init_from:
        from plumbing.run.models import load_saved_model  # imports torch

        model = load_saved_model(options.init_from)
        longest, enc = model.settings.get("block_size", 1024), model.enc
        is_large = sum(weight.numel() for weight in model.weights.values()) > 100_000_000
    else:
        enc = tokenizers.get_encoding(options.tokenizer or "gpt2")
        longest, is_large = 1024, True
    if not tokenizers.has_chat_tokens(enc):
        enc = tokenizers.with_chat(enc)
    max_length = options.max_length or longest
    meta.made_from |= {"shard_size": options.shard_size, "max_length": max_length}
    if options.input:
        meta.dataset = "conversations"
    renderer = Conversations(enc, max_length, options.shard_size)
    writer = ShardWriter(folder, meta, enc, renderer=renderer)
    preparation.make_shards(writer, found, options)
    lengths = writer.meta.lengths("train")
    console.print_next(training_command(options.init_from, folder, is_large, max_length, lengths))
    return folder


def main(args=None):
    prepare(flags.parse(Options, args))


if __name__ == "__main__":
    console.run(main)
