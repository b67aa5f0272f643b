# ran at commit e2e7a00; modules that it imports have moved since
"""Memory and seconds of fineweb.py, and its speed with more threads than this machine has cores.

    python measure.py CHECKOUT files       one text of 1 GB, then 300 small files
    python measure.py CHECKOUT threads     1 and 2 threads that tokenize; 1, 2, 8 and 16 that sleep

A tokenizer that sleeps stands for cores that this machine lacks: it takes as long as GPT-2's takes for a batch of text,
without Python's lock, and returns as many ids. What is left is what the other threads must wait for: reading, joining,
cutting and writing, which one thread does, and the lock.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

CHECKOUT, WHAT, *REST = sys.argv[1:]
sys.path.insert(0, CHECKOUT)
FOLDER = "/tmp/measured-data"
ONE = "import sys; sys.path.insert(0, '.'); import fineweb; fineweb.main(sys.argv[1:]);"
ONE += "print(*[line for line in open('/proc/self/status') if 'VmHWM' in line])"


def run(*words):
    """(seconds, CPU seconds, peak memory in MB, tokens) of one command in a process of its own."""
    shutil.rmtree(f"{FOLDER}/out", ignore_errors=True)
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", ONE, *words, "--out-dir", f"{FOLDER}/out"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, encoding="utf-8", check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 1024
    found = re.search(r"([\d,]+) tokens to train on, ([\d,]+) to validate on", done.stdout)
    tokens = sum(int(number.replace(",", "")) for number in found.groups())
    return time.monotonic() - begun, cpu, peak, tokens


def measure_files(texts):
    text = "\n\n".join(texts)
    with open(f"{FOLDER}/large.txt", "w", encoding="utf-8") as file:
        while file.tell() < 1e9:
            file.write(text)
    os.makedirs(f"{FOLDER}/small", exist_ok=True)
    for i in range(300):
        with open(f"{FOLDER}/small/{i:03d}.txt", "w", encoding="utf-8") as file:
            file.write("\n\n".join(texts[i::300]))
    with open(f"{FOLDER}/tenth.txt", "w", encoding="utf-8") as file:
        while file.tell() < 1e8:
            file.write(text)
    for name, size in (("small", 10**8), ("tenth.txt", 10**7), ("large.txt", 10**7), ("large.txt", 10**8)):
        words = ["--input", f"{FOLDER}/{name}", "--num-proc", "2", "--shard-size", str(size)]
        seconds, cpu, peak, tokens = run(*words)
        print(
            f"{name:10} shards of {size:11,}: {seconds:6.1f} s, {cpu:6.1f} s of CPU, VmHWM {peak:5.0f} MiB, "
            f"{tokens:11,} tokens; load average {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def measure_threads(texts):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tiktoken

    import fineweb
    import tokenizer

    text = "\n\n".join(texts)
    documents = [text[i : i + 4000] for i in range(0, len(text), 4000)]
    real = tokenizer.get_encoding("gpt2")
    begun = time.perf_counter()
    num_tokens = sum(len(tokenizer.encode_text(real, document)) for document in documents)
    rate = len(text) / (time.perf_counter() - begun)
    print(f"tiktoken, one thread: {rate / 1e6:.1f}M characters/s, {len(text) / num_tokens:.2f} characters per token")

    def encode_all():
        begun = time.perf_counter()
        for document in documents:
            tokenizer.encode_text(real, document)
        return time.perf_counter() - begun

    with ThreadPoolExecutor(2) as executor:  # what two threads get of this machine beside its other processes
        seconds = max(executor.map(lambda _: encode_all(), range(2)))
    print(f"tiktoken, two threads: {2 * len(text) / seconds / 1e6:.1f}M characters/s")

    class Sleeping(tiktoken.Encoding):
        def encode_to_numpy(self, text, **options):
            starts = text.count(tokenizer.EOT)
            ids = np.zeros(int(len(text) * num_tokens / self.num_chars), np.uint32)
            ids[np.arange(starts) * (len(ids) // max(1, starts))] = self.eot_token
            time.sleep(len(text) / self.rate)
            return ids

    parts = dict(mergeable_ranks=real._mergeable_ranks, special_tokens=real._special_tokens)
    sleeping = Sleeping("gpt2", pat_str=real._pat_str, **parts)
    sleeping.num_chars, sleeping.rate = len(text), rate
    copy = tokenizer.copy_encoding
    for enc, counts in ((real, (1, 2)), (sleeping, (1, 2, 8, 16))):
        tokenizer.get_encoding = lambda name: enc
        tokenizer.copy_encoding = copy if enc is real else lambda enc, *rest: enc
        first = 0
        for count in counts:
            repeats = (3 if enc is real else 4 * count) * 8_000_000 // len(text) + 1
            pq.write_table(pa.table({"text": documents * repeats}), f"{FOLDER}/docs.parquet", row_group_size=1000)
            shutil.rmtree(f"{FOLDER}/out", ignore_errors=True)
            options = fineweb.Options(input=(f"{FOLDER}/docs.parquet",), num_proc=count, out_dir=f"{FOLDER}/out")
            cpu, begun = time.process_time(), time.perf_counter()
            fineweb.prepare(options)
            seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
            speed = len(text) * repeats / seconds
            first = first or speed
            kind = "tokenize" if enc is real else "sleep"
            print(
                f"{count:2} threads that {kind}: {speed / 1e6:6.1f}M characters/s, {speed / first / count:4.0%} of the "
                f"threads x one, {speed / rate / count:4.0%} of the threads x tiktoken; {seconds:.1f} s, {cpu:.1f} s of "
                f"CPU; load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )


os.makedirs(FOLDER, exist_ok=True)
from plumbing import documents as readers

TEXTS = readers.python_docs()
{"files": measure_files, "threads": measure_threads}[WHAT](TEXTS)
shutil.rmtree(FOLDER)
