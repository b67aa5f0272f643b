"""Turn conversations into token shards, to fine-tune a chat model.

    python smoltalk.py        SmolTalk, from the Hub
    python smoltalk.py --dataset HuggingFaceH4/ultrachat_200k --split train_sft
    python smoltalk.py --input chats.jsonl --init-from log/quickstart

Each line of an `--input` file holds a conversation:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}

The roles are user, assistant and system (or developer). Other formats are read
as well: OpenAI's content parts, a list of messages without the object around
it, ShareGPT's conversations and Alpaca's instructions. A .json file may hold an
array of these, and a Parquet or CSV file columns of these names. `system` or
`system_prompt` beside the messages comes first. The model does not learn an
answer with "weight": 0 or "train": false.

Messages to and from tools are left out. So are rows that are not conversations,
and rows that mark an answer as bad or masked in any other way. At the end,
notes count what was left out and name the keys that were not read.

The example becomes

    <|endoftext|> <|user|> Hi <|end|> <|assistant|> Hello! <|end|>
                                                    ^^^^^^^^^^^^^^ mask 1

Each marker is a single id after the tokenizer's own ids. If a text spells out a
marker, it stays text. The shards are like fineweb.py's, with a mask for each:
`x_train_000001.mask` for `x_train_000001.npy` (np.save, uint8, same length), 1
where a token counts as a target.

A block of `--max-length` tokens holds whole conversations, padded with <|end|>
(mask 0). So a model with that sequence length sees each conversation from its
first token. A longer conversation is cut after the last answer that fits.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave this folder out

from plumbing.cli import console, flags
from plumbing.data.options import DataOptions


@dataclass
class Options(DataOptions):
    dataset: str = "HuggingFaceTB/smoltalk"  # OWNER/NAME on the Hugging Face Hub
    config: str = ""  # one of the data set's configs, if it has several; for SmolTalk, all by default
    # your own files, folders or globs of conversations: .jsonl, .json, .csv or .parquet; .gz and .zst are unpacked
    input: tuple[str, ...] = ()
    # the model to fine-tune, as for train_gpt2.py; it sets the tokenizer and the default of --max-length
    init_from: str = ""
    tokenizer: str = ""  # gpt2 (the default), bytes, or a .tiktoken file; role markers are added
    shard_size: flags.Positive[int] = 20_000_000  # tokens in a shard, roughly
    # tokens in a block: the sequence length to train with; 0: the model's longest, or 1024 without --init-from
    max_length: int = 0


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import contextlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from plumbing.data import preparation, tokenizers
from plumbing.data.preparation import Rendered, Tokens
from plumbing.data.readers import EMPTY, Row, Unusable, unread_in

LISTS = ("messages", "conversations")  # columns with a list of messages
ALPACA = ("instruction", "input", "output")
SYSTEM = ("system", "system_prompt")
# other programs' marks of bad or masked answers. They are not followed: a row with one is left out
MARKS = ("kto_tag", "loss_mask", "trainable", "train_detail", "training_detail")
FLAGS = ("weight", "train", "training", "loss")  # 0 or false: the answer is not learned
FORMATS = (
    "A row needs messages (role and content), conversations (from and value), or instruction and output; input, system"
    " and system_prompt are read as well."
)
MARKED = 'Remove bad answers, and give "weight": 0 to masked ones.'
OPEN_BLOCKS = 64  # blocks that wait for a conversation that fits
# ShareGPT's and OpenAI's other names for roles
ROLE_NAMES = {"human": "user", "developer": "system"}
ROLE_NAMES |= dict.fromkeys(["gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"], "assistant")
TOOLS = "function observation function_call function_response tool_call tool_response ipython"
ROLE_NAMES |= dict.fromkeys(TOOLS.split(), "tool")

TO_TOOLS = "message to and from tools left out"
UNANSWERED = "message after the last answer left out"
NOT_LEARNED = "answer not learned, as weight or train says"
CUT = "conversation cut after the last answer that fits"

# ----- Conversations ------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A message of OpenAI's or ShareGPT's format."""

    role: str  # "tool" for a message to or from a tool
    content: Any
    unread: Sequence[str] = ()  # the name of each value that is not read


def read_conversation(values: Any) -> tuple[list[dict[str, Any]] | Unusable, dict[str, int], list[str]]:
    """(messages of a row, or why it is left out; counts of what happened; the name of each value that is not read).

    A message is {"role", "content"}. An answer that is not learned also has "weight": 0.
    """
    if isinstance(values, Unusable):
        return values, {}, []
    row = values if isinstance(values, dict) else {"messages": values}
    found, read = find_messages(row)
    unread = unread_in(row, [*read, *MARKS])
    counts = {TO_TOOLS: 0, UNANSWERED: 0}
    messages = []
    reasons = list(not_followed(row))
    for number, given in enumerate(found, 1):
        message = read_message(given)
        if message.role == "tool":
            counts[TO_TOOLS] += 1
            continue
        if message.role == "system" and message.content in (None, ""):
            continue
        unread += message.unread
        entry = {"role": message.role, "content": message.content}
        reasons += invalid(entry, number)
        if message.role == "assistant":
            reasons += [*not_followed(given), *unclear_flags(given)]
            if any(given.get(flag) == 0 for flag in FLAGS):
                entry["weight"] = 0
        messages.append(entry)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not found:
        reason = "is not a conversation: it has no list of messages or conversations, and no instruction"
        return Unusable(reason, FORMATS), {}, unread
    if not answers:
        reasons.append(Unusable("has no answer by the assistant"))
    if reasons:
        return reasons[0], {}, unread
    counts[UNANSWERED] = len(messages) - 1 - answers[-1]
    return messages[: answers[-1] + 1], counts, unread


def find_messages(row: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """(messages of a row, with the system's first; the columns that hold them)."""
    messages: list[Any] = []
    read: list[str] = []
    for column in LISTS:
        value = parsed(row.get(column))
        if isinstance(value, list) and not messages:
            messages = value
            read = [column]
    if not messages and row.get("instruction") is not None:
        texts = [row[column] for column in ("instruction", "input") if row.get(column)]
        request = None
        if all(isinstance(text, str) for text in texts):
            request = "\n\n".join(texts)
        messages = [{"role": "user", "content": request}, {"role": "assistant", "content": row.get("output")}]
        read = list(ALPACA)
    for column in SYSTEM:
        if messages and row.get(column) not in EMPTY:
            first = read_message(messages[0])
            if (first.role, first.content) != ("system", row[column]):
                messages = [{"role": "system", "content": row[column]}, *messages]
            return messages, [*read, column]
    return messages, read


def parsed(value: Any) -> Any:
    """The value, parsed if it is JSON text: a CSV file holds lists as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def read_message(message: Any) -> Message:
    if not isinstance(message, dict):
        return Message("", message)
    role_key = "role" if message.get("role") else "from"
    content_key = "value" if message.get("content") is None else "content"
    role = str(message.get(role_key) or "").lower()
    content = message.get(content_key)
    read = [role_key, content_key, "tool_calls", "function_call", *FLAGS, *MARKS]
    unread = unread_in(message, read)
    if message.get("tool_calls") or message.get("function_call"):
        return Message("tool", content)
    parts = parts_of(message)
    for part in parts:
        unread += unread_in(part, read=["type", "text", *FLAGS])
    if parts:
        content = "".join(part["text"] for part in parts)
    return Message(ROLE_NAMES.get(role, role), content, unread)


def parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of OpenAI's content; none if one of them is not text but an image or a sound."""
    parts = message.get("content")
    if isinstance(parts, list) and all(map(is_text, parts)):
        return parts
    return []


def is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def invalid(message: dict[str, Any], number: int) -> Iterator[Unusable]:
    """Yield the reason why a message cannot be used, if there is one."""
    content = message["content"]
    roles = tokenizers.ROLES
    if message["role"] not in roles or not isinstance(content, str) or not content.strip():
        shown = console.plain(message, 60)
        yield Unusable(
            f"is not a conversation: message {number} needs a role ({', '.join(roles)}) and content, but is {shown}",
            FORMATS,
        )


def not_followed(record: dict[str, Any]) -> Iterator[Unusable]:
    """Yield the reasons to leave out a row or an answer: those of MARKS that call an answer bad or masked."""
    for mark in MARKS:
        value = record.get(mark)
        if isinstance(value, str):  # from a CSV file
            value = parsed(value.lower())
        values = value if isinstance(value, list) else [value]
        if value not in EMPTY and any(each != 1 for each in values):
            shown = console.plain(repr(record[mark]), 60)
            yield Unusable(f"has {mark} {shown}, which is not supported", MARKED)


def unclear_flags(answer: dict[str, Any]) -> Iterator[Unusable]:
    """Yield the reasons why an answer's flags cannot be followed: an answer is learned in full or not at all."""
    for flag in FLAGS:
        if answer.get(flag) not in (None, 0, 1):
            shown = console.plain(repr(answer[flag]), 60)
            yield Unusable(f"has {flag} {shown} in a message, but it must be 0, 1, false or true")
        if any(part.get(flag) not in (None, 1) for part in parts_of(answer)):
            yield Unusable("has a message with a part that is not to be learned", MARKED)


# ----- Blocks and shards --------------------------------------------------------------------------------


@dataclass
class Block:
    room: int  # tokens that still fit
    conversations: list[int]


def pack(lengths: Iterable[int], max_length: int) -> Iterator[list[int]]:
    """Pack conversations of these lengths into blocks of `max_length` tokens. Yields the conversations of each block.

    Best fit: in blocks of 9, lengths of 5, 6, 3 and 4 make 5 + 4 and 6 + 3. Each block is shuffled, so that short
    conversations also come first.
    """
    rng = random.Random(0)
    blocks: list[Block] = []  # the open ones

    def close(block: Block) -> list[int]:
        blocks.remove(block)
        rng.shuffle(block.conversations)
        return block.conversations

    for conversation, length in enumerate(lengths):
        fitting = [block for block in blocks if block.room >= length]
        if not fitting:
            if len(blocks) == OPEN_BLOCKS:
                yield close(min(blocks, key=lambda block: block.room))
            blocks.append(Block(max_length, []))
            fitting = blocks[-1:]
        fullest = min(fitting, key=lambda block: block.room)
        fullest.room -= length
        fullest.conversations.append(conversation)
    while blocks:
        yield close(blocks[0])


class Conversations(preparation.Renderer):
    """Turns conversations into blocks, with a mask of the tokens to learn."""

    noun = "conversation"
    masks = True

    def __init__(self, enc: tiktoken.Encoding, max_length: int):
        self.max_length = max_length
        self.eot = enc.eot_token
        self.end = enc.encode_single_token("<|end|>")

    def render(self, enc: tiktoken.Encoding, rows: list[Row]) -> list[Rendered]:
        return [self.render_row(enc, row) for row in rows]

    def render_row(self, enc: tiktoken.Encoding, row: Row) -> Rendered:
        """A conversation's tokens up to the last answer that fits into a block, and counts of what happened."""
        messages, counts, unread = read_conversation(row.values)
        if isinstance(messages, Unusable):
            return Rendered(messages, counts, unread)
        ids, mask, stop = tokenizers.render_conversation(messages, enc, self.max_length)
        if not stop:
            tokens = Unusable(f"needs a --max-length above {self.max_length} for its first answer")
        elif not any(mask[:stop]):
            tokens = Unusable("has no answer to learn")
        else:
            tokens = Tokens(np.array(ids[:stop], np.uint16), np.array(mask[:stop], np.uint8))
            counts[NOT_LEARNED] = sum("weight" in message for message in messages)
            counts[CUT] = int(stop < len(ids))
        return Rendered(tokens, counts, unread)

    def arrange(self, tokens: Tokens) -> Tokens:
        """Pack the conversations in `tokens` into blocks, and add a target for the last position."""
        bounds = [*np.flatnonzero(tokens.ids == self.eot).tolist(), len(tokens.ids)]
        blocks = list(pack(np.diff(bounds).tolist(), self.max_length))
        ids = np.full(len(blocks) * self.max_length + 1, self.end, np.uint16)
        mask = np.zeros(len(ids), np.uint8)
        for number, block in enumerate(blocks):
            position = number * self.max_length
            for conversation in block:
                begin, end = bounds[conversation : conversation + 2]
                stop = position + end - begin
                ids[position:stop] = tokens.ids[begin:end]
                mask[position:stop] = tokens.mask[begin:end]
                position = stop
        return Tokens(ids, mask)


def prepare(options: Options) -> str:
    """Make the shards that `options` describe, and print the command that trains on them. Returns their folder."""
    complaints = preparation.data_set_complaints(options)
    if options.init_from and options.tokenizer:
        complaints.append("--init-from sets the tokenizer, so leave --tokenizer out.")
    flags.check(options, complaints)
    if options.dataset == Options.dataset and not options.config and not options.input:
        options = dataclasses.replace(options, config="all")
    folder, sources, meta = preparation.plan(options)
    if options.init_from:
        from plumbing.run.models import load_saved_model  # imports torch

        model = load_saved_model(options.init_from)
        longest = model.settings.get("block_size", 1024)
        enc = model.enc
        is_large = sum(weight.numel() for weight in model.weights.values()) > 100_000_000
    else:
        enc = tokenizers.get_encoding(options.tokenizer or "gpt2")
        longest = 1024
        is_large = True
    if not tokenizers.has_chat_tokens(enc):
        enc = tokenizers.with_chat(enc)
    max_length = options.max_length or longest
    meta.made_from["max_length"] = max_length
    if options.input:
        meta.dataset = "conversations"
    conversations = Conversations(enc, max_length)
    meta = preparation.make_shards(folder, meta, conversations, enc=enc, sources=sources, options=options)
    preset = "chat" if is_large else "quickstart"  # the learning rate of chat is too low for a smaller model
    lengths = meta.lengths("train")
    groups = [("--init-from", options.init_from or "log")]
    groups += preparation.batch_flags(lengths, max_length, most=2**17 if is_large else 2**11)
    if is_large and sum(lengths) < 10**8:  # three passes over more would take days
        groups.append(("--passes", 3))
    console.print_next(preparation.training_command(preset, folder, *groups))
    return folder


def main(args: list[str] | None = None) -> None:
    prepare(flags.parse(Options, args))


if __name__ == "__main__":
    console.run(main)
