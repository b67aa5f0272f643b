"""Attacks on the data programs: fineweb.py, smoltalk.py, tokenizer.py, contamination.py, and shards that the trainer reads."""
from common import *
import numpy as np
import resource

def words(n, seed=0):
    r = random.Random(seed)
    return " ".join("".join(r.choice("abcdefghij") for _ in range(r.randint(1, 8))) for _ in range(n))

def fw(out, *inputs, limit=90, **kw):
    before = kw.pop("before", None); env = kw.pop("env", None)
    return go(cmd("fineweb.py", "--input", *inputs, **(dict(out_dir=out, tokenizer="bytes", shard_size=20000, num_proc=1) | kw)), limit=limit, before=before, env=env)

def shards_of(out): return {p.name: digest(p) for p in sorted(Path(out).iterdir()) if p.suffix == ".npy"}

def changed_inputs():
    f = fresh("changed"); 
    text = words(60000)   # some 300 KB
    for name in ("small", "first", "last", "middle"):
        src = f / "in.txt"; body = words(8000) if name == "small" else text
        out = f / f"out-{name}"
        src.write_text(body)
        r = fw(out, src); assert r.status == 0, r.text
        a = bytearray(body.encode()); n = len(a)
        pos = {"small": 9000, "first": 5, "last": n - 5, "middle": n // 2 - n // 12}[name]
        for i in range(pos, min(pos + 300, n)): a[i] = a[i] ^ 1 if a[i] > 97 else a[i]
        st = src.stat(); src.write_bytes(a); os.utime(src, ns=(st.st_atime_ns, st.st_mtime_ns))
        before = shards_of(out); r = fw(out, src)
        record(8, f"input changed, same size, {len(body):,} bytes, 300 bytes at {name}", r.one_line and shards_of(out) == before, r.tail(160))
    # stopped in the middle, then another text
    files = []
    for i in range(3):
        (f / f"p{i}.jsonl").write_text("".join(json.dumps({"text": words(40, 100 * i + j)}) + "\n" for j in range(800))); files.append(f / f"p{i}.jsonl")
    out = f / "killed"; p = lambda p: (wait_for(lambda: len(list(Path(out).glob("*train*.npy"))) >= 4, 40, p), p.kill())
    r = fw(out, *files, before=p, shard_size=5000)
    n = len(list(out.glob("*.npy"))); first = files[0].read_text()
    b = files[0].read_text(); lines = b.splitlines(True); lines[5], lines[6] = lines[6], lines[5]; files[0].write_text("".join(lines))
    r = fw(out, *files, shard_size=5000); record(8, f"killed after {n} shards, two lines of the first file exchanged", r.one_line, r.tail(160))
    files[0].write_text(b); r = fw(out, *files, shard_size=5000)
    r2 = fw(f / "straight", *files, shard_size=5000); record(8, "put back: the same shards as never killed", [d for d in shards_of(out).values()] == [d for d in shards_of(f / "straight").values()], r.tail(100))
    # order of inputs
    r = fw(out, *files[::-1], shard_size=5000); record(8, "complete, inputs in another order", r.one_line, r.tail(160))
    r = fw(out, *files[:2], shard_size=5000); record(8, "complete, an input left out", r.one_line, r.tail(160))
    d = f / "elsewhere"; d.mkdir(); [shutil.copy(x, d / x.name) for x in files]
    r = fw(out, *sorted(d.glob("*")), shard_size=5000); record(8, "the inputs moved elsewhere: still complete", r.status == 0, r.tail(120))

def url_inputs():
    import http.server, threading
    f = fresh("urls"); (f / "srv").mkdir()
    class H(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *a, **k): super().__init__(*a, directory=str(f / "srv"), **k)
        def log_message(self, *a): pass
    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), H); threading.Thread(target=s.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{s.server_port}/a.txt"
    (f / "srv/a.txt").write_text(words(20000))
    out = f / "o"; r = fw(out, url); assert r.status == 0, r.text; before = shards_of(out)
    (f / "srv/a.txt").write_text(words(20000, 7)); r = fw(out, url)
    record(8, "a URL whose content changed, complete folder", r.status == 2, r.tail(140))
    (f / "srv/b.jsonl").write_text("".join(json.dumps({"text": words(40, j)}) + "\n" for j in range(1500)))
    u = url.replace("a.txt", "b.jsonl"); o = f / "o2"
    fw(o, u, shard_size=5000, before=lambda p: (wait_for(lambda: len(list(Path(o).glob("*train*.npy"))) >= 3, 40, p), p.kill()))
    n = len(list(o.glob("*train*.npy")))
    (f / "srv/b.jsonl").write_text("".join(json.dumps({"text": words(40, j + 5000)}) + "\n" for j in range(1500)))
    r = fw(o, u, shard_size=5000); record(8, f"a URL whose content changed after {n} shards of a killed run", r.status == 2, r.tail(140))
    s.shutdown()

def metas():
    f = fresh("metas"); src = f / "a.txt"; src.write_text(words(30000)); r = fw(f / "o", src); assert r.status == 0, r.text
    good = json.loads((f / "o/meta.json").read_text()); names = list(good["shards"])
    def v(name, change, folder=None):
        o = f / "x/o"; shutil.rmtree(o, ignore_errors=True); shutil.copytree(f / "o", o); m = json.loads(json.dumps(good)); change(m, o); (o / "meta.json").write_text(json.dumps(m)) if m else None
        r = fw(o, src); ok = r.one_line or (r.status == 0 and shards_of(o) == shards_of(f / "o"))
        record(9, f"fineweb.py: meta.json {name}", ok, r.tail(140) if not ok else ("refused" if r.status else "right shards"))
        shutil.rmtree(o, ignore_errors=True); shutil.copytree(f / "o", o); m = json.loads(json.dumps(good)); change(m, o); (o / "meta.json").write_text(json.dumps(m)) if m else None
        t = go(train_cmd(o, f / "run", max_steps=1, val_every=1, checkpoint_every=0)); shutil.rmtree(f / "run", ignore_errors=True)
        record(9, f"train_gpt2.py: meta.json {name}", t.one_line, t.tail(140) if not t.one_line else "refused")
    v("shards {} but complete", lambda m, o: m.update(shards={}))
    v("shards {}, tokens 0, complete", lambda m, o: m.update(shards={}, tokens=0))
    v("shards {} and no files", lambda m, o: (m.update(shards={}), [p.unlink() for p in o.glob("*.npy")]))
    v("one shard taken out", lambda m, o: m["shards"].pop(names[-1]))
    v("one shard and its file taken out", lambda m, o: (m["shards"].pop(names[-1]), (o / names[-1]).unlink()))
    v("one file taken out", lambda m, o: (o / names[1]).unlink())
    v("a shard's length changed", lambda m, o: m["shards"].update({names[1]: 5}))
    v("two shards exchanged", lambda m, o: ((o / names[1]).rename(o / "t"), (o / names[-1]).rename(o / names[1]), (o / "t").rename(o / names[-1])))
    v("complete false", lambda m, o: m.update(complete=False))
    v("ends with four entries", lambda m, o: m.update(ends={k: e[:4] for k, e in m["ends"].items()}))
    v("ends of texts", lambda m, o: m.update(ends={k: ["a"] * 5 for k, e in m["ends"].items()}, complete=False))
    v("shards with a text as length", lambda m, o: m["shards"].update({names[1]: "5"}))
    v("shards a list", lambda m, o: m.update(shards=names))
    v("negative length", lambda m, o: m["shards"].update({names[1]: -5}))
    # same-size exchange of shards of equal lengths
    o = f / "y"; shutil.copytree(f / "o", o); a, b = names[1], names[2]
    if good["shards"][a] == good["shards"][b]:
        (o / a).rename(o / "t"); (o / b).rename(o / a); (o / "t").rename(o / b)
        r = fw(o, src); record(9, "two shards of equal length exchanged by hand (complete)", True, "hand-made: " + r.tail(100))

def outputs():
    f = fresh("outputs"); src = f / "a.txt"; src.write_text(words(3000))
    # tokenizer.py --out
    tk = lambda out, **kw: go(cmd("tokenizer.py", "--input", src, vocab_size=300, out=out), **kw)
    for name in ("a.tiktoken", "b.tiktoken"):
        for suffix in ("", ".json"):
            p = f / (name + suffix); p.write_text("precious"); before = listing(f); r = tk(f / name); record(4, f"tokenizer.py --out onto a file at {name + suffix}", r.one_line and listing(f) == before, r.tail(100)); p.unlink()
    for suffix in ("", ".json", ".part", ".json.part"):
        p = f / ("c.tiktoken" + suffix); (f / "victim").write_text("precious"); p.symlink_to(f / "victim"); r = tk(f / "c.tiktoken"); record(4, f"tokenizer.py --out, link at c.tiktoken{suffix}", (f / "victim").read_text() == "precious" and (r.one_line or r.status == 0), r.tail(100)); [x.unlink() for x in f.glob("c.tiktoken*")]
    for suffix in (".part", ".json.part"):
        p = f / ("d.tiktoken" + suffix); p.write_text("precious"); r = tk(f / "d.tiktoken"); record(4, f"tokenizer.py --out, a user's file at d.tiktoken{suffix}", p.exists() and p.read_text() == "precious", r.tail(80)); [x.unlink() for x in f.glob("d.tiktoken*")]
    (f / "dir.tiktoken").mkdir(); r = tk(f / "dir.tiktoken"); record(4, "tokenizer.py --out onto a folder", r.one_line, r.tail(100))
    (f / "in.txt").write_text(words(100)); 
    # the file appears while it learns
    big = f / "big.txt"; big.write_text(words(300000)); 
    def appear(p): time.sleep(1.0); (f / "late.tiktoken").write_text("precious")
    r = go(cmd("tokenizer.py", "--input", big, vocab_size=5000, out=f / "late.tiktoken"), before=appear)
    record(4, "tokenizer.py --out, the file appears while it learns", (f / "late.tiktoken").read_text() == "precious", r.tail(100))
    ps = [subprocess.Popen(cmd("tokenizer.py", "--input", src, vocab_size=v, out=f / "two.tiktoken"), env=ENV, cwd=SCRATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for v in (300, 310)]
    rs = [(p.communicate(timeout=60), p.returncode) for p in ps]
    import tokenizer
    try: ok = bool(tokenizer.read_encoding(f / "two.tiktoken")); 
    except BaseException as e: ok = str(e)
    record(4, "two tokenizer.py with one --out at once", sorted(c for _, c in rs) == [0, 2] and ok is True, f"{[c for _, c in rs]} readable {ok}: {[e[-120:] for (o, e), c in rs]}")
    # fineweb into folders of others
    o = f / "peer"; o.mkdir(); np.save(o / "edufineweb_train_000001.npy", np.arange(5000, dtype=np.uint16) % 250); np.save(o / "edufineweb_val_000000.npy", np.arange(5000, dtype=np.uint16) % 250)
    before = listing(o); r = fw(o, src); record(4, "fineweb.py into a folder of build-nanogpt's shards", r.one_line and listing(o) == before, r.tail(120))
    o = f / "mine"; o.mkdir(); (o / "tokenizer.tiktoken").write_text("precious"); (o / "tokenizer.tiktoken.json").write_text("precious"); before = listing(o); r = fw(o, src)
    record(4, "fineweb.py into a folder with a user's tokenizer.tiktoken", r.status == 2 and listing(o) == before, r.tail(120) + f" now {(o / 'tokenizer.tiktoken').read_text()[:20]!r}")
    import tokenizer as tkm
    o = f / "mine2"; o.mkdir(); r = tk(o / "tokenizer.tiktoken"); before = listing(o); r = fw(o, src)
    record(4, "fineweb.py --tokenizer bytes into a folder with tokenizer.py's own tokenizer.tiktoken", all(listing(o).get(k) == d for k, d in before.items()), r.tail(120))
    o = f / "mine3"; o.mkdir(); (o / ".download-0-of-1").mkdir(); (o / ".download-0-of-1/x").write_text("precious"); r = fw(o, src); record(4, "a user's folder .download-0-of-1 in --out-dir", (o / ".download-0-of-1/x").exists(), r.tail(80))
    o = f / "mine4"; o.mkdir(); (f / "lk").mkdir(); (f / "lk/x").write_text("precious"); (o / ".download-0-of-1").symlink_to(f / "lk"); r = fw(o, src); record(5, "link at .download-0-of-1", (f / "lk/x").exists(), r.tail(80))
    for name in (".lock", "meta.json.part", "meta.json", "tokenizer.tiktoken.part", "tokenizer.tiktoken", "mine5_val_000000.npy", "mine5-val_000000.npy", "mine5_train_000001.npy", "mine5_train_000001.npy.part", ".lock-tokenizer"):
        for kind in ("file", "dangling"):
            o = f / "mine5"; shutil.rmtree(o, ignore_errors=True); o.mkdir(); v = f / "vic"; shutil.rmtree(v, ignore_errors=True); v.mkdir(); (v / "a").write_text("precious"); (o / name).symlink_to(v / ("a" if kind == "file" else "new")); before = listing(v)
            r = fw(o, src); record(5, f"fineweb.py: link ({kind}) at {name}", listing(v) == before and (r.status == 0 or r.one_line), r.tail(120) if r.status else "ran, target untouched")
    # folder becomes a link while it works
    o = f / "sw"; big = [f / f"q{i}.jsonl" for i in range(2)]
    for i, b in enumerate(big): b.write_text("".join(json.dumps({"text": words(40, 100 * i + j)}) + "\n" for j in range(1500)))
    (f / "others").mkdir(); fw(f / "others" / "sw", big[1], shard_size=5000); before = listing(f / "others")
    def swap(p):
        wait_for(lambda: len(list(Path(o).glob("*train*.npy"))) >= 3, 40, p); o.rename(f / "moved"); o.symlink_to(f / "others/sw")
    r = fw(o, *big, shard_size=5000, before=swap); now = listing(f / "others"); record(2, "fineweb.py: its folder is moved and replaced by a link to another data set while it works", now == before, f"{sum(now.get(k) != d for k, d in before.items())} files of the other replaced, {len(set(now) - set(before))} added; {r.tail(100)}")
    # smoltalk likewise
    (f / "c.jsonl").write_text("".join(json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": words(20, i)}]}) + "\n" for i in range(200)))
    o = f / "st"; o.mkdir(); (o / "tokenizer.tiktoken").write_text("precious"); before = listing(o); r = go(cmd("smoltalk.py", "--input", f / "c.jsonl", out_dir=o, tokenizer="bytes")); record(4, "smoltalk.py into a folder with a user's tokenizer.tiktoken", all(listing(o).get(k) == d for k, d in before.items()), r.tail(120))
    o = f / "st2"; r = go(cmd("smoltalk.py", "--input", f / "c.jsonl", out_dir=o, tokenizer="bytes")); assert r.status == 0, r.text; b = shards_of(o); t = (f / "c.jsonl").read_bytes(); (f / "c.jsonl").write_bytes(t.replace(b"hi", b"ho")); r = go(cmd("smoltalk.py", "--input", f / "c.jsonl", out_dir=o, tokenizer="bytes")); record(8, "smoltalk.py: input changed, same size", r.one_line, r.tail(130))

def parse():
    f = fresh("parse"); src = f / "a.txt"; src.write_text(words(300))
    for part in ("9" * 5000 + "/4", "1/" + "9" * 5000, "0/0", "5/4", "-1/4", "\u0661/\u0664", "1/4\n", "1.0/4", "a/b", "1/4/2"):
        r = fw(f / "o", src, part=part); record(15, f"--part {part[:12]!r} ({len(part)} characters)", r.one_line and len(r.err) < 900 and not (f / "o").exists(), r.tail(140))
    import pyarrow as pa, pyarrow.parquet as pq
    tables = {
        "struct a{b} beside a.b": pa.table({"a": [{"b": "struct text"}] * 50, "a.b": ["column text"] * 50}),
        "a.b before a{b}": pa.table({"a.b": ["column text"] * 50, "a": [{"b": "struct text"}] * 50}),
        "only a{b}": pa.table({"a": [{"b": "struct text"}] * 50}),
        "a.b twice": pa.Table.from_arrays([pa.array(["one"] * 50), pa.array(["two"] * 50)], names=["a.b", "a.b"]),
        "a.b list": pa.table({"a.b": [["x"]] * 50}),
    }
    for name, t in tables.items():
        pq.write_table(t, f / "t.parquet"); shutil.rmtree(f / "p", ignore_errors=True)
        r = fw(f / "p", f / "t.parquet", text_column="a.b", shard_size=300)
        text = b"".join(np.load(p).astype(np.uint8).tobytes() for p in sorted((f / "p").glob("*.npy"))) if (f / "p").exists() else b""
        record(15, f"parquet, --text-column a.b, {name}", (r.status == 0 and b"column text" in text and b"struct" not in text) or r.one_line, r.tail(140) if r.status else f"reads {text[:40]}")

def long_text():
    f = fresh("long"); import gzip
    def timed(name, src, budget, limit=150, **kw):
        shutil.rmtree(f / "o", ignore_errors=True)
        c = ["/usr/bin/time", "-f", "TIME %U %M", *cmd("fineweb.py", "--input", src, **(dict(out_dir=f / "o", tokenizer="bytes", num_proc=1, shard_size=10_000_000) | kw))]
        r = go(c, limit=limit); m = re.search(r"TIME ([\d.]+) (\d+)", r.err); said = f"{m[1]} s, {int(m[2]) // 1024} MB" if m else "no time"
        record(13, f"{name} ({kw})", r.status != "timeout" and m and float(m[1]) < budget and int(m[2]) < 1_500_000 and "Traceback" not in r.text, said + "; " + (r.tail(80) if r.status else ""))
    p = f / "a.txt"
    p.write_text("x" * 20_000_000); timed("20 MB of one letter, --separator", p, 30, separator="<|endoftext|>")
    timed("20 MB of one letter, --separator of 1,000 letters", p, 30, separator="x" * 999 + "y")
    p.write_text("\n" * 20_000_000); timed("20 MB of line ends, --separator", p, 30, separator="<|endoftext|>")
    p.write_text("<|endoftext|" * 1_700_000); timed("20 MB of almost the separator", p, 30, separator="<|endoftext|>")
    p.write_text("<|endoftext|>" * 1_600_000); timed("20 MB of nothing but the separator", p, 30, separator="<|endoftext|>")
    p.write_text(" " * 20_000_000); timed("20 MB of blanks", p, 30); timed("20 MB of blanks, gpt2", p, 60, tokenizer="gpt2")
    p.write_text("\n" * 20_000_000); timed("20 MB of line ends, gpt2", p, 60, tokenizer="gpt2")
    p.write_text("x" * 20_000_000); timed("20 MB of one letter, gpt2", p, 60, tokenizer="gpt2")
    with gzip.open(f / "n.txt.gz", "wb", 1) as g:
        for _ in range(300): g.write(b"\0" * 1_000_000)
    timed(".txt.gz of 300 MB of NULs, --max-tokens", f / "n.txt.gz", 20, max_tokens=1_000_000)
    timed(".txt.gz of 300 MB of NULs, --max-tokens, gpt2", f / "n.txt.gz", 20, max_tokens=1_000_000, tokenizer="gpt2")
    with open(f / "b.txt", "w") as g:
        for _ in range(300): g.write("a" * 1_000_000)
    timed("300 MB of one letter, --max-tokens", f / "b.txt", 20, max_tokens=1_000_000)
    timed("300 MB of one letter, --max-tokens, gpt2", f / "b.txt", 20, max_tokens=1_000_000, tokenizer="gpt2")
    timed("300 MB of one letter, --max-tokens, --separator", f / "b.txt", 20, max_tokens=1_000_000, separator="<|endoftext|>")
    (f / "l.jsonl").write_text('{"text": "' + "x" * 50_000_000 + '"}\n'); timed("one JSON line of 50 MB, --max-tokens", f / "l.jsonl", 20, max_tokens=1_000_000)
    with gzip.open(f / "l.jsonl.gz", "wb", 1) as g:
        for _ in range(300): g.write(b"\0" * 1_000_000)
    timed(".jsonl.gz of 300 MB of NULs without a line end", f / "l.jsonl.gz", 20, max_tokens=1_000_000)
    os.unlink(f / "b.txt")
    # same tokens as the whole text
    r = go(["/usr/bin/time", "-f", "TIME %U %M", *cmd("tokenizer.py", "--input", p, vocab_size=300, out=f / "t.tiktoken")], limit=150); m = re.search(r"TIME ([\d.]+) (\d+)", r.err); record(13, "tokenizer.py on 20 MB of one letter", r.status == 0 or r.one_line, f"{m and m[0]}; {r.tail(80)}")

def fifos():
    f = fresh("fifos"); make_shards(f / "data")
    def at(name, path, command, ok=lambda r: r.one_line):
        shutil.copytree(f / "data", f / "d", dirs_exist_ok=True)
        r = go(command, limit=40); record(14, name, r.status != "timeout" and ok(r), r.tail(130))
    for name in ("tiny_val_000000.npy", "tiny_train_000001.npy", "meta.json", "tiny_val_000000.mask", "tokenizer.tiktoken", "tokenizer.tiktoken.json", "tiny_train_000009.bin"):
        d = f / "d"; shutil.rmtree(d, ignore_errors=True); shutil.copytree(f / "data", d)
        if name.startswith("tokenizer"):
            import tokenizer; tokenizer.save_for_folder(tokenizer.get_encoding("bytes"), d)
        (d / name).unlink(missing_ok=True); os.mkfifo(d / name)
        r = go(train_cmd(d, f / "run"), limit=40); record(14, f"FIFO as {name} of --data", r.status != "timeout" and r.one_line, r.tail(130))
    for name in ("log.txt", "run.txt", "model_00004.pt", "run.txt.part", "log.txt.part"):
        d = f / "run"; shutil.rmtree(d, ignore_errors=True); d.mkdir(); os.mkfifo(d / name)
        r = go(train_cmd(f / "data", d, max_steps=4), limit=40); record(14, f"FIFO as {name} of --out-dir", r.status != "timeout" and (r.one_line or r.status == 0), r.tail(130))
    for src in ("p.txt", "p.jsonl", "p.parquet", "p.txt.gz"):
        os.mkfifo(f / src); r = fw(f / "o", f / src, limit=40); record(14, f"FIFO as --input {src}", r.one_line, r.tail(130))
    for dev in ("/dev/zero", "/dev/stdin", "/dev/null"):
        (f / "z.txt").unlink(missing_ok=True); (f / "z.txt").symlink_to(dev); r = fw(f / "o", f / "z.txt", limit=40); record(14, f"link to {dev} as --input", r.one_line, r.tail(130))
    t = f / "t.tiktoken"; os.mkfifo(t); (f / "a.txt").write_text(words(300)); r = fw(f / "o", f / "a.txt", tokenizer=t, limit=40); record(14, "FIFO as --tokenizer", r.one_line, r.tail(130))
    for name in ("c.json", "x.pt"):
        os.mkfifo(f / name)
    r = go(cmd("sample.py", "hi", "-m", f / "x.pt"), limit=40); record(14, "FIFO as sample.py -m", r.one_line, r.tail(130))
    r = go(cmd("hellaswag.py", "-m", f / "x.pt", "--data", f / "c.json"), limit=40); record(14, "FIFO as hellaswag.py -m and --data", r.one_line, r.tail(130))
    h = f / "h"; h.mkdir(); os.mkfifo(h / "config.json"); r = go(cmd("sample.py", "hi", "-m", h), limit=40); record(14, "FIFO as config.json", r.one_line, r.tail(130))
    (h / "config.json").unlink(); (h / "config.json").write_text('{"model_type": "gpt2"}'); os.mkfifo(h / "model.safetensors"); r = go(cmd("sample.py", "hi", "-m", h), limit=40); record(14, "FIFO as model.safetensors", r.one_line, r.tail(130))
    (h / "model-1-of-1.safetensors").mkdir() if False else os.mkfifo(h / "model-1-of-1.safetensors"); r = go(cmd("sample.py", "hi", "-m", h), limit=40); record(14, "FIFO as model-1-of-1.safetensors", r.one_line, r.tail(130))
    r = go(cmd("contamination.py", data=f / "data", eval=f / "c.json"), limit=40); record(14, "FIFO as contamination.py --eval", r.one_line, r.tail(130))
    r = go(train_cmd(f / "data", f / "run9", hellaswag_every=4, hellaswag_data=f / "c.json"), limit=40); record(14, "FIFO as --hellaswag-data", r.one_line, r.tail(130))
    r = go(train_cmd(f / "data", f / "run9", init_from=f / "x.pt"), limit=40); record(14, "FIFO as --init-from", r.one_line, r.tail(130))
    r = go(train_cmd(f / "data", f / "run9", branch_from=f / "x.pt"), limit=40); record(14, "FIFO as --branch-from", r.one_line, r.tail(130))

def renamed():
    """A folder that is renamed between a kill and the same command for the new name."""
    f = fresh("renamed"); src = f / "p.jsonl"; src.write_text("".join(json.dumps({"text": words(40, j)}) + "\n" for j in range(1500)))
    o = f / "o"; fw(o, src, shard_size=5000, before=lambda p: (wait_for(lambda: len(list(Path(o).glob("*train*.npy"))) >= 4, 40, p), p.kill()))
    n = len(list(o.glob("*.npy")))
    for new in ("a", "z"):
        shutil.copytree(o, f / new); r = fw(f / new, src, shard_size=5000); s = fw(f / ("straight-" + new), src, shard_size=5000)
        have, want = shards_of(f / new), shards_of(f / ("straight-" + new)); t = go(train_cmd(f / new, f / "run", max_steps=1)); shutil.rmtree(f / "run", ignore_errors=True)
        record(9, f"folder renamed to {new} after {n} shards, same command", list(have.values()) == list(want.values()) or r.one_line, f"{len(have)} shards, {len(want)} in a straight run, prefixes {sorted({k.split('_')[0] for k in have})}, train_gpt2.py: {t.tail(150)}")

if __name__ == "__main__": main([renamed, changed_inputs, url_inputs, metas, outputs, parse, fifos, long_text])
