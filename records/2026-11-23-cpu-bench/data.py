"""fineweb.py, from a file to shards on all cores, beside tiktoken on one thread with the texts in memory.

    python data.py CHECKOUT [ROUNDS]

What `python -m bench data` was until it became this script; CHECKOUT is one of the commit that added it. The texts are
Python's documentation, as often as a core takes two seconds for; both sides tokenize them with GPT-2's tokens, and
fineweb.py as many times as there are cores.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import fineweb
import pyarrow.parquet
from bench.measure import machine, measure, timed
from plumbing.data import readers, tokenizers
from plumbing.system.limits import num_cores

SECONDS_OF_WORK = 2  # of a core: so much that fineweb.py's start counts little


def main(rounds):
    cores, enc = num_cores(), tokenizers.get_encoding("gpt2")

    def tokenize(texts):
        return sum(len(enc.encode_ordinary(text)) + 1 for text in texts)

    docs = readers.python_docs()
    seconds, tokens_of_docs = timed(lambda: tokenize(docs))
    copies = max(1, round(SECONDS_OF_WORK / seconds))
    texts, work = docs * copies, tokens_of_docs * copies
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "docs.parquet")  # in FineWeb-Edu's format
        pyarrow.parquet.write_table(pyarrow.table({"text": texts * cores}), source, row_group_size=1000)

        def ours():
            out_dir = tempfile.mkdtemp(dir=folder)
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
                fineweb.prepare(fineweb.Options(input=(str(source),), out_dir=out_dir))
            return json.loads(Path(out_dir, "meta.json").read_text(encoding="utf-8"))["tokens"]

        sides = {"fineweb.py": ours, "tiktoken, one thread": lambda: tokenize(texts)}
        numbers, tokens = measure(sides, rounds, dict(zip(sides, (cores * work, work))), "tok")
    print(f"tokens: {tokens}; {numbers['ratio'] / cores:.0%} of {cores} times tiktoken's speed on one thread")
    print(json.dumps(numbers | machine("cpu") | {"cores": cores, "tokens": tokens}))


if __name__ == "__main__":
    main(int(sys.argv[2]) if len(sys.argv) > 2 else 4)
