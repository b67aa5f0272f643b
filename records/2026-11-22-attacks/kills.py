"""kill -9 at random moments, then the same command until it ends: bit for bit what a run never killed comes to?"""
from common import *
import numpy as np
rng = random.Random(int(os.environ.get("SEED", "1")))
f = fresh("kills"); make_shards(f / "data")

def files(out, names):
    import torch
    return {n: digest(Path(out) / n) for n in names}

def weights(path):
    import torch
    c = torch.load(path, weights_only=True)
    flat = {}
    def walk(x, at):
        if isinstance(x, dict): [walk(v, f"{at}/{k}") for k, v in x.items()]
        elif isinstance(x, (list, tuple)): [walk(v, f"{at}/{i}") for i, v in enumerate(x)]
        elif isinstance(x, torch.Tensor): flat[at] = hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()
        elif not at.startswith(("/config/out_dir", "/config/branch_from")): flat[at] = repr(x)
    walk(c, ""); return flat

def training(kills, **kw):
    kw = dict(max_steps=60, checkpoint_every=3, milestone_every=6, keep_checkpoints=2, keep_best=True, val_every=5, sample_every=10) | kw
    r = go(train_cmd(f / "data", f / "straight", **kw)); assert r.status == 0, r.text
    start = time.time(); go(train_cmd(f / "data", f / "t", **kw)); whole = time.time() - start; shutil.rmtree(f / "t")
    out, done, where, run = f / "run", 0, [], 0
    while done < kills:
        shutil.rmtree(out, ignore_errors=True); run += 1; n = 0
        while done < kills and n < 6:
            log = out / "log.txt"; have = len(log.read_text().splitlines()) if log.exists() else 0
            # most die at a random line of the log and a little later, in a step, an evaluation or a write; some before the first
            more, later = (rng.randint(1, 90), rng.uniform(0, 0.04)) if rng.random() < 0.9 else (0, rng.uniform(0, 1))
            p = subprocess.Popen(train_cmd(f / "data", out, **kw), env=ENV, cwd=SCRATCH, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            first = os.stat(log).st_ino if log.exists() else 0
            begun = lambda: log.exists() and os.stat(log).st_ino != first  # the log is written anew at the start
            if more and wait_for(begun, 60, p): start = len(log.read_text().splitlines()); wait_for(lambda: len(log.read_text().splitlines()) >= start + more, 60, p)
            time.sleep(later); ended = p.poll() is not None; p.kill(); p.wait()
            if ended: break
            done += 1; n += 1; where.append(len(log.read_text().splitlines()) if log.exists() else -1)
        r = go(train_cmd(f / "data", out, **kw))
        a, b = losses(out, ("train", "val", "val_bpb", "lr", "norm")), losses(f / "straight", ("train", "val", "val_bpb", "lr", "norm"))
        names = sorted(p.name for p in out.glob("model_*.pt")) ; want = sorted(p.name for p in (f / "straight").glob("model_*.pt"))
        ck = all(weights(out / x) == weights(f / "straight" / x) for x in want) if names == want else f"{names} instead of {want}"
        hf = {p.name: digest(p) == digest(f / "straight/hf" / p.name) for p in (out / "hf").iterdir() if p.name not in ("README.md",) and p.suffix not in (".png", ".svg")}
        left = [p.name for p in out.iterdir() if ".part" in p.name or p.name == ".lock"]
        if ck is not True and names == want:
            for x in want:
                A, B = weights(out / x), weights(f / "straight" / x); ck = [(k, A.get(k, "")[:60], B.get(k, "")[:60]) for k in A.keys() | B.keys() if A.get(k) != B.get(k)][:3] or ck
        record(3, f"training killed {n} times at random (run {run})", r.status == 0 and a == b and ck is True and all(hf.values()) and not left, f"same log {a == b}, same checkpoints {ck}, same hf {all(hf.values())}, left {left}; lines of log.txt at the kills {where[-n:]}; {r.tail(60) if r.status else ''}")

def shards(kills, num_proc):
    def words(n, seed): 
        r = random.Random(seed); return " ".join("".join(r.choice("abcdefghij") for _ in range(r.randint(1, 8))) for _ in range(n))
    files = []
    for i in range(3):
        (f / f"k{i}.jsonl").write_text("".join(json.dumps({"text": words(60, 10_000 * i + j)}) + "\n" for j in range(2500))); files.append(f / f"k{i}.jsonl")
    c = lambda out: cmd("fineweb.py", "--input", *files, out_dir=out, tokenizer="bytes", shard_size=30000, num_proc=num_proc)
    (f / f"s{num_proc}").mkdir(); start = time.time(); r = go(c(f / f"s{num_proc}/o")); whole = time.time() - start; assert r.status == 0, r.text
    want = {p.name: digest(p) for p in (f / f"s{num_proc}/o").iterdir()}
    done = runs = 0; bad = []; had = []
    while done < kills:
        out = f / f"k{num_proc}/o"; shutil.rmtree(out, ignore_errors=True); out.parent.mkdir(exist_ok=True); runs += 1
        for _ in range(4):
            p = subprocess.Popen(c(out), env=ENV, cwd=SCRATCH, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try: p.wait(timeout=rng.uniform(0.2, whole)); break
            except subprocess.TimeoutExpired: p.kill(); p.wait(); done += 1; had.append(len(list(out.glob("*.npy"))) if out.exists() else -1)
        r = go(c(out)); have = {p.name: digest(p) for p in out.iterdir()}
        if r.status or {k: v for k, v in have.items() if k != ".lock"} != want: bad.append(([k for k in want if have.get(k) != want[k]][:3], [k for k in have if k not in want], r.tail(100)))
    record(8, f"fineweb.py with {num_proc} processes killed {done} times in {runs} runs", not bad, f"{bad[:2]} shards at the kills {had}")

which = sys.argv[1:]
if not which or "train" in which: training(int(os.environ.get("KILLS", "30")))
if not which or "fineweb" in which: shards(10, 1); shards(6, 2)
