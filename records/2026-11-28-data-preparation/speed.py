"""How fast fineweb.py is on more threads than this machine has cores, and what memory it takes.

    python records/2026-11-28-data-preparation/speed.py threads    1 and 2 threads that tokenize; up to 32 that sleep
    python records/2026-11-28-data-preparation/speed.py memory     texts of 100 and 300 MB, and one without ASCII letters

The text is Python's documentation, again and again, in documents of 4,000 characters in a Parquet file. A thread that sleeps
stands for a core that this machine lacks: for a batch it takes the time that GPT-2's tokenizer takes, without Python's lock, and
returns as many ids. It takes no bandwidth of the memory from the others, so real cores will reach less.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import tiktoken

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import fineweb
from plumbing.data import python_docs, shards, tokenizers


def write_documents(path, text, times):
    """A Parquet file with the text so many times, in FineWeb-Edu's form."""
    documents = [text[i : i + 4000] for i in range(0, len(text), 4000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": documents * times}), path, row_group_size=1000)


def prepare(path, num_threads):
    """(seconds, CPU seconds of all threads, tokens) of one preparation."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        options = fineweb.Options(input=(str(path),), out_dir=f"{folder}/out", num_proc=num_threads)
        cpu, begun = time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            fineweb.prepare(options)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        return seconds, cpu, shards.read_meta(f"{folder}/out").tokens


class Sleeping(tiktoken.Encoding):
    """Takes the time of another tokenizer, and returns as many ids."""

    def encode_to_numpy(self, text, **options):
        starts = text.count(tokenizers.EOT)
        ids = np.zeros(int(len(text) * self.tokens_per_character), np.uint32)
        ids[np.arange(starts) * (len(ids) // max(1, starts))] = self.eot_token
        time.sleep(len(text) / self.characters_per_second)
        return ids


def measure_threads(text, folder):
    real = tokenizers.get_encoding("gpt2")
    batches = [text[i : i + 2**19] for i in range(0, len(text), 2**19)]
    begun = time.thread_time()  # not what other programs take
    tokens = sum(len(real.encode_to_numpy(batch, disallowed_special=())) for batch in batches)
    seconds = time.thread_time() - begun
    print(f"tiktoken: {tokens / seconds / 1e6:.2f}M tokens per CPU second", flush=True)
    parts = dict(mergeable_ranks=real._mergeable_ranks, special_tokens=real._special_tokens)
    sleeping = Sleeping("gpt2", pat_str=real._pat_str, **parts)
    sleeping.tokens_per_character, sleeping.characters_per_second = tokens / len(text), len(text) / seconds
    copy = tokenizers.copy_encoding
    path = folder / "docs.parquet"
    for kind, enc, counts in (("tokenize", real, (1, 2)), ("sleep", sleeping, (1, 8, 16, 32))):
        tokenizers.get_encoding = lambda name: enc
        tokenizers.copy_encoding = copy if enc is real else lambda enc, *rest: enc
        first = 0
        for count in counts:
            times = max(2, round(3 * count / seconds))  # about three seconds of each thread
            write_documents(path, text, times)
            wall, cpu, made = prepare(path, count)
            first = first or made / wall
            print(
                f"{count:2} threads that {kind}: {made / wall / 1e6:5.1f}M tokens/s, {made / wall / first / count:4.0%} of the "
                f"threads x one; {made:,} tokens in {wall:.1f} s, {cpu:.1f} s of CPU; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )  # fmt: skip


def measure_memory(text, folder):
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fineweb; fineweb.main(sys.argv[1:]);"
    program += "print(*[line for line in open('/proc/self/status') if 'VmHWM' in line])"
    russian = "Сначала программа читает строку и возвращает её значение. " * (56_000_000 // 105)
    sizes = {"docs, 100 MB": (text * 40, "gpt2"), "docs, 300 MB": (text * 120, "gpt2"), "Russian, 56 MB": (russian, "bytes")}
    for name, (content, tokenizer) in sizes.items():
        (folder / "text.txt").write_text(content, encoding="utf-8")
        words = ["--input", folder / "text.txt", "--tokenizer", tokenizer, "--shard-size", "10000000", "--num-proc", "2"]
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-c", program, *map(str, words), "--out-dir", f"{out}/made"]
            done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 1024
        print(f"{name}, shards of 10M tokens: {peak:.0f} MiB", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure = {"threads": measure_threads, "memory": measure_memory}[sys.argv[1]]
        measure("\n\n".join(python_docs.python_docs()), Path(folder))
