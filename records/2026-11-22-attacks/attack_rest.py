"""Attacks on the machine's side: signals, ranks, environment, disks, odd names, tokenizers, cards, consoles."""
from common import *
import socket

HELLASWAG = os.environ.get("ATTACK_HELLASWAG", "hellaswag/hellaswag_val.jsonl")  # HellaSwag's validation file
TORCHRUN = [PY, "-m", "torch.distributed.run"]

def data():
    d = SCRATCH / "rest-data"
    if not d.exists(): make_shards(d)
    return d

def done():
    d = SCRATCH / "rest-done"
    if not (d / "hf/config.json").exists():
        r = go(train_cmd(data(), d)); assert r.status == 0, r.text
    return d

def card():
    f = fresh("card"); D = data()
    full = [PY, str(ROOT / "train_gpt2.py")]
    for name, env in (("MPLBACKEND=garbage", {"MPLBACKEND": "garbage"}), ("MPLBACKEND=TkAgg", {"MPLBACKEND": "TkAgg"}), ("MPLCONFIGDIR a file", {"MPLCONFIGDIR": "/etc/passwd"}), ("HOME not there", {"HOME": "/nonexistent/x"})):
        r = go(train_cmd(D, f / "r", max_steps=3), env=env); record(11, name, r.status == 0 and (f / "r/hf/model.safetensors").exists() and "Traceback" not in r.text, r.tail(120)); shutil.rmtree(f / "r", ignore_errors=True)
    lib = f / "lib/matplotlib"; lib.mkdir(parents=True)
    for name, code in (("raises ImportError", "raise ImportError('broken')"), ("raises SystemExit", "raise SystemExit(3)"), ("raises KeyboardInterrupt-like BaseException", "class X(BaseException): pass\nraise X('x')"), ("raises RuntimeError", "raise RuntimeError('a\\nb')"), ("is empty", "")):
        (lib / "__init__.py").write_text(code)
        r = go(train_cmd(D, f / "r", max_steps=3), env={"PYTHONPATH": str(f / "lib")}); record(11, f"a matplotlib that {name}", r.status == 0 and (f / "r/hf/model.safetensors").exists() and "Traceback" not in r.text, r.tail(120)); shutil.rmtree(f / "r", ignore_errors=True)
    # odd values in run.txt before the last start
    for name, text in (("commit without a value", "commit:\n"), ("no colon", "hello\n"), ("100,000 keys", "".join(f"k{i}: v\n" for i in range(100000))), ("escapes and HTML", "command: \x1b[31m<script>alert(1)</script> ](http://x) `` ``` | --- \u202e\n"), ("machine of 1 MB", "machine: " + "x" * 1_000_000 + "\n"), ("config of numbers", "config: 5\n\n"), ("not UTF-8", None), ("NULs", "\0" * 1000 + "\n"), ("bad dates", "started: yesterday\nfrom step: many\nranks: -x\nbranched: {}\n\n"), ("started twice wrong", "started: 9999-99-99T99:99\nfrom step: -1\n\n")):
        out = f / "r"; go_ = train_cmd(D, out, max_steps=3)
        out.mkdir(); (out / "run.txt").write_bytes(b"command: \xff\xfe\xe9\n\n") if text is None else (out / "run.txt").write_text(text)
        r = go(go_); readme = (out / "hf/README.md"); t = readme.read_text() if readme.exists() else ""
        ok = r.status == 0 and (out / "hf/model.safetensors").exists() and "Traceback" not in r.text and len(t) < 30000 and "\x1b" not in t and "<script>" not in t
        kept = (out / "run.txt").read_bytes().startswith(b"command: \xff\xfe\xe9" if text is None else text.encode())
        record(11, f"run.txt with {name}", ok and kept, f"card of {len(t)} characters, run.txt kept {kept}; {r.tail(100)}"); shutil.rmtree(out)
    # the card's file and picture cannot be written
    for name in ("log lines with infinities", "log of words"):
        out = f / "r"; r = go(train_cmd(D, out, max_steps=3)); 
        with open(out / "log.txt", "a") as l: l.write("2 val inf\n2 x/y 1e99\n1 val nan\n" if "inf" in name else "hello world\n\x1b[31m\n")
        shutil.rmtree(out / "hf"); r = go(train_cmd(D, out, max_steps=3)); record(11, name, r.status == 0 and (out / "hf/model.safetensors").exists(), r.tail(120)); shutil.rmtree(out)

def tokenizers():
    import tokenizer, base64
    f = fresh("tok"); enc = tokenizer.get_encoding("bytes"); tokenizer.write_encoding(enc, f / "good.tiktoken")
    head = json.loads((f / "good.tiktoken.json").read_text()); ranks = (f / "good.tiktoken").read_text()
    (f / "a.txt").write_text("hello world, this is text. " * 300)
    import torch
    ck = torch.load(done() / "model_00012.pt", weights_only=True)
    for pat in ("", "x*", "(?=a)", "(", ".", "a", "(a+)+$", "\\K", "(?s:.){2}", "\0"):
        for where in ("data folder", "checkpoint", "--tokenizer", "hf"):
            d = f / "d"; shutil.rmtree(d, ignore_errors=True); h = head | {"pat_str": pat}; name = h["name"]
            if where == "data folder":
                shutil.copytree(data(), d); (d / "tokenizer.tiktoken").write_text(ranks); (d / "tokenizer.tiktoken.json").write_text(json.dumps(h)); r = go(train_cmd(d, f / "run", max_steps=1), limit=40); shutil.rmtree(f / "run", ignore_errors=True)
            elif where == "checkpoint":
                d.mkdir(); t = ck["tokenizer_file"].split("\n", 1); torch.save(ck | {"tokenizer_file": json.dumps(json.loads(t[0]) | {"pat_str": pat}) + "\n" + t[1]}, d / "model_00012.pt"); r = go(cmd("sample.py", "aa bb", "-m", d / "model_00012.pt", max_new_tokens=3, num_samples=1), limit=40)
            elif where == "--tokenizer":
                d.mkdir(); (d / "x.tiktoken").write_text(ranks); (d / "x.tiktoken.json").write_text(json.dumps(h)); r = go(cmd("fineweb.py", "--input", f / "a.txt", out_dir=d / "o", tokenizer=d / "x.tiktoken", num_proc=1), limit=40)
            else:
                shutil.copytree(done() / "hf", d); (d / "tokenizer.tiktoken").write_text(ranks); (d / "tokenizer.tiktoken.json").write_text(json.dumps(h)); r = go(cmd("sample.py", "aa bb", "-m", d, max_new_tokens=3, num_samples=1), limit=40)
            ok = r.one_line or (r.status == 0 and "panicked" not in r.text)
            if where != "data folder" and pat not in ("", "x*", "(", "(?=a)"): 
                pass
            record(12, f"pattern {pat[:20]!r} in {where}", ok, r.tail(150) if not ok else f"status {r.status}")
            if pat not in ("", "x*", "(", "(?=a)", ".") and where == "--tokenizer": break

def environment():
    f = fresh("environment"); D = data()
    def one(name, env, limit=100, seconds=75, ok=None, **kw):
        r = go(train_cmd(D, f / "r", max_steps=2, **kw), env=env, limit=limit); good = (ok or (lambda r: r.one_line))(r) and r.seconds < seconds
        record(15, name, good, r.tail(260)); shutil.rmtree(f / "r", ignore_errors=True)
    s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(); taken = str(s.getsockname()[1])
    e = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    for port in ("99999", "-1", "0", "abc", "", "1e3", "65536", " 29500"):
        one(f"MASTER_PORT={port!r}", e | {"MASTER_PORT": port}, ok=lambda r: r.one_line or r.status == 0, seconds=15)
    one("MASTER_PORT taken", e | {"MASTER_PORT": taken}, seconds=20)
    one("MASTER_PORT taken, rank 0 of 2", e | {"MASTER_PORT": taken, "WORLD_SIZE": "2"}, seconds=75)
    one("MASTER_ADDR of no host", e | {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29511"})
    one("MASTER_ADDR that does not answer, rank 1 of 2", e | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29512", "WORLD_SIZE": "2", "RANK": "1"})
    one("nobody listens there, rank 1 of 2", e | {"MASTER_PORT": "29513", "WORLD_SIZE": "2", "RANK": "1"})
    one("rank 1 never comes, rank 0 of 2", e | {"MASTER_PORT": "29514", "WORLD_SIZE": "2"})
    one("TORCHELASTIC_RUN_ID alone", {"TORCHELASTIC_RUN_ID": "x"}, ok=lambda r: r.status == 0 or r.one_line, seconds=30)
    one("TORCHELASTIC_RUN_ID and a mistake", {"TORCHELASTIC_RUN_ID": "x"}, seconds=8, n_head=3)
    one("TORCHELASTIC_RESTART_COUNT=x", {"TORCHELASTIC_RESTART_COUNT": "x"}, ok=lambda r: r.status == 0 or r.one_line, seconds=30)
    one("TORCHELASTIC_ERROR_FILE a folder, a mistake", {"TORCHELASTIC_ERROR_FILE": str(f)}, seconds=8, n_head=3)
    for rank, size in (("1", "1"), ("5", "2"), ("-1", "2"), ("x", "2"), ("0", "0"), ("0", "x"), ("0", "99999999999"), ("", "2"), ("3", "")):
        one(f"RANK={rank!r} WORLD_SIZE={size!r}", dict(RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="29515"), seconds=8)
    one("RANK=3 alone", dict(RANK="3"), seconds=8)
    one("WORLD_SIZE=2 alone", dict(WORLD_SIZE="2"), seconds=8)
    one("LOCAL_RANK=x", dict(LOCAL_RANK="x"), seconds=8)
    one("OMP_NUM_THREADS=x", dict(OMP_NUM_THREADS="x"), ok=lambda r: r.status == 0 or r.one_line, seconds=30)
    one("COLUMNS=0, TERM=dumb, LANG=C", dict(COLUMNS="0", TERM="dumb", LC_ALL="C", PYTHONUTF8="0"), ok=lambda r: r.status == 0, seconds=30)

def chat():
    f = fresh("chat"); import numpy as np
    (f / "c.jsonl").write_text("".join(json.dumps({"messages": [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "abcd" * 20}]}) + "\n" for i in range(300)))
    r = go(cmd("smoltalk.py", "--input", f / "c.jsonl", out_dir=f / "chat", tokenizer="bytes", shard_size=8000)); assert r.status == 0, r.text
    r = go(train_cmd(f / "chat", f / "run", max_steps=2)); assert r.status == 0, r.text
    for name, kw in (("closed", dict(preexec_fn=lambda: os.close(0))), ("/dev/null", {}), ("a folder", dict(stdin=open("/", "rb") if False else subprocess.DEVNULL))):
        r = go(cmd("sample.py", "--chat", "-m", f / "run"), limit=40, **kw); record(15, f"sample.py --chat with stdin {name}", "Traceback" not in r.text and r.status != "timeout" and r.status in (0, 2), r.tail(200))
    for name, text in (("bytes that are no UTF-8", b"\xff\xfe\n/quit\n"), ("NULs", b"\0\0\n"), ("one line of 1 MB", b"x" * 1_000_000 + b"\n"), ("no line end", b"hello"), ("<|end|>", b"<|end|><|assistant|>\n"), ("empty lines", b"\n\n\n")):
        (f / "in").write_bytes(text)
        with open(f / "in", "rb") as i: r = go(cmd("sample.py", "--chat", "-m", f / "run", max_new_tokens=5), limit=60, stdin=i)
        record(15, f"sample.py --chat, stdin of {name}", "Traceback" not in r.text and r.status != "timeout", r.tail(160))

def full_disk():
    f = fresh("full"); src = f / "a.txt"; src.write_text("hello world, this is text of some length. " * 8000)
    def mount(name, size):
        m = f / name; m.mkdir(exist_ok=True); subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(m)], check=True); return m
    def umount(m): subprocess.run(["umount", str(m)], check=True)
    for fill in range(0, 64, 4):  # tokenizer.py: what is left is a few KB
        m = mount("m", "64k"); (m / "fill").write_bytes(b"x" * 1024 * fill); before = listing(m)
        r = go(cmd("tokenizer.py", "--input", src, vocab_size=2500, out=m / "t.tiktoken")); left = {k for k in listing(m) if k != "fill"}
        ok = (r.status == 0 and left == {"t.tiktoken", "t.tiktoken.json"}) or (r.one_line and not left)
        record(15, f"tokenizer.py on a disk with {64 - fill} KB", ok and "space" in r.err if r.status else ok, f"left {sorted(left)}; {r.tail(120)}"); umount(m)
    m = mount("m", "64k"); sub = 0
    # both files exactly: grow block by block
    umount(m)
    for size in ("600k", "900k", "1m", "1200k", "1500k", "2m", "3m"):
        m = mount("m", size); out = m / "run"
        r = go(train_cmd(data(), out, n_embd=64, keep_checkpoints=2, max_steps=8)); 
        names = sorted(p.name for p in out.iterdir()) if out.exists() else []
        ok = r.status == 0 or (r.one_line and "inline_container" not in r.err and ("space" in r.err or "room" in r.err.lower()))
        record(17, f"training on a disk of {size}", ok, f"{names}; {r.tail(160)}")
        if r.status != 0:
            subprocess.run(["mount", "-o", "remount,size=20m", str(m)], check=True); r = go(train_cmd(data(), out, n_embd=64, keep_checkpoints=2, max_steps=8)); s = go(train_cmd(data(), f / f"s{size}", n_embd=64, keep_checkpoints=2, max_steps=8))
            record(17, f"the same command after room was made ({size})", r.status == 0 and losses(out) == losses(f / f"s{size}"), r.tail(100))
        umount(m)
    for size in ("8k", "40k", "100k", "200k", "300k", "600k"):
        m = mount("m", size); r = go(cmd("fineweb.py", "--input", src, out_dir=m / "o", tokenizer="bytes", shard_size=30000, num_proc=1))
        ok = r.status == 0 or (r.one_line and "space" in r.err); record(17, f"fineweb.py on a disk of {size}", ok, r.tail(160))
        if r.status: subprocess.run(["mount", "-o", "remount,size=20m", str(m)], check=True); r = go(cmd("fineweb.py", "--input", src, out_dir=m / "o", tokenizer="bytes", shard_size=30000, num_proc=1)); record(17, f"fineweb.py again after room was made ({size})", r.status == 0 and not list((m / "o").glob("*.part")), r.tail(100))
        umount(m)
    # read-only
    m = mount("m", "20m"); 
    r = go(train_cmd(data(), m / "run", max_steps=4)); shutil.copytree(data(), m / "data"); r = go(cmd("fineweb.py", "--input", src, out_dir=m / "o", tokenizer="bytes", shard_size=30000, num_proc=1))
    subprocess.run(["mount", "-o", "remount,ro", str(m)], check=True)
    for name, c in (("fineweb.py, new folder", cmd("fineweb.py", "--input", src, out_dir=m / "new", tokenizer="bytes", num_proc=1)), ("smoltalk-like nested new folder", cmd("fineweb.py", "--input", src, out_dir=m / "a/b/c", tokenizer="bytes", num_proc=1)), ("tokenizer.py", cmd("tokenizer.py", "--input", src, vocab_size=300, out=m / "t.tiktoken")), ("new run", train_cmd(m / "data", m / "new", max_steps=4)), ("run to be extended", train_cmd(m / "data", m / "run", max_steps=8)), ("branch", train_cmd(m / "data", m / "br", branch_from=m / "run", max_steps=8)), ("--no-resume", train_cmd(m / "data", m / "run", max_steps=4, resume=False)), ("hellaswag.py --predictions", cmd("hellaswag.py", "-m", m / "run/hf", data=HELLASWAG, limit=2, predictions=m / "p.jsonl"))):
        r = go(c, limit=60); record(17, f"read-only disk: {name}", r.one_line and "read-only" in r.err.lower(), r.tail(200))
    r = go(train_cmd(m / "data", m / "run", max_steps=4)); record(17, "read-only disk: a finished run says so", r.status == 0 and "finished" in r.out, r.tail(120))
    r = go(cmd("fineweb.py", "--input", src, out_dir=m / "o", tokenizer="bytes", shard_size=30000, num_proc=1)); record(17, "read-only disk: complete shards say so", r.status == 0 and "complete" in r.out, r.tail(120))
    umount(m)

def interrupts():
    f = fresh("interrupts"); (f / "a.txt").write_text("hello world " * 1000); n = {}
    cs = {"train_gpt2.py": train_cmd(data(), f / "r"), "fineweb.py": cmd("fineweb.py", "--input", f / "a.txt", out_dir=f / "o", tokenizer="bytes"), "tokenizer.py": cmd("tokenizer.py", "--input", f / "a.txt", vocab_size=300, out=f / "t.tiktoken"), "sample.py": cmd("sample.py", "hi", "-m", done()), "hellaswag.py": cmd("hellaswag.py", "-m", done(), data=HELLASWAG), "contamination.py": cmd("contamination.py", data=data(), eval=HELLASWAG), "smoltalk.py": cmd("smoltalk.py", "--input", f / "a.txt", out_dir=f / "q")}
    for script, c in cs.items():
        for sig in (signal.SIGINT,):
            bad = []; delays = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.8)
            for delay in delays:
                shutil.rmtree(f / "r", ignore_errors=True); shutil.rmtree(f / "o", ignore_errors=True); [p.unlink() for p in f.glob("t.tik*")]
                r = go(c, limit=60, before=lambda p: (time.sleep(delay), p.send_signal(sig) if p.poll() is None else 0))
                if "Traceback" in r.text and delay > 0.04 or r.status == "timeout": bad.append((delay, r.tail(120)))
                elif "Traceback" in r.text: bad.append((delay, "traceback of the interpreter's own start" if "site" in r.text or "<frozen" in r.text else r.tail(120)))
            record(15, f"Ctrl-C in the first 0.8 s, {script} ({len(delays)} times)", not bad, str(bad)[:400])

def names():
    f = fresh("names"); (f / "src.txt").write_text("hello world " * 300); odd = ["a\nb", "a\x1b[31mred", "a\rb", "a\x07b", "\u202eabc", "a\x9bb", "<script>x", "a](http:x)", "x" * 200]
    def clean(r): 
        return not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", r.err) and len([l for l in r.err.splitlines() if l.strip()]) == 1 and r.status == 2
    def said(r): return repr(r.err[-160:])
    for o in odd:
        for name, c in ((f"--data", train_cmd(f / o, f / "r")), ("--init-from", train_cmd(data(), f / "r", init_from=o)), ("--branch-from", train_cmd(data(), f / "r", branch_from=f / o)), ("--preset", train_cmd(data(), f / "r", preset=o)), ("an unknown flag", [*train_cmd(data(), f / "r"), "--" + o]), ("an argument", [*train_cmd(data(), f / "r"), o]), ("fineweb --input", cmd("fineweb.py", "--input", f / (o + ".txt"))), ("--dataset", cmd("fineweb.py", dataset=o)), ("--tokenizer", cmd("fineweb.py", "--input", f / "src.txt", tokenizer=o, out_dir=f / "o")), ("sample -m", cmd("sample.py", "x", "-m", o)), ("--text-column", cmd("fineweb.py", "--input", f / "src.txt", text_column=o, part=o, out_dir=f / "o")), ("tokenizer --out", cmd("tokenizer.py", "--input", f / "src.txt", out=o)), ("hellaswag --predictions", cmd("hellaswag.py", "-m", "gpt2", predictions=str(f / o / "x"), data=f / o))):
            if o not in odd[:2] and name in ("--init-from", "--branch-from", "--preset", "sample -m", "hellaswag --predictions", "--data") : continue
            r = go(c, limit=40); record(16, f"{o[:12]!r} as {name}", clean(r), said(r) if not clean(r) else "one clean line")
    # names that are there: file in a folder with line breaks; keys of 100,000 characters
    d = f / "d\nerror: x\x1b[31m"; shutil.copytree(data(), d); r = go(train_cmd(d, f / "out\nnew\x1b[2J", max_steps=3)); t = (f / "out\nnew\x1b[2J/hf/README.md"); txt = t.read_text() if t.exists() else ""
    record(16, "a whole run in folders with line breaks and escapes", r.status == 0 and "\x1b" not in r.text and "\x1b" not in txt, repr(r.text[-300:]))
    s = go(cmd("sample.py", "ab", "-m", f / "out\nnew\x1b[2J", num_samples=1, max_new_tokens=4)); record(16, "sample.py from there", s.status == 0, repr(s.text[-100:]))
    (f / "k.jsonl").write_text(json.dumps({"k" * 100_000: "v"}) + "\n" + json.dumps({f"k{i}\n\x1b[31m": 1 for i in range(100_000)}) + "\n"); r = go(cmd("fineweb.py", "--input", f / "k.jsonl", out_dir=f / "o")); record(16, "a JSON line with a key of 100,000 characters", clean(r) and len(r.err) < 2200, f"{len(r.err)} characters {said(r)}")
    import numpy as np
    dd = f / "dd"; shutil.copytree(data(), dd); m = json.loads((dd / "meta.json").read_text())
    for k, v in (("tokenizer", "x\n\x1b[31m<b>"), ("tokenizer", "y" * 100_000), ("dataset", "z\n\x1b[31m](http://x)<script>")):
        (dd / "meta.json").write_text(json.dumps(m | {k: v})); r = go(train_cmd(dd, f / "rr", max_steps=3)); txt = (f / "rr/hf/README.md").read_text() if (f / "rr/hf/README.md").exists() else ""; shutil.rmtree(f / "rr", ignore_errors=True)
        record(16, f"meta.json with {k} {v[:8]!r}", (clean(r) or (r.status == 0 and "\x1b" not in r.text + txt and "<script>" not in txt and "](http://x)" not in txt)) and len(r.err) < 2200, said(r) + repr(txt[:0]))
    # text with escapes: samples printed
    r = go(train_cmd(data(), f / "pp", max_steps=2, sample_every=1, sample_prompt="a\n\x1b[31m")); record(16, "a prompt with escapes, in the run's console", r.status == 0 and "\x1b" not in r.out, repr(r.out[-200:]))
    t = (f / "pp/hf/README.md").read_text(); record(16, "a prompt with escapes, in the card", "\x1b" not in t, "")
    # two files in a glob whose names contain line breaks
    (f / "g\n1.txt").write_text("hello " * 500); r = go(cmd("fineweb.py", "--input", f / "g*.txt", out_dir=f / "og", tokenizer="bytes")); record(16, "an input whose name has a line break", r.status == 0, repr(r.text[-150:]))
    (f / "g2\n\x1b[31m.txt").write_bytes(b"\xff\xfe\xfd" * 100); r = go(cmd("fineweb.py", "--input", f / "g2*.txt", out_dir=f / "og2", tokenizer="bytes")); record(16, "a damaged input whose name has escapes", clean(r), said(r))

def nan_weights():
    import torch; from safetensors.torch import load_file, save_file
    f = fresh("nan")
    for which in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.ln_f.bias"):
        for value in (float("nan"), float("inf")):
            h = f / "h"; shutil.rmtree(h, ignore_errors=True); shutil.copytree(done() / "hf", h); w = load_file(h / "model.safetensors"); w[which].view(-1)[3] = value; save_file(w, h / "model.safetensors", metadata={"format": "pt"})
            for c, n in ((cmd("sample.py", "ab", "-m", h, num_samples=1, max_new_tokens=3), "sample.py"), (train_cmd(data(), f / "r", init_from=h, max_steps=2), "--init-from"), (cmd("hellaswag.py", "-m", h, data=HELLASWAG, limit=2), "hellaswag.py")):
                r = go(c, limit=60); shutil.rmtree(f / "r", ignore_errors=True); record(17, f"{value} in {which} of a Hugging Face folder, {n}", r.one_line and ("finite" in r.err or "nan" in r.err.lower()), r.tail(200))

def ranks():
    f = fresh("ranks"); D = data()
    hook = f / "hook"; hook.mkdir()
    def two(name, words, env=None, limit=100, ok=None, seconds=60):
        r = go([*TORCHRUN, "--standalone", "--nproc_per_node=2", *words[1:]], env=env, limit=limit)
        errors = [l for l in r.err.splitlines() if l.startswith("error: ")]
        good = (ok or (lambda r, e: len(set(e)) == len(e) == 1))(r, errors) and r.status not in (0, "timeout") and r.seconds < seconds
        record(17 if "one error" in name else 10, name, good, f"{len(errors)} lines {errors[:2]}, {r.seconds:.0f} s, status {r.status}; {'' if good else r.text[-400:]}"); return r
    two("one error before the run: n_head", train_cmd(D, f / "r1", n_head=3), seconds=25)
    two("one error: --data not there", train_cmd(f / "no", f / "r2"), seconds=25)
    make_shards(f / "d")
    two("one error inside the run: full log", train_cmd(D, "/dev/full/x"), seconds=25)
    # the loss is not finite, on both ranks
    two("one error inside the run: the loss diverges", train_cmd(D, f / "r3", max_lr=1e30, min_lr=1e29, warmup_steps=0, max_steps=60, grad_clip=0), seconds=40)
    # a rank that fails alone
    code = ("import os, sys\n"
            "if os.environ.get('RANK') == os.environ['BAD'] and sys.argv[0].endswith('train_gpt2.py'):\n"
            "    import threading, time\n"
            "    def patch():\n"
            "        while True:\n"
            "            m = sys.modules.get('__main__')\n"
            "            if hasattr(m, 'train_step') and hasattr(m, 'main'):\n"
            "                old = m.train_step; n = [0]\n"
            "                def step(*a, **k):\n"
            "                    n[0] += 1\n"
            "                    if n[0] == 4:\n"
            "                        exec(os.environ['DO'])\n"
            "                    return old(*a, **k)\n"
            "                m.train_step = step; return\n"
            "            time.sleep(0.002)\n"
            "    threading.Thread(target=patch, daemon=True).start()\n")
    (hook / "sitecustomize.py").write_text(code)
    for bad in ("0", "1"):
        for name, do, look in (("RuntimeError", "raise RuntimeError('broken here')", "broken here"), ("UserError", "from plumbing.cli import UserError; raise UserError('wrong here')", "wrong here"), ("OSError with a file", "open('/no/such')", "/no/such"), ("MemoryError", "raise MemoryError('too much')", "memory"), ("sys.exit", "sys.exit(3)", None), ("os._exit", "os._exit(7)", None), ("kill -9", "import signal; os.kill(os.getpid(), 9)", None), ("KeyboardInterrupt", "raise KeyboardInterrupt", None)):
            r = go([*TORCHRUN, "--standalone", "--nproc_per_node=2", *train_cmd(D, f / f"a{bad}{name.split()[0]}", max_steps=400)[1:]], env={"PYTHONPATH": str(hook), "BAD": bad, "DO": do}, limit=100)
            n = len([l for l in r.err.splitlines() if look and look in l and l.startswith(("error: ", "RuntimeError"))])
            record(10, f"rank {bad} fails alone in a step: {name}", r.status not in (0, "timeout") and r.seconds < 60 and (look is None or n == 1), f"{r.seconds:.0f} s, said {n} times; {r.tail(100)}")
    # other data on one rank
def signals():
    f = fresh("signals"); D = data(); make_shards(f / "big", lengths=(400_000, 3000, 1700))
    kw = dict(val_tokens=390_000, n_layer=4, n_embd=128, n_head=4, val_every=2, max_steps=6)
    for delay in (0.1, 1.0):
        out = f / f"v{delay}"; t = []
        def stop(p):
            wait_for(lambda: (out / "log.txt").exists(), 60, p); time.sleep(delay); t.append(time.time()); p.terminate()
        r = go(train_cmd(f / "big", out, **kw), before=stop, limit=120); s = time.time() - t[0]
        claim = "The checkpoint is written" in r.out; have = list(out.glob("model_*.pt"))
        record(17, f"SIGTERM {delay} s into the first validation", s < 3 and r.status == 0 and (have or not claim), f"left after {s:.1f} s, said 'checkpoint is written' {claim}, checkpoints {len(have)}; {r.tail(160)}")
        r = go(train_cmd(f / "big", out, **kw)); 
    r = go(train_cmd(f / "big", f / "straight", **kw)); record(17, "resumed after SIGTERM in validation: the same log", losses(f / "straight") == losses(f / "v0.1") == losses(f / "v1.0"), r.tail(60))
    kw = dict(hellaswag_every=2, hellaswag_data=HELLASWAG, hellaswag_limit=0, block_size=256, n_layer=4, n_embd=128, n_head=4, max_steps=6, sample_every=0)
    import tokenizer
    for delay in (0.3, 2.0):
        out = f / f"h{delay}"; t = []
        def stop(p):
            wait_for(lambda: (out / "log.txt").exists() and " val " in (out / "log.txt").read_text(), 60, p); time.sleep(delay); t.append(time.time()); p.terminate()
        r = go(train_cmd(D, out, **kw), before=stop, limit=120); s = time.time() - t[0]
        log = (out / "log.txt").read_text(); record(17, f"SIGTERM {delay} s into HellaSwag", s < 4 and r.status == 0 and "hella" not in log, f"left after {s:.1f} s; {r.tail(200)}")
    h = f / "hx"; 
    for script, c in (("hellaswag.py", cmd("hellaswag.py", "-m", done(), data=HELLASWAG, predictions=f / "p.jsonl")),):
        t = []
        r = go(c, before=lambda p: (time.sleep(12), t.append(time.time()), p.send_signal(signal.SIGTERM)), limit=90); record(17, f"SIGTERM during {script}", time.time() - t[0] < 3 and not (f / "p.jsonl").exists(), r.tail(100))
    # torchrun, stopped in validation
    out = f / "tr"; t = []
    def stop(p): wait_for(lambda: (out / "log.txt").exists(), 60, p); time.sleep(0.5); t.append(time.time()); p.terminate()
    r = go([*TORCHRUN, "--standalone", "--nproc_per_node=2", *train_cmd(f / "big", out, val_tokens=390_000, n_layer=4, n_embd=128, n_head=4, val_every=2, max_steps=6)[1:]], before=stop, limit=120); record(17, "SIGTERM to torchrun in validation, two ranks", time.time() - t[0] < 15 and "Traceback" not in "".join(l for l in r.out.splitlines()), f"{time.time() - t[0]:.1f} s {r.tail(150)}")

def predictions():
    f = fresh("pred"); H = f / "h.jsonl"; H.write_text("".join(open(HELLASWAG).readlines()[:4]))
    def p(to, **kw): return go(cmd("hellaswag.py", "-m", done(), data=H, predictions=to), limit=60, **kw)
    for name, make in (("its own --data", lambda: H), ("a user's file", lambda: ((f / "u").write_text("precious"), f / "u")[1]), ("a link", lambda: ((f / "lnk").symlink_to(f / "u"), f / "lnk")[1]), ("a dangling link", lambda: ((f / "dl").symlink_to(f / "nothing"), f / "dl")[1]), ("a folder", lambda: ((f / "fo").mkdir(), f / "fo")[1]), ("the checkpoint", lambda: done() / "model_00012.pt"), ("a hard link", lambda: (os.link(f / "u", f / "hl"), f / "hl")[1]), ("a folder that is not there", lambda: f / "no/x")):
        to = make(); before = listing(f), listing(done()); r = p(to); record(4, f"hellaswag.py --predictions {name}", r.one_line and (listing(f), listing(done())) == before, r.tail(130))
    shm = Path("/dev/shm/attack-p.jsonl"); shm.write_text("precious\n"); r = p(shm); record(4, "--predictions /dev/shm/FILE that exists", r.one_line and shm.read_text() == "precious\n", f"now {shm.read_text()[:60]!r}; {r.tail(60)}"); shm.unlink()
    shl = Path("/dev/shm/attack-l"); shl.symlink_to(f / "u"); r = p(shl); record(4, "--predictions /dev/shm/LINK to a user's file", (f / "u").read_text() == "precious", f"now {(f / 'u').read_text()[:60]!r}"); shl.unlink()
    (f / "u").write_text("precious"); (f / "dv").symlink_to("/dev/null"); r = p(f / "dv"); record(4, "--predictions link to /dev/null", os.path.islink(f / "dv") and os.stat("/dev/null").st_mode & 0o170000 == 0o020000, r.tail(80))
    subprocess.run(["mknod", str(f / "blk"), "c", "1", "3"]); r = p(f / "blk"); import stat; record(4, "--predictions a device node", stat.S_ISCHR(os.lstat(f / "blk").st_mode), r.tail(60))
    r = p("/dev/stdout"); record(4, "--predictions /dev/stdout", r.status == 0 and '"label"' in r.out, r.tail(60))
    with open(f / "log", "w") as log:
        log.write("before\n"); log.flush(); q = subprocess.run(cmd("hellaswag.py", "-m", done(), data=H, predictions="/dev/stdout"), env=ENV, cwd=SCRATCH, stdout=log, stderr=subprocess.PIPE)
    t = (f / "log").read_text(); record(4, "--predictions /dev/stdout redirected to a file", t.startswith("before") and "label" in t, t[:80])
    os.mkfifo(f / "ff"); out = []
    import threading; th = threading.Thread(target=lambda: out.append(open(f / "ff").read()), daemon=True); th.start(); r = p(f / "ff"); th.join(5); record(4, "--predictions a FIFO with a reader", r.status == 0 and out and "label" in out[0], r.tail(60))
    part = f / "z.jsonl.part"; part.write_text("precious"); r = p(f / "z.jsonl"); record(4, "--predictions z.jsonl beside a user's z.jsonl.part", part.exists() and part.read_text() == "precious", r.tail(60))
    (f / "u2").write_text("precious"); (f / "y.jsonl.part").symlink_to(f / "u2"); r = p(f / "y.jsonl"); record(5, "--predictions y.jsonl, link at y.jsonl.part", (f / "u2").read_text() == "precious", r.tail(60))
    def appear(q): wait_for(lambda: "libtorch" in Path(f"/proc/{q.pid}/maps").read_text(), 30, q); time.sleep(2.2); (f / "late").write_text("precious")
    H.write_text("".join(open(HELLASWAG).readlines()[:200]))
    r = p(f / "late", before=appear); record(4, "--predictions, the file appears while it scores", (f / "late").read_text() == "precious", r.tail(100))

def late():
    f = fresh("late")
    H = f / "h.jsonl"; H.write_text("".join(open(HELLASWAG).readlines()[:2000])); to = f / "late.jsonl"
    def appear(q): time.sleep(8); print("still scoring:", q.poll() is None, flush=True); to.write_text("precious")
    r = go(cmd("hellaswag.py", "-m", done(), data=H, predictions=to), limit=100, before=appear); record(4, "--predictions, the file appears while it scores 2,000 examples", to.read_text() == "precious" and r.one_line, r.tail(200))

main([predictions, late, card, environment, chat, full_disk, nan_weights, signals, ranks, interrupts, names, tokenizers])
