"""Conversations to token shards, for fine-tuning a model that answers.

    python smoltalk.py                                     SmolTalk, 1M conversations from the hub
    python smoltalk.py --input chats.jsonl --out-dir chats
    python train_gpt2.py --preset chat --init-from log     then: fine-tune, with the shards in smoltalk/

A line of `--input` is {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}]},
roles user, assistant and system. It becomes

    <|endoftext|> <|user|> Hi <|end|> <|assistant|> Hello! <|end|>
                                                    ^^^^^^^^^^^^^^  what is learned: mask 1

where the markers are single ids behind the tokenizer's own; text that spells one stays text.
Shards are those of fineweb.py, and beside each `x_train_000001.npy` lies `x_train_000001.mask`
(np.save, uint8, as long): 1 where a token counts as a target.

Blocks of `--max-length` tokens hold whole conversations, so that a model whose sequences have that
length sees each one from its first token: what is left of a block is filled with <|end|>, mask 0.
A longer conversation is cut behind the last answer that fits.
"""

import contextlib
import glob
import json
import os
import random
import re
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from plumbing import cli
import fineweb
import tokenizer
from plumbing.cli import UserError

HUB_DATASET = "HuggingFaceTB/smoltalk"
ROLES = ("user", "assistant", "system")
OPEN_BLOCKS = 64  # blocks that wait for a conversation that fits

# -----------------------------------------------------------------------------
# Options


@dataclass
class Options:
    """Conversations to token shards with a loss mask."""

    input: tuple[str, ...] = ()  # JSON lines of conversations (.jsonl, .gz, .zst), files or globs; default: SmolTalk
    out_dir: str = ""  # where the shards go; by default smoltalk, or the first input's name
    tokenizer: str = "gpt2"  # gpt2, bytes, or the path of a .tiktoken file; the role markers are added to it
    shard_size: int = 20_000_000  # tokens per shard
    max_length: int = 1024  # tokens per block: the sequence length that the model will be trained with


# -----------------------------------------------------------------------------
# Conversations


def read_hub():
    """SmolTalk's conversations, in a seeded random order: its parts come one after the other."""
    import datasets  # slow to import: only where the hub is read

    try:
        conversations = datasets.load_dataset(HUB_DATASET, "all", split="train").shuffle(seed=0)
    except (OSError, ValueError, RuntimeError) as error:  # what the hub's client raises without a network
        raise UserError(
            f"got no {HUB_DATASET} from the hub ({str(error).splitlines()[0]}), needed a network that reaches it, "
            "run again later or give conversations of yours with --input"
        ) from None
    for row in tqdm(conversations, unit=" conversations"):
        with contextlib.suppress(ValueError):  # nobody can mend these: a faulty one is passed over
            check_messages(row["messages"])
            yield row["messages"]


def read_jsonl(paths):
    """The conversations of JSON lines files; a UserError names the line that is wrong."""
    with tqdm(unit=" conversations", delay=0.5) as bar:
        for path in paths:
            number = 0
            try:
                with fineweb.open_text(path) as file:
                    for number, line in enumerate(file, 1):
                        if line.isspace():
                            continue
                        record = json.loads(line)
                        if not isinstance(record, dict) or "messages" not in record:
                            raise ValueError("no messages")
                        check_messages(record["messages"])
                        yield record["messages"]
                        bar.update()
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(
                    f"got {path} line {number}: {error}, needed "
                    '{"messages": [{"role": "user", "content": "..."}, ...]}, mend or remove that line'
                ) from None


def check_messages(messages):
    """Raise ValueError unless `messages` is a conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages that are no list, or an empty one")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is no object")
        missing = [key for key in ("role", "content") if key not in message]
        if missing:
            raise ValueError(f"message {number} without {' and '.join(missing)}")
        if message["role"] not in ROLES:
            raise ValueError(f"message {number} with role {message['role']!r}, not one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise ValueError(f"message {number} with empty content")


def render_message(message, enc):
    """(ids, mask) of one message: its role's marker, its text, <|end|>."""
    marker = enc.encode_single_token(f"<|{message['role']}|>")
    body = [*fineweb.encode_text(enc, message["content"]).tolist(), enc.encode_single_token("<|end|>")]
    return [marker, *body], [0] + [int(message["role"] == "assistant")] * len(body)


def render_conversation(messages, enc):
    """(ids, mask) of a conversation; `enc` is a tokenizer with role markers, as "gpt2+chat".

    The mask is 1 on what an assistant says and on the <|end|> behind it. A prompt for the next
    answer is these ids and the id of <|assistant|>.
    """
    ids, mask = [enc.eot_token], [0]
    for message in messages:
        message_ids, message_mask = render_message(message, enc)
        ids += message_ids
        mask += message_mask
    return ids, mask


def cut_to(max_length, ids, mask, enc):
    """A rendered conversation up to the last answer that fits; two empty lists if there is none."""
    if len(ids) > max_length:
        end = enc.encode_single_token("<|end|>")
        stop = max((i for i in range(max_length) if ids[i] == end and mask[i]), default=-1) + 1
        ids, mask = ids[:stop], mask[:stop]
    return (ids, mask) if any(mask) else ([], [])


# -----------------------------------------------------------------------------
# Blocks and shards


def pack(conversations, max_length):
    """Put rendered conversations together to blocks of at most `max_length` tokens; yields (ids, mask).

    Each goes where it leaves the least room, of up to OPEN_BLOCKS blocks that are being filled.
    Conversations of 5, 6, 3 and 4 tokens in blocks of 9: 5 with 4, 6 with 3. Within a block their
    order is random (seeded): the first to come would always be the long ones, and a model would
    never see a short one with nothing before it, as a chat begins.
    """
    rng = random.Random(0)
    blocks, room = [], []  # of each block that is being filled: its conversations, the tokens it can still take

    def close(number):
        room.pop(number)
        block = blocks.pop(number)
        rng.shuffle(block)
        return [token for ids, _ in block for token in ids], [bit for _, mask in block for bit in mask]

    for ids, mask in conversations:
        fitting = [number for number in range(len(blocks)) if room[number] >= len(ids)]
        if fitting:
            number = min(fitting, key=room.__getitem__)
        else:
            if len(blocks) == OPEN_BLOCKS:
                yield close(room.index(min(room)))
            blocks.append([])
            room.append(max_length)
            number = -1
        blocks[number].append((ids, mask))
        room[number] -= len(ids)
    while blocks:
        yield close(0)


def write_shard(writer, blocks, max_length):
    """One shard and its mask. The mask comes first: a shard without one would have every token count."""
    filler = writer.enc.encode_single_token("<|end|>")
    # one token more than the blocks: the target of the last position of the last block
    tokens = np.full(len(blocks) * max_length + 1, filler, dtype=np.uint16)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    for number, (ids, counts) in enumerate(blocks):
        here = slice(number * max_length, number * max_length + len(ids))
        tokens[here], mask[here] = ids, counts
    writer.save()  # makes the folder
    number = len(writer.meta["shards"])
    name = f"{writer.stem}_{'train' if number else 'val'}_{number:06d}.mask"
    with cli.atomic_write(os.path.join(writer.folder, name)) as file:
        np.save(file, mask, allow_pickle=False)
    writer.write(tokens, None)


def prepare(options=Options()):
    """Make the shards that `options` describe. Returns their folder."""
    for flag in ("shard_size", "max_length"):
        if getattr(options, flag) < 2:
            raise UserError(f"got --{flag.replace('_', '-')} {getattr(options, flag)}, needed 2 or more")
    enc = tokenizer.get_encoding(options.tokenizer.removesuffix("+chat") + "+chat")
    if enc.n_vocab > tokenizer.MAX_VOCAB:
        raise UserError(f"got {enc.n_vocab:,} ids, needed at most 65,536 (shards are uint16), use a smaller tokenizer")
    sources = fineweb.list_inputs(options.input)
    for name, _ in sources:
        if fineweb.is_url(name) or fineweb.kind(name) != ".jsonl":
            raise UserError(f"got --input {name}, needed JSON lines in a local file (.jsonl, .jsonl.gz, .jsonl.zst)")
    folder = options.out_dir or (os.path.basename(sources[0].name).split(".")[0] if sources else "smoltalk")

    made_from = {"shard_size": options.shard_size, "max_length": options.max_length}
    made_from["sources"] = [[os.path.basename(name), size] for name, size in sources]
    meta = {"dataset": "conversations" if sources else HUB_DATASET, "tokenizer": enc.name, "vocab_size": enc.n_vocab}
    meta |= {"documents": 0, "tokens": 0, "targets": 0, "shards": {}, "complete": False}
    meta |= {"made_from": made_from, "ends": {}}
    path = fineweb.meta_path(folder, 0, 1)
    begun = fineweb.same_data(folder, fineweb.read_metas(folder), path, meta)
    meta = begun if begun["complete"] else meta  # one that was broken off starts anew, perhaps with a mended input
    stem = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    writer = fineweb.Writer(folder, stem, 0, 1, meta, enc)
    if writer.keep() is None:
        print(f"{folder} is complete: {meta['tokens']:,} tokens in {len(meta['shards'])} shards")
        return folder
    for stray in glob.glob(os.path.join(glob.escape(folder), f"{stem}_*_*")):  # of a run that was broken off
        os.remove(stray)

    counts = {"read": 0, "cut": 0, "left out": 0}
    meta["targets"] = 0

    def render():
        for messages in read_jsonl([source.name for source in sources]) if sources else read_hub():
            ids, mask = render_conversation(messages, enc)
            fitting, mask = cut_to(options.max_length, ids, mask, enc)
            counts["read"] += 1
            counts["cut"] += 0 < len(fitting) < len(ids)
            counts["left out"] += not fitting
            meta["targets"] += sum(mask)
            if fitting:
                yield fitting, mask

    blocks, per_shard = [], max(1, options.shard_size // options.max_length)
    for block in pack(render(), options.max_length):
        if len(blocks) == per_shard:  # only now that another follows is there something to train on
            write_shard(writer, blocks, options.max_length)
            blocks = []
        blocks.append(block)
    if not meta["shards"]:  # a corpus smaller than a shard: every tenth block validates
        if len(blocks) < 2:
            raise UserError(
                f"got {counts['read']} conversations, which fill {len(blocks)} blocks of {options.max_length} tokens, "
                "needed two (one validates, one trains), add conversations or lower --max-length"
            )
        write_shard(writer, blocks[::10], options.max_length)
        del blocks[::10]
    write_shard(writer, blocks, options.max_length)
    meta["conversations"] = counts
    writer.finish()
    print(
        f"{counts['read']:,} conversations, {counts['cut']:,} of them cut behind the last answer that fits in "
        f"{options.max_length} tokens, {counts['left out']:,} left out (no answer, or none that fits); "
        f"{meta['targets']:,} tokens are targets"
    )
    return folder


def main():
    """Conversations to shards."""
    prepare(cli.parse(Options))


if __name__ == "__main__":
    cli.run(main)
