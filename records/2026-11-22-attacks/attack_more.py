"""More attacks, found by reading: float16's infinite norms in the log, parts of different inputs, replaced texts, long logs, nested folders."""
from common import *
import numpy as np
from attack_data import words, fw, shards_of
from attack_runs import kill_after

def float16_log():
    f = fresh("float16"); make_shards(f / "data"); import torch
    go(train_cmd(f / "data", f / "seed", max_steps=1)); c = torch.load(f / "seed/model_00001.pt", weights_only=True)
    for name, w in c["model"].items(): w.mul_(12 if w.dim() > 1 else 1)  # so that the first scaled gradients overflow, as they do in most real runs
    torch.save(c, f / "big.pt"); kw = dict(dtype="float16", max_steps=12, init_from=f / "big.pt")
    r = go(train_cmd(f / "data", f / "straight", **kw)); 
    if r.status: return record(3, "float16 on a CPU", r.one_line, r.tail())
    inf = [l for l in (f / "straight/log.txt").read_text().splitlines() if "inf" in l or "nan" in l]
    kill_after(f / "data", f / "run", 6, **kw); before = [l for l in (f / "run/log.txt").read_text().splitlines() if "inf" in l or "nan" in l]
    r = go(train_cmd(f / "data", f / "run", **kw)); s = ("train", "norm", "lr", "val")
    a, b = losses(f / "run", s), losses(f / "straight", s)
    record(3, "float16: lines with an infinite norm survive a resume", a == b and "damaged" not in r.out, f"straight has {inf}, the killed one {before}, missing after the resume {sorted(b.items() - a.items())[:5]}; {[l for l in r.out.splitlines() if 'damaged' in l]}")

def parts():
    f = fresh("parts"); d = f / "in"; d.mkdir()
    for i, n in enumerate("bdfh"): (d / f"{n}.jsonl").write_text("".join(json.dumps({"text": f"{n}{j} " + words(20, 50 * i + j)}) + "\n" for j in range(300)))
    r = fw(f / "o", d, part="0/2", shard_size=5000); assert r.status == 0, r.text
    (d / "c.jsonl").write_text("".join(json.dumps({"text": f"c{j} " + words(20, 900 + j)}) + "\n" for j in range(300)))
    r2 = fw(f / "o", d, part="1/2", shard_size=5000)
    text = b"".join(np.load(p).astype(np.uint8).tobytes() for p in sorted((f / "o").glob("*.npy")))
    t = go(train_cmd(f / "o", f / "run", max_steps=1))
    counts = {n: text.count(n.encode() + b"5 ") for n in "bcdfh"}
    record(8, "--part 0/2, then a file is added to the folder, then --part 1/2", r2.status == 2 or t.status == 2, f"times that line 5 of each file is in the shards: {counts}; part 1/2 status {r2.status}, train_gpt2.py status {t.status}")
    r = fw(f / "o2", d / "b.jsonl", d / "d.jsonl", part="0/2", shard_size=5000); r2 = fw(f / "o2", d / "f.jsonl", d / "h.jsonl", part="1/2", shard_size=5000)
    record(8, "--part 0/2 and --part 1/2 of other inputs in one folder", r2.status == 2, r2.tail(120))

def replaced_text():
    f = fresh("replaced"); src = f / "t.jsonl"; src.write_text("".join(json.dumps({"text": words(40, j)}) + "\n" for j in range(2500)))
    o = f / "o"; fw(o, src, shard_size=5000, before=lambda p: (wait_for(lambda: len(list(Path(o).glob("*train*.npy"))) >= 4, 40, p), p.kill()))
    n = len(list(o.glob("*train*.npy"))); src.write_text("".join(json.dumps({"text": "other " + words(41, 90_000 + j)}) + "\n" for j in range(2500)))
    r = fw(o, src, shard_size=5000); record(8, f"killed after {n} shards, the file replaced by another text of another size", r.status == 2, r.tail(130))

def long_log():
    f = fresh("longlog"); make_shards(f / "data"); go(train_cmd(f / "data", f / "p", max_steps=12))
    with open(f / "p/log.txt", "a") as l: l.writelines(f"{i} x{i % 7} 0.{i}\n" for i in range(9_000_000))
    t = time.time(); r = go(["/usr/bin/time", "-f", "TIME %U %M", *train_cmd(f / "data", f / "b", branch_from=f / "p", max_steps=14)], limit=200); record(14, "branch of a run whose log has 9,000,000 lines more", r.status == 0 and time.time() - t < 40, f"{time.time() - t:.0f} s, {r.err.strip()[-30:]}"); (f / "p/log.txt").unlink()
    for p in f.rglob("log.txt"): p.unlink()

def folders():
    f = fresh("folders"); make_shards(f / "data"); before = listing(f / "data")
    r = go(train_cmd(f / "data", f / "data", max_steps=4)); now = listing(f / "data"); record(4, "--out-dir is --data", all(now[k] == v for k, v in before.items()) and (r.status == 0 or r.one_line), r.tail(100))
    r2 = go(train_cmd(f / "data", f / "data", max_steps=4, resume=False)); now = listing(f / "data"); record(4, "--out-dir is --data, --no-resume", all(now[k] == v for k, v in before.items()), r2.tail(100))
    go(train_cmd(f / "data", f / "run", max_steps=4)); h = listing(f / "run/hf")
    r = go(train_cmd(f / "data", f / "run/hf", max_steps=4, init_from=f / "run/hf")); record(4, "--out-dir is the hf/ of another run", all(listing(f / "run/hf").get(k) == v for k, v in h.items()), r.tail(100))
    r = go(train_cmd(f / "data", f / "run/hf/new", max_steps=4, init_from=f / "run/hf")); record(4, "--out-dir inside hf/", all(listing(f / "run/hf").get(k) == v for k, v in h.items()), r.tail(60))
    before = listing(f / "run/hf"); r = go(train_cmd(f / "data", f / "run", max_steps=4)); after = listing(f); left = [k for k in before.values() if k not in after.values()]; record(6, "a run within hf/, then the parent's command again", not left, f"lost {len(left)}; {r.tail(80)}")
    # a checkpoint under another step's name
    go(train_cmd(f / "data", f / "x", max_steps=12)); shutil.copytree(f / "x", f / "y"); [p.unlink() for p in (f / "y").glob("model_0001*")]; (f / "y/model_00008.pt").rename(f / "y/model_00010.pt"); shutil.rmtree(f / "y/hf")
    r = go(train_cmd(f / "data", f / "y", max_steps=12)); record(18, "model_00008.pt renamed to model_00010.pt", (r.status == 0 and losses(f / "y") == losses(f / "x")) or r.one_line, r.tail(60))
    # a checkpoint that is a link to elsewhere
    shutil.copytree(f / "x", f / "z"); (f / "big").mkdir(); p = f / "z/model_00012.pt"; p.rename(f / "big/model_00012.pt"); p.symlink_to(f / "big/model_00012.pt"); d = digest(p); shutil.rmtree(f / "z/hf")
    r = go(train_cmd(f / "data", f / "z", max_steps=12)); record(5, "the newest checkpoint is a link to another disk", digest(f / "big/model_00012.pt") == d and r.status == 0, r.tail(60))
    r = go([PY, "-m", "bench", "train", "--json", str(f / "x/run.txt")], cwd=ROOT, limit=30); record(4, "python -m bench --json onto a file", r.one_line, r.tail(120))
    r = go([PY, "-m", "bench", "ladder", "--plot", str(f / "x/run.txt")], cwd=ROOT, limit=30); record(4, "python -m bench ladder --plot onto a file", r.one_line, r.tail(120))

def keep_best_twice():
    """killed between model_best.pt and the checkpoint, at --keep-best: the same best as never killed?"""
    f = fresh("best"); make_shards(f / "data"); kw = dict(keep_best=True, val_every=1, checkpoint_every=6, max_steps=14)
    go(train_cmd(f / "data", f / "s", **kw)); import torch
    for k in (5, 8, 11):
        kill_after(f / "data", f / f"r{k}", k, **kw); r = go(train_cmd(f / "data", f / f"r{k}", **kw)); a, b = (torch.load(f / x / "model_best.pt", weights_only=True) for x in ("s", f"r{k}"))
        record(7, f"--keep-best, killed in step {k}", r.status == 0 and a["step"] == b["step"] and all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"]), f"best of step {b['step']} and {a['step']}")
    # off and on again
    kill_after(f / "data", f / "o", 8, **kw); best = digest(f / "o/model_best.pt"); kill_after(f / "data", f / "o", 13, **(kw | dict(keep_best=False))); r = go(train_cmd(f / "data", f / "o", **kw)); a, b = (torch.load(f / x / "model_best.pt", weights_only=True) for x in ("s", "o")); record(7, "--keep-best off and on again", a["val_loss"] >= b["val_loss"] or a["step"] == b["step"], f"best {b['step']} {b['val_loss']}, straight {a['step']} {a['val_loss']}")

main([float16_log, parts, replaced_text, keep_best_twice, folders, long_log])
