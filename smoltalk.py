"""Turn conversations into token shards, to fine-tune a chat model.

    python smoltalk.py                                     SmolTalk, from the hub
    python smoltalk.py --input chats.jsonl --init-from log/quickstart
    python train_gpt2.py --preset chat --init-from log     then: fine-tune

A line of `--input` is {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}]},
roles user, assistant and system. It becomes

    <|endoftext|> <|user|> Hi <|end|> <|assistant|> Hello! <|end|>
                                                    ^^^^^^^^^^^^^^ mask 1

where the markers are single ids after the tokenizer's own; text that spells out a marker stays text.
The shards are like fineweb.py's, with a mask file `x_train_000001.mask` for each `x_train_000001.npy`
(np.save, uint8, same length): 1 where a token counts as a target.

Blocks of `--max-length` tokens hold whole conversations, so that a model with that sequence length
sees each one from its first token; the rest of a block is padded with <|end|>, mask 0. A longer
conversation is cut after the last answer that fits.
"""

from dataclasses import dataclass

from plumbing import cli


@dataclass
class Options:
    input: tuple[str, ...] = ()  # JSON lines of conversations: files (.jsonl, .gz, .zst), folders or globs; or SmolTalk
    out_dir: str | None = None  # folder of the shards; by default smoltalk, or the first input's name
    init_from: str = ""  # the model to fine-tune, as train_gpt2.py takes it; it gives the tokenizer and the length
    tokenizer: str = ""  # gpt2 (the default), bytes, or a .tiktoken file; the role markers are added to it
    shard_size: int = 20_000_000  # tokens per shard
    max_length: int = 0  # tokens per block: the sequence length to train with; 0: 1024, or the model's longest


def parse_args(args=None):
    return cli.parse(Options, args)


if __name__ == "__main__":
    cli.run(parse_args)  # --help and a mistyped flag need not wait for the imports

import contextlib
import itertools
import os
import random

import numpy as np
from tqdm import tqdm

import tokenizer
from plumbing import shards
from plumbing.cli import UserError
from plumbing.documents import is_url, list_inputs, read_json_lines, retry

HUB_DATASET = "HuggingFaceTB/smoltalk"
ROLES = ("user", "assistant", "system")
OPEN_BLOCKS = 64  # blocks that wait for a conversation that fits

# -----------------------------------------------------------------------------
# Conversations


def read_hub():
    """SmolTalk's conversations, shuffled with a fixed seed, since the data set is ordered by source."""
    import datasets  # slow to import, and only needed here

    advice = "Check the network and run the same command again, or give conversations of your own with --input."
    conversations = retry(HUB_DATASET, advice, lambda: datasets.load_dataset(HUB_DATASET, "all", split="train"))
    conversations = conversations.shuffle(seed=0)
    for row in tqdm(conversations, unit=" conversations"):
        with contextlib.suppress(ValueError):  # users cannot fix the hub's data: skip malformed conversations
            check_messages(row["messages"])
            yield row["messages"]


def read_files(paths):
    """The conversations of JSON lines files; a UserError names the line that is wrong."""
    with tqdm(unit=" conversations", delay=0.5) as bar:
        for path in paths:
            for number, record in read_json_lines(path):
                try:
                    check_messages(record.get("messages"))
                except ValueError as error:
                    raise UserError(
                        f"Line {number} of {path} is not a conversation: {error}. Fix or remove that line; it should "
                        'look like {"messages": [{"role": "user", "content": "..."}, ...]}.'
                    ) from None
                yield record["messages"]
                bar.update()


def check_messages(messages):
    """Raise ValueError unless `messages` is a conversation."""
    if messages is None:
        raise ValueError("it has no key messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are not a list, or the list is empty")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not a JSON object")
        missing = [key for key in ("role", "content") if key not in message]
        if missing:
            raise ValueError(f"message {number} has no {' and no '.join(missing)}")
        if message["role"] not in ROLES:
            role = repr(message["role"])
            raise ValueError(f"message {number} has the role {role}, which is not one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise ValueError(f"the content of message {number} is empty or not a string")


def render_message(message, enc):
    """(ids, mask) of one message: its role's marker, its text, <|end|>."""
    marker = enc.encode_single_token(f"<|{message['role']}|>")
    body = [*tokenizer.encode_text(enc, message["content"]).tolist(), enc.encode_single_token("<|end|>")]
    return [marker, *body], [0] + [int(message["role"] == "assistant")] * len(body)


def render_conversation(messages, enc):
    """(ids, mask) of a conversation; `enc` is a tokenizer with role markers, as "gpt2+chat".

    The mask is 1 on the assistant's text and the <|end|> that closes it. A prompt for the next answer also needs
    the id of <|assistant|> at its end.
    """
    ids, mask = [enc.eot_token], [0]
    for message in messages:
        message_ids, message_mask = render_message(message, enc)
        ids += message_ids
        mask += message_mask
    return ids, mask


def truncate(max_length, ids, mask, enc):
    """Truncate a rendered conversation after the last answer that fits; two empty lists if none does."""
    if len(ids) > max_length:
        end = enc.encode_single_token("<|end|>")
        stop = max((i for i in range(max_length) if ids[i] == end and mask[i]), default=-1) + 1
        ids, mask = ids[:stop], mask[:stop]
    return (ids, mask) if any(mask) else ([], [])


# -----------------------------------------------------------------------------
# Blocks and shards


def pack(conversations, max_length):
    """Pack rendered conversations into blocks of at most `max_length` tokens; yields (ids, mask).

    Best fit, with up to OPEN_BLOCKS open blocks. Conversations of 5, 6, 3 and 4 tokens in blocks of 9:
    5 with 4, 6 with 3. Within a block the order is random (seeded): otherwise the long ones would always
    come first, and the model would never see a short one without preceding context, which is how a chat
    begins.
    """
    rng = random.Random(0)
    blocks, free = [], []  # of each open block: its conversations, and the tokens it can still take

    def close(number):
        free.pop(number)
        block = blocks.pop(number)
        rng.shuffle(block)
        return [token for ids, _ in block for token in ids], [bit for _, mask in block for bit in mask]

    for ids, mask in conversations:
        fitting = [number for number in range(len(blocks)) if free[number] >= len(ids)]
        if fitting:
            number = min(fitting, key=free.__getitem__)
        else:
            if len(blocks) == OPEN_BLOCKS:
                yield close(free.index(min(free)))
            blocks.append([])
            free.append(max_length)
            number = -1
        blocks[number].append((ids, mask))
        free[number] -= len(ids)
    while blocks:
        yield close(0)


def write_blocks(writer, blocks, max_length, enc):
    """Write a shard and, first, its mask: without that, every token would count as a target."""
    pad_id = enc.encode_single_token("<|end|>")
    # one token more than the blocks: the target of the last position of the last block
    tokens = np.full(len(blocks) * max_length + 1, pad_id, dtype=np.uint16)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    for number, (ids, block_mask) in enumerate(blocks):
        start = number * max_length
        tokens[start : start + len(ids)] = ids
        mask[start : start + len(ids)] = block_mask
    if not writer.meta["shards"]:
        writer.save()  # creates the folder
        tokenizer.save_for_folder(enc, writer.folder)
    path = os.path.join(writer.folder, writer.next_name())
    shards.write_shard(path.removesuffix(".npy") + ".mask", mask)
    writer.write(tokens, None)


def prepare(options):
    """Make the shards that `options` describe, and print the command that trains on them. Returns their folder."""
    check_options(options)
    sources = list_inputs(options.input, types=(".jsonl",))
    for source in sources:
        if is_url(source.name):
            raise UserError(f"{source.name} is a URL, but --input takes only local files here. Download it first.")
    enc, block_size = model_tokenizer(options)
    max_length = options.max_length or block_size
    folder = shards.output_folder(options.out_dir, sources, "smoltalk")

    def open_writer():
        """The writer of the folder's shards, with the meta.json of an earlier run if that is complete."""
        made_from = {"shard_size": options.shard_size, "max_length": max_length}
        made_from["sources"] = [source.recorded() for source in sources]
        meta = shards.new_meta("conversations" if sources else HUB_DATASET, enc, made_from)
        writer = shards.ShardWriter(folder, meta, enc)
        if not writer.is_complete():
            writer.meta = meta  # an interrupted run starts over, as its input may have been fixed
        return writer

    shards.make_once(open_writer, lambda writer: make_shards(options.shard_size, max_length, enc, writer, sources))
    lengths = shards.split_lengths(shards.read_metas(folder).values())["train"]
    cli.print_next(training_command(options.init_from, folder, block_size, max_length, lengths))
    return folder


def model_tokenizer(options):
    """(tokenizer with role markers, longest sequence) of --init-from, or else --tokenizer and GPT-2's 1024."""
    if not options.init_from:
        return tokenizer.shard_encoding((options.tokenizer or "gpt2").removesuffix("+chat") + "+chat"), 1024
    from plumbing.checkpoint import load_model_state  # imports torch

    shape, _, enc = load_model_state(options.init_from)
    return enc if tokenizer.has_chat_tokens(enc) else tokenizer.with_chat(enc), shape["block_size"]


def training_command(init_from, folder, block_size, max_length, lengths):
    """The command that fine-tunes on shards of these lengths, at most three times over."""
    command = ["python", "train_gpt2.py", "--preset", "chat", "--init-from", init_from or "log"]
    if folder != "smoltalk":
        command += ["--data", folder, "--out-dir", "log/" + os.path.basename(os.path.abspath(folder))]
    if block_size != 1024:
        command += ["--block-size", block_size]
    if max_length != 1024:
        command += ["--sequence-length", max_length]
    blocks = sum(length // max_length for length in lengths)
    per_step = min(2**17 // max_length, 2 ** max(0, (blocks // 8).bit_length() - 1))  # 8 steps or more over the data
    steps = min(3000, 3 * blocks // per_step)
    if per_step * max_length != 2**17:
        command += ["--total-batch-size", per_step * max_length]
    if steps < 3000:
        command += ["--max-steps", steps, "--warmup-steps", steps // 10]
    return command


def make_shards(shard_size, max_length, enc, writer, sources):
    """Read, render, pack and write all shards, from the start."""
    meta = writer.meta
    if os.path.exists(shards.meta_path(writer.folder, 0, 1)):
        remove_shards(writer.folder, writer.prefix)
    counts = {"read": 0, "cut": 0, "left out": 0}
    meta["targets"] = 0

    def render():
        for messages in read_files([source.name for source in sources]) if sources else read_hub():
            ids, mask = render_conversation(messages, enc)
            fitting, mask = truncate(max_length, ids, mask, enc)
            counts["read"] += 1
            counts["cut"] += 0 < len(fitting) < len(ids)
            counts["left out"] += not fitting
            meta["targets"] += sum(mask)
            if fitting:
                yield fitting, mask

    blocks, per_shard = [], max(1, shard_size // max_length)
    for block in pack(render(), max_length):
        # a full shard is written only once another block follows, so that there is something left to train on
        if len(blocks) == per_shard:
            write_blocks(writer, blocks, max_length, enc)
            blocks = []
        blocks.append(block)
    if not meta["shards"]:  # a corpus smaller than a shard: every tenth block is for validation
        check_two_blocks(blocks, counts["read"], max_length)
        write_blocks(writer, blocks[::10], max_length, enc)
        del blocks[::10]
    write_blocks(writer, blocks, max_length, enc)
    meta["conversations"] = counts
    writer.finish()
    print(
        f"{counts['read']:,} conversations, {counts['cut']:,} of them cut after the last answer that fits in "
        f"{max_length} tokens, {counts['left out']:,} left out (no answer, or none that fits); "
        f"{meta['targets']:,} tokens are targets"
    )


def remove_shards(folder, prefix):
    """Remove the shards and masks of an interrupted run: the files that it named, and no others."""
    for number in itertools.count():
        name = shards.shard_name(prefix, number)
        names = (name, name.removesuffix(".npy") + ".mask")
        paths = [os.path.join(folder, name) for name in names]
        existing = [path for path in paths if os.path.exists(path)]
        if not existing:  # they are written in order
            break
        for path in existing:
            os.remove(path)


def check_options(options):
    """Raise one UserError listing everything that is wrong with the flags."""
    errors = cli.check_numbers(options, above_0=["shard_size"])
    if options.max_length == 1:
        errors.append("--max-length is 1, but it must be 2 or more.")
    if options.init_from and options.tokenizer:
        errors.append("--init-from gives the tokenizer, so leave --tokenizer out.")
    if errors:
        raise UserError(" ".join(errors))


def check_two_blocks(blocks, num_read, max_length):
    """Raise UserError unless there are two blocks: one to validate and one to train on."""
    if not num_read:
        raise UserError("The input contains no conversations. Check --input.")
    if not blocks:
        raise UserError(
            f"None of the {num_read:,} conversations has an answer that fits in {max_length} tokens. Raise "
            "--max-length, or add conversations in which the assistant answers."
        )
    if len(blocks) < 2:
        raise UserError(
            f"The input, {cli.count(num_read, 'conversation')}, fills only one block of {max_length} tokens, but two "
            "are needed, one of them for validation. Add conversations or lower --max-length."
        )


def main(args=None):
    """Make shards of conversations."""
    prepare(parse_args(args))


if __name__ == "__main__":
    cli.run(main)
