"""Downloads: whole or not there, tried again when the network fails, and nothing that is complete is asked for."""

import base64
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import fineweb
import numpy as np
import pytest
import tokenizer
from plumbing import documents
from plumbing.program import UserError
from tqdm import tqdm

from corpora import TABLES, as_bytes, is_split, make, random_texts, read, read_meta, write_jsonl, write_parquet
from harness import ROOT, full_disk, patched, refused


class Handler(http.server.BaseHTTPRequestHandler):
    """Files by path, and as much of the hub as its client asks for. The first answer of each path is broken off."""

    def do_GET(self):
        path = urllib.parse.unquote(self.path.split("?")[0])
        self.server.asked.append(path)
        self.server.users.append(self.headers["Authorization"])
        content = self.server.files.get(path)
        flaky = self.server.flaky if self.server.asked.count(path) == 1 and self.command == "GET" else ""
        if content is None or flaky == "status":
            self.send_error(404 if content is None else 503)
            return
        headers = {"Content-Length": len(content), "ETag": '"0123456789abcdef"', "X-Repo-Commit": "c" * 40}
        if isinstance(content, str):  # the address where it is
            content, headers = b"", {"Location": content}
        self.send_response(302 if "Location" in headers else 200)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if flaky == "short" else content)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """Also the hub, as `python fineweb.py` sees it with `server.env`."""
    monkeypatch.setattr(documents, "RETRY_SECONDS", 0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.users, server.flaky = {}, [], [], ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.env = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    server.env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def script(*args, server, folder):
    """`python fineweb.py ...` as a user runs it."""
    command, environment = [sys.executable, ROOT / "fineweb.py", *map(str, args)], os.environ | server.env
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=60)


@pytest.mark.parametrize("flaky", ["status", "short"])
def test_urls_are_fetched_again_when_the_network_fails_and_removed_after(tmp_path, server, flaky):
    texts = random_texts(40)
    write_jsonl(tmp_path / "a.jsonl.gz", texts[:20])
    write_parquet(tmp_path / "x.parquet", texts[20:30])
    write_parquet(tmp_path / "y.parquet", texts[30:])
    files = {"/a.jsonl.gz": "a.jsonl.gz", "/x y/b.parquet": "x.parquet", "/y/b.parquet": "y.parquet"}
    server.files = {path: (tmp_path / name).read_bytes() for path, name in files.items()}
    server.flaky = flaky
    urls = [f"{server.url}{path}" for path in files]
    folder = make(tmp_path, urls[0] + "?download=1", *urls[1:], shard_size=5000)
    assert is_split(folder, [texts[:20], texts[20:30], texts[30:]], [], shard_size=5000)
    assert all(server.asked.count(path) == 2 for path in files)
    assert all(re.search(r"\.npy$|^meta.json$|^tokenizer.tiktoken", name) for name in os.listdir(folder))


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_outage_later_than_the_first_download_is_survived(tmp_path, monkeypatch, prefetch):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    attempts = []

    def fetch(source, folder, number=3):
        attempts.append(number)
        return source._replace(path=str(tmp_path / "a.txt"))

    monkeypatch.setattr(documents, "fetch", fetch)
    sources = [documents.Source(f"http://host/{name}.txt") for name in "abc"]
    assert list(documents.read_batches(sources, "text", str(tmp_path), prefetch=prefetch)) and attempts == [3, 9, 9]


def test_a_download_is_whole_or_not_there(tmp_path, server):
    server.files, path, bars = {"/a.bin": b"content" * 1000}, tmp_path / "a.bin", []
    server.flaky = "short"

    class Bar(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, file=io.StringIO())
            bars.append(self)

    with patched(documents, "tqdm", Bar):
        with pytest.raises(UserError, match="ended after 3,500 of 7,000 bytes. Call a friend."):
            documents.download(f"{server.url}/a.bin", str(path), "Call a friend.", attempts=1)
        assert not any(tmp_path.iterdir())
        documents.download(f"{server.url}/a.bin", str(path), "")
    assert path.read_bytes() == server.files["/a.bin"] and [(bar.total, bar.n) for bar in bars[1:]] == [(7000, 7000)]
    # what the disk refuses, or the server for good, is not asked for again
    with patched(os, "fsync", full_disk), pytest.raises((UserError, OSError), match="No space left"):
        documents.download(f"{server.url}/a.bin", str(path), "")
    with pytest.raises(UserError, match="404"):
        documents.download(f"{server.url}/missing", str(path), "")
    assert server.asked == ["/a.bin"] * 3 + ["/missing"] and path.read_bytes() == server.files["/a.bin"]


def test_fineweb_edu_comes_file_by_file_from_the_hub(tmp_path, server):
    repo, commit = "HuggingFaceFW/fineweb-edu", "c" * 40
    texts, tree = random_texts(60), []
    for i in range(3):
        write_parquet(tmp_path / "x.parquet", texts[20 * i : 20 * i + 20])
        path, content = f"sample/10BT/{i:03d}_00000.parquet", (tmp_path / "x.parquet").read_bytes()
        server.files[f"/datasets/{repo}/resolve/{commit}/{path}"] = content
        tree.append({"type": "file", "path": path, "size": len(content), "oid": "0" * 40})
    server.files[f"/api/datasets/{repo}"] = json.dumps({"id": repo, "sha": commit, "siblings": []}).encode()
    server.files[f"/api/datasets/{repo}/tree/{commit}/sample/10BT"] = json.dumps(tree[::-1]).encode()
    server.flaky = "status"
    tokens = as_bytes(texts)
    args = ["--tokenizer", "bytes", "--shard-size", "7000", "--max-tokens", len(tokens) - 100]
    done = script(*args, server=server, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "edu_fineweb10B"
    assert np.array_equal(read(folder), tokens[:-100])
    count = -(-len(tokens[100:]) // 7000)
    shards = ["edufineweb_val_000000.npy"] + [f"edufineweb_train_{i:06d}.npy" for i in range(1, count)]
    assert sorted(os.listdir(folder)) == sorted([*shards, "meta.json", *TABLES])  # and no parquet
    # what is complete needs no network
    asked = len(server.asked)
    assert "is complete" in script(*args, server=server, folder=tmp_path).stdout and len(server.asked) == asked


def test_ready_made_shards_come_whole_or_again(tmp_path, server):
    rng = np.random.default_rng(0)
    shards = {}
    for file in ["val_000000", "train_000001", "train_000002"]:
        tokens = rng.integers(0, 50257, 1000, dtype=np.uint16)
        tokens[0] = 50256
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        shards[f"finewebedu_{file}.bin"] = header.tobytes() + tokens.tobytes()
    prefix = "/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"
    server.files = {prefix + file: content for file, content in shards.items()}
    server.flaky = "short"
    done = script("--pretokenized", 2, server=server, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "edu_fineweb10B"
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == shards
    assert set(os.listdir(folder)) - set(TABLES) == {*shards, "meta.json"}
    # a machine without a network and without tiktoken's cache can train on them, if this one has the tables
    assert ("note: The tokenizer" in done.stdout) != (folder / "tokenizer.tiktoken").exists()
    meta = read_meta(folder)
    assert meta["shards"] == dict.fromkeys(shards, 1000) and meta["tokens"] == 3000 and meta["complete"]
    # one more shard than there is: said, and what is there stays
    done = script("--pretokenized", 3, server=server, folder=tmp_path)
    assert done.returncode == 2 and "finewebedu_train_000003.bin" in done.stderr and "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == shards


def test_the_secrets_in_a_url_are_only_for_its_server(tmp_path, server, capsys):
    """A password and a signature stood in meta.json and in errors, and a new signature was other data."""
    texts = random_texts(20)
    server.files = {"/a.jsonl": Path(write_jsonl(tmp_path / "a.jsonl", texts)).read_bytes()}
    shown = f"{server.url}/a.jsonl"
    secret = shown.replace("http://", "http://me:pass%20word@") + "?X-Amz-Signature="
    folder = make(tmp_path, secret + "one", shard_size=5000)
    assert base64.b64decode(server.users[0].removeprefix("Basic ")) == b"me:pass word"
    assert read_meta(folder)["made_from"]["sources"] == [[shown, 0, ""]]
    make(tmp_path, secret + "two", shard_size=5000)
    assert len(server.asked) == 1 and "is complete" in capsys.readouterr().out
    server.files["/bad.jsonl"], server.files["/b.csv"] = b"{broken", b"title\n"
    wrong = ["/none.jsonl", "/bad.jsonl", "/b.csv", "/blank in it.jsonl", ":port/a.jsonl", "/a.pdf"]
    for path in wrong:
        url = secret.replace(urllib.parse.urlsplit(shown).netloc + "/a.jsonl", shown.split("/")[2] + path)
        with pytest.raises(UserError, match=f"{server.url}{path}") as caught:
            make(tmp_path, url, name="other")
        assert "pass" not in str(caught.value) and "Signature" not in str(caught.value)
    with pytest.raises(UserError, match=f"input .* was .'{shown}', 0, ''. and is now .'{server.url}/b.csv'"):
        make(tmp_path, server.url + "/b.csv?a=b", shard_size=5000)
    server.files["/a.jsonl"] = b""
    line = refused(tokenizer.main, "--input", secret, "--vocab-size", "300", "--out", tmp_path / "new.tiktoken")
    assert "There is no text in" in line and "pass" not in line and "Signature" not in line


@pytest.mark.parametrize("scheme", ["HTTP://", "ftp://", "s3://", "http:/"])
def test_an_address_that_is_not_read_is_named_without_its_secrets(scheme, tmp_path):
    place = f"{scheme}user:secret@127.0.0.1/text.jsonl?signature=secret"
    line = refused(fineweb.main, "--input", place, "--tokenizer", "bytes", "--out-dir", tmp_path / "out")
    assert f"{scheme}127.0.0.1/text.jsonl" in line and "secret" not in line


def test_a_redirect_is_followed_but_not_to_a_file_of_this_machine(tmp_path, server):
    server.files = {"/content": b"content", "/there": "/content", "/file": (ROOT / "README.md").as_uri()}
    documents.download(f"{server.url}/there", str(tmp_path / "a"), "")
    with pytest.raises(UserError, match="is not allowed"):
        documents.download(f"{server.url}/file", str(tmp_path / "b"), "")
    assert (tmp_path / "a").read_bytes() == b"content" and not (tmp_path / "b").exists()


# a program on a machine whose network resolves no name, with a clock that counts instead of waiting
WITHOUT_A_NETWORK = """
import os, socket, sys, time
def refuse(*args, **options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
slept = 0
def sleep(seconds):
    global slept
    slept += seconds
    if slept > 5:
        print("waited for", slept, "seconds", file=sys.stderr)
        os._exit(1)
socket.getaddrinfo, time.sleep = refuse, sleep
program = __import__(sys.argv[1])
program.program.run(lambda: program.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "words", ["fineweb --pretokenized 1", "fineweb --tokenizer bytes", "smoltalk --tokenizer bytes"]
)
def test_without_a_network_a_download_ends_in_one_line_within_seconds(tmp_path, words):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", WITHOUT_A_NETWORK, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    (line,) = done.stderr.splitlines()
    assert [path.name for path in tmp_path.iterdir()] in ([], ["hub"])  # nothing is left of what never began
    assert line.startswith("error: Could not download ") and "Name or service not known. Check the network" in line
