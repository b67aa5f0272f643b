"""Turn conversations into token shards, to fine-tune a chat model.

    python smoltalk.py        SmolTalk, from the hub
    python smoltalk.py --dataset OWNER/NAME --split train_sft
    python smoltalk.py --input chats.jsonl --init-from log/quickstart

A line of `--input` is

    {"messages": [{"role": "user", "content": "Hi"}, ...]}

with the roles user, assistant and system (or developer). OpenAI's content parts, a list of messages without
the object around it, ShareGPT's conversations, Alpaca's instructions, and a .json file with an array of any of
these are read, too, and so are columns of these names in Parquet files, a clone of a data set, or a folder of
save_to_disk. Messages to and from tools are left out. The line above becomes

    <|endoftext|> <|user|> Hi <|end|> <|assistant|> Hello! <|end|>
                                                    ^^^^^^^^^^^^^^ mask 1

where the markers are single ids after the tokenizer's own; text that spells out a marker stays text.
The shards are like fineweb.py's, with a mask file `x_train_000001.mask` for each `x_train_000001.npy`
(np.save, uint8, same length): 1 where a token counts as a target.

A block of `--max-length` tokens holds whole conversations and is filled up with <|end|> (mask 0), so a model
with that sequence length sees each conversation from its first token. A longer conversation is cut after the
last answer that fits.
"""

import dataclasses
from dataclasses import dataclass

from plumbing.cli import console, flags


@dataclass
class Options:
    dataset: str = "HuggingFaceTB/smoltalk"  # OWNER/NAME on the hub
    config: str = ""  # which of the data set's configs, if it has several; of SmolTalk: all
    split: str = "train"  # which of its splits
    revision: str = ""  # its commit, branch or tag; by default the newest commit, when the shards are begun
    # your own files, folders or globs: .jsonl or .json, also .gz or .zst, or .parquet; or a clone of a data set
    input: tuple[str, ...] = ()
    out_dir: str | None = None  # folder of the shards; by default smoltalk, or the first input's name
    # the model to fine-tune, as train_gpt2.py takes it; it gives the tokenizer and the length
    init_from: str = ""
    tokenizer: str = ""  # gpt2 (the default), bytes, or a .tiktoken file; the role markers are added to it
    shard_size: flags.Positive[int] = 20_000_000  # tokens per shard
    # tokens per block: the sequence length to train with; 0: the model's longest, or 1024 without --init-from
    max_length: int = 0


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import math
import os
import random
import re

import numpy as np
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import readers, shards, sources, tokenizers

COLUMNS = ["messages", "conversations", "instruction", "input", "output"]  # those that are read of a table
OPEN_BLOCKS = 64  # blocks that wait for a conversation that fits
# the roles that ShareGPT and OpenAI also have
ROLE_NAMES = {"human": "user", "developer": "system"}
ROLE_NAMES |= dict.fromkeys(["gpt", "chatgpt", "bing", "bard"], "assistant")
ROLE_NAMES |= dict.fromkeys(["tool", "function", "observation", "function_call"], "tool")

# ----- Conversations ------------------------------------------------------------------------------------


def read_conversations(downloads):
    """The conversations in files; a UserError names one of the user's that is wrong, of the hub's they are left out."""
    num_for_tools = num_wrong = 0
    for number, source in downloads:
        downloads.remove_before(number)
        rows = readers.read_rows(source, COLUMNS)
        for place, record in tqdm(rows, unit=" conversations", desc=console.plain(source.name), delay=0.5):
            found = messages_of(record)
            messages = [message for message in found if message["role"] != "tool"]
            num_for_tools += len(found) - len(messages)
            fault = find_fault(messages)
            if not fault or (found and not messages):
                yield messages
            elif source.repo:  # users cannot mend the hub's data
                num_wrong += 1
            else:
                raise UserError(f"{place} is not a conversation: {fault}. Fix or remove it.")
    downloads.close()
    if num_for_tools:
        print(f"note: {console.count(num_for_tools, 'message')} to and from tools left out.")
    if num_wrong:
        print(f"note: {console.count(num_wrong, 'row')} left out, as they are no conversations.")


def messages_of(record):
    """The messages of a conversation in one of the formats that are read; [] if it is in none of them."""
    if isinstance(record, dict) and "instruction" in record:  # Alpaca's
        texts = record["instruction"], record.get("input") or ""
        request = "\n\n".join(filter(None, texts)) if all(isinstance(text, str) for text in texts) else None
        return [{"role": "user", "content": request}, {"role": "assistant", "content": record.get("output")}]
    if isinstance(record, dict):
        record = record.get("messages", record.get("conversations"))
    return list(map(read_message, record)) if isinstance(record, list) else []


def read_message(message):
    """A message of OpenAI's or ShareGPT's format by the names used here; one to or from a tool has the role tool."""
    if not isinstance(message, dict):
        return {"role": "", "content": message}
    role = "tool" if message.get("tool_calls") else message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list) and all(map(is_text, content)):
        content = "".join(part["text"] for part in content)
    return {"role": ROLE_NAMES.get(str(role), role), "content": content}


def is_text(part):
    """Whether a part of OpenAI's content is text, and not an image or a sound."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def find_fault(messages):
    """What is wrong with `messages`, or "" if they are a conversation."""
    if not messages:
        return "it has no list of messages or conversations, and no instruction"
    for number, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        if role not in tokenizers.ROLES or not isinstance(content, str) or not content.strip():
            roles = ", ".join(tokenizers.ROLES)
            return f"message {number} needs a role ({roles}) and content, but is {console.plain(message, 60)}"
    return ""


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


def make_shards(writer, found, enc, shard_size, max_length):
    """Render, pack and write the conversations in the files `found`, from the start."""
    writer.resume()  # keeps nothing: where in the input a shard ends is not recorded
    pattern = re.escape(writer.prefix) + r"_(val|train)_\d{6}\.(npy|mask)"
    for file in os.listdir(writer.folder):  # those of an interrupted run
        if re.fullmatch(pattern, file):
            os.remove(writer.path(file))
    conversations = read_conversations(sources.Downloads(found, os.path.join(writer.folder, ".download")))
    meta, counts = writer.meta, {"read": 0, "cut": 0, "left out": 0, "targets": 0}
    pad = np.array([[enc.encode_single_token("<|end|>")], [0]], dtype=np.uint16)

    def render():
        for messages in conversations:
            ids, mask, stop = tokenizers.render_conversation(messages, enc, max_length)
            counts["read"] += 1
            counts["cut"] += 0 < stop < len(ids)
            counts["left out"] += not stop
            counts["targets"] += sum(mask[:stop])
            if stop:
                yield np.array([ids[:stop], mask[:stop]], dtype=np.uint16)

    def write(number, blocks):
        if not meta.shards:
            tokenizers.save_for_folder(enc, writer.folder)
            writer.save()
        # one token more than the blocks: the target of the last position of the last block
        tokens, mask = np.hstack([*blocks, pad])
        writer.write(shards.shard_name(writer.prefix, number), tokens, mask.astype(np.uint8))
        meta.documents += writer.count_documents(tokens)

    # every tenth block is for validation, fewer of a large corpus, which may be ordered by source
    every = max(10, math.ceil(sum(source.size for source in found) / shard_size))
    blocks, sample, per_shard = [], [], max(1, shard_size // max_length)
    for i, block in enumerate(pack(render(), max_length, pad)):
        if i % every == 0 and len(sample) < per_shard:
            sample.append(block)
            continue
        if len(blocks) == per_shard:
            write(len(meta.shards) + 1, blocks)
            blocks = []
        blocks.append(block)
    if not blocks:
        raise UserError(
            f"{console.count(counts['read'], 'conversation')} ({counts['left out']} without an answer that fits) fill "
            f"{len(sample)} of the two blocks of {max_length} tokens needed. Add conversations, or lower --max-length; "
            "raise it if the answers do not fit."
        )
    write(len(meta.shards) + 1, blocks)
    write(0, sample)
    meta.shards = dict(sorted(meta.shards.items(), key=lambda shard: shard[0][-10:]))  # by their numbers
    writer.finish("conversation")
    read, cut, left_out, targets = counts.values()
    print(f"{targets:,} tokens are targets; of {read:,} conversations, {cut:,} were cut")
    print(f"after the last answer within {max_length} tokens, and {left_out:,} without one were left out")


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
    complaints = []
    if options.init_from and options.tokenizer:
        complaints.append("--init-from gives the tokenizer, so leave --tokenizer out.")
    if options.input and (options.dataset != Options.dataset or options.revision):
        complaints.append("--input is a data set of its own: leave --dataset and --revision out.")
    flags.check(options, complaints)
    if options.dataset == Options.dataset and not (options.config or options.input):
        options = dataclasses.replace(options, config="all")
    folder, found, meta = shards.plan(options, {}, types=(".jsonl", ".parquet"))
    if options.init_from:
        from plumbing.run.checkpoint import load_saved_model  # imports torch

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
    writer = shards.ShardWriter(folder, meta, enc)
    writer.make_once(make_shards, found, enc, options.shard_size, max_length)
    lengths = writer.meta.lengths("train")
    console.print_next(training_command(options.init_from, folder, is_large, max_length, lengths))
    return folder


def main(args=None):
    prepare(flags.parse(Options, args))


if __name__ == "__main__":
    console.run(main)
