"""Turn conversations into token shards, to fine-tune a chat model.

    python smoltalk.py        SmolTalk, from the hub
    python smoltalk.py --dataset OWNER/NAME --split train_sft
    python smoltalk.py --input chats.jsonl --init-from log/quickstart

A line of `--input` is

    {"messages": [{"role": "user", "content": "Hi"}, ...]}

with the roles user, assistant and system (or developer). OpenAI's content parts, a list of messages without
the object around it, ShareGPT's conversations, Alpaca's instructions, and a .json file with an array of any of
these are read, too, and so are columns of these names in Parquet and CSV files. `system` or `system_prompt` beside
them comes first. Messages to and from tools, answers' reasoning, and rows that are no conversation, are left out and
counted. The line above becomes

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
    # the model to fine-tune, as train_gpt2.py takes it; it gives the tokenizer and the length
    init_from: str = ""
    tokenizer: str = ""  # gpt2 (the default), bytes, or a .tiktoken file; the role markers are added to it
    shard_size: flags.Positive[int] = 20_000_000  # about how many tokens are in a shard
    # tokens per block: the sequence length to train with; 0: the model's longest, or 1024 without --init-from
    max_length: int = 0


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import contextlib
import json
import operator
import random

import numpy as np

from plumbing.data import preparation, tokenizers
from plumbing.data.readers import Unusable

# that are read of a table
COLUMNS = "messages conversations instruction input output system system_prompt history".split()
FORMATS = (
    "What is read: messages with role and content, conversations with from and value, or instruction with input and"
    " output; beside them system or system_prompt."
)
OPEN_BLOCKS = 64  # blocks that wait for a conversation that fits
# the roles that ShareGPT and OpenAI also have
ROLE_NAMES = {"human": "user", "developer": "system"}
ROLE_NAMES |= dict.fromkeys(["gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"], "assistant")
TOOLS = "function observation function_call function_response tool_call tool_response ipython"
ROLE_NAMES |= dict.fromkeys(TOOLS.split(), "tool")
FLAGS = ("weight", "train", "training", "loss")  # of which 0 or false says that an answer is not to be learned
DETAILS = ("train_detail", "training_detail")  # which of its characters are to be learned
REASONING = ("reasoning_content", "reasoning", "thinking")

# ----- Conversations ------------------------------------------------------------------------------------


def read_conversation(values):
    """(messages, (messages of tools, answers' reasonings) that were left out) of a row's values, or Unusable.

    A message is {"role", "content"}, with "weight": 0 in the answers that are not to be learned.
    """
    found = messages_of(values)
    if isinstance(found, Unusable):
        return found
    messages, num_tools, num_reasonings = [], 0, 0
    for number, given in enumerate(found, 1):
        role, content = read_message(given)
        num_tools += role == "tool"
        if role == "tool" or (role == "system" and (content is None or content == "")):
            continue
        message = {"role": role, "content": content}
        if role not in tokenizers.ROLES or not isinstance(content, str) or not content.strip():
            return Unusable(
                f"is not a conversation: message {number} needs a role ({', '.join(tokenizers.ROLES)}) and content, "
                f"but is {console.plain(message, 60)}"
            )
        if role == "assistant":
            is_learned = read_flags(given)
            if isinstance(is_learned, Unusable):
                return is_learned
            num_reasonings += any(map(given.get, REASONING))
            if not is_learned:
                message["weight"] = 0
        messages.append(message)
    if all(message["role"] != "assistant" for message in messages):
        return Unusable("has no answer of an assistant")
    return messages, (num_tools, num_reasonings)


def messages_of(values):
    """The messages of a conversation as they stand in a row, behind that of its system; or Unusable."""
    if isinstance(values, Unusable):
        return values
    row = values if isinstance(values, dict) else {"messages": values}
    lists = [parsed(row.get(key)) for key in ("messages", "conversations")]
    messages = next((each for each in lists if each and isinstance(each, list)), [])
    if not messages and row.get("instruction") is not None:  # Alpaca's
        texts = row["instruction"], row.get("input") or ""
        request = "\n\n".join(filter(None, texts)) if all(isinstance(text, str) for text in texts) else None
        messages = [{"role": "user", "content": request}, {"role": "assistant", "content": row.get("output")}]
    if not messages:
        return Unusable("is not a conversation: it has no list of messages or conversations, and no instruction")
    if parsed(row.get("history")):
        return Unusable("has a history beside it, which is not read. Make one list of messages of both")
    system = row.get("system") or row.get("system_prompt")
    if system and read_message(messages[0]) != ("system", system):
        return [{"role": "system", "content": system}, *messages]
    return messages


def parsed(value):
    """A value, or what a text in JSON stands for: a CSV file has lists as such."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def read_message(message):
    """(role, content) of a message of OpenAI's or ShareGPT's; the role is tool if it is to or from one."""
    if not isinstance(message, dict):
        return "", message
    role = str(message.get("role") or message.get("from") or "").lower()
    if message.get("tool_calls") or message.get("function_call"):
        role = "tool"
    content = message.get("content")
    if content is None:
        content = message.get("value")
    parts = parts_of(message)
    if parts:
        content = "".join(part["text"] for part in parts)
    return ROLE_NAMES.get(role, role), content


def read_flags(message):
    """Whether an answer is to be learned, all of it or nothing; Unusable if its flags say something else."""
    for flag in FLAGS:
        if message.get(flag) not in (None, 0, 1):
            found = console.plain(repr(message[flag]), 60)
            return Unusable(f"has {flag} {found} at a message, but only 0 and 1, false and true are read")
    is_split = any(part.get(flag) not in (None, 1) for part in parts_of(message) for flag in FLAGS)
    if is_split or any(map(message.get, DETAILS)):
        return Unusable("has a message of which only a part is to be learned")
    return 0 not in map(message.get, FLAGS)


def parts_of(message):
    """The parts of OpenAI's content if all are text, and none is an image or a sound."""
    parts = message.get("content")
    parts = parts if isinstance(parts, list) and all(isinstance(part, dict) for part in parts) else []
    is_text = [part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts]
    return parts if all(is_text) else []


# ----- Blocks and shards --------------------------------------------------------------------------------


def pack(lengths, max_length):
    """Pack conversations of these lengths into blocks of `max_length` tokens. Yields the numbers of those in a block.

    Best fit: 5, 6, 3 and 4 tokens in blocks of 9 make 5 + 4 and 6 + 3, shuffled so that short ones begin blocks, too.
    """
    rng = random.Random(0)
    blocks = []  # those that are open: [the tokens that it can still take, its conversations]

    def close(block):
        blocks.remove(block)
        rng.shuffle(block[1])
        return block[1]

    for conversation, length in enumerate(lengths):
        fitting = [block for block in blocks if block[0] >= length]
        if not fitting:
            if len(blocks) == OPEN_BLOCKS:
                yield close(min(blocks, key=operator.itemgetter(0)))
            fitting = [[max_length, []]]
            blocks += fitting
        fullest = min(fitting, key=operator.itemgetter(0))
        fullest[0] -= length
        fullest[1].append(conversation)
    while blocks:
        yield close(blocks[0])


class Conversations(preparation.Renderer):
    """Whole conversations, packed into blocks, with a mask of what is to be learned."""

    columns, noun, masks, advice = COLUMNS, "conversation", True, FORMATS
    counted = [
        ("message", "to and from tools left out"),
        ("answer", "kept without the reasoning"),
        ("answer", "not to be learned, as weight or train says"),
        ("conversation", "cut after the last answer that fits"),
    ]

    def __init__(self, enc, max_length):
        self.max_length, self.eot, self.end = max_length, enc.eot_token, enc.encode_single_token("<|end|>")

    def read(self, row):
        found = read_conversation(row.values)
        messages = [] if isinstance(found, Unusable) else found[0]
        return found, sum(sys.getsizeof(message["content"]) for message in messages)

    def encode(self, enc, entries):
        return [self.render(enc, *entry) for entry in entries]

    def render(self, enc, messages, left_out):
        """Its tokens up to the last answer that fits into a block, and what is counted."""
        ids, mask, stop = tokenizers.render_conversation(messages, enc, self.max_length)
        if not stop:
            return Unusable(f"has no answer within {self.max_length} tokens, the --max-length"), ()
        if not any(mask[:stop]):
            return Unusable("has no answer that is to be learned"), ()
        num_unlearned = sum("weight" in message for message in messages)
        tokens = np.array(ids[:stop], np.uint16), np.array(mask[:stop], np.uint8)
        return tokens, (*left_out, num_unlearned, int(stop < len(ids)))

    def arrange(self, tokens):
        """Blocks of the conversations in `tokens`, and behind the last one the target of its last position."""
        ids, mask = tokens
        assert mask is not None
        bounds = [*np.flatnonzero(ids == self.eot).tolist(), len(ids)]
        blocks = list(pack(np.diff(bounds).tolist(), self.max_length))
        packed_ids = np.full(len(blocks) * self.max_length + 1, self.end, np.uint16)
        packed_mask = np.zeros(len(packed_ids), np.uint8)
        for number, block in enumerate(blocks):
            position = number * self.max_length
            for conversation in block:
                begin, end = bounds[conversation : conversation + 2]
                stop = position + end - begin
                packed_ids[position:stop], packed_mask[position:stop] = ids[begin:end], mask[begin:end]
                position = stop
        return packed_ids, packed_mask


def prepare(options):
    """Make the shards that `options` describe, and print the command that trains on them. Returns their folder."""
    complaints = preparation.complaints_of(options)
    if options.init_from and options.tokenizer:
        complaints.append("--init-from gives the tokenizer, so leave --tokenizer out.")
    flags.check(options, complaints)
    if options.dataset == Options.dataset and not (options.config or options.input):
        options = dataclasses.replace(options, config="all")
    folder, found, meta = preparation.plan(options, types=(".jsonl", ".parquet", ".csv"))
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
    meta.made_from["max_length"] = max_length
    if options.input:
        meta.dataset = "conversations"
    meta = preparation.make_shards(folder, meta, Conversations(enc, max_length), enc, found, options)
    preset = "chat" if is_large else "quickstart"  # whose rate is too low for a smaller model
    start, lengths = options.init_from or "log", meta.lengths("train")
    command = preparation.training_command(preset, folder, lengths, max_length, passes=3, start=start)
    console.print_next(command)
    return folder


def main(args=None):
    prepare(flags.parse(Options, args))


if __name__ == "__main__":
    console.run(main)
