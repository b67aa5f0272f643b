"""Attacks on the folder of a run: milestones, locks, logs, exports, data, links."""
from common import *

def base():
    """A finished run and one that was stopped after step 4, made once."""
    folder = SCRATCH / "base"
    if not (folder / "ok").exists():
        fresh("base")
        make_shards(folder / "data"); make_shards(folder / "other", seed=5)
        r = go(train_cmd(folder / "data", folder / "done")); assert r.status == 0, r.text
        kill_after(folder / "data", folder / "half", 5)
        assert (folder / "half/model_00004.pt").exists() and not (folder / "half/model_00008.pt").exists()
        (folder / "ok").touch()
    return folder

def kill_after(data, out, step, sig=signal.SIGKILL, **changes):
    p = subprocess.Popen(train_cmd(data, out, **changes), env=ENV, cwd=SCRATCH, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = Path(out) / "log.txt"
    assert wait_for(lambda: log.exists() and f"\n{step} train" in log.read_text(), 60, p)
    if step >= 5: wait_for(lambda: any(Path(out).glob("model_0*.pt")), 5, p)
    p.send_signal(sig); p.wait()

def copy(name, *parts):
    folder = fresh(name)
    for part in parts or ("data", "other", "half", "done"):
        shutil.copytree(base() / part, folder / part)
    return folder

def milestones():
    f = copy("milestones", "data")
    kw = dict(milestone_every=2, checkpoint_every=1, keep_checkpoints=2)
    kill_after(f / "data", f / "run", 6, **kw)
    have = sorted(p.name for p in (f / "run").glob("model_*.pt"))
    keep = [n for n in have if int(n[6:11]) % 2 == 0]
    for i, other in enumerate((dict(), dict(milestone_every=3), dict(milestone_every=5, checkpoint_every=2, keep_checkpoints=1))):
        shutil.copytree(f / "run", f / f"run{i}")
        before = {n: digest(f / f"run{i}" / n) for n in keep}
        kwargs = dict(checkpoint_every=1, keep_checkpoints=2) | other
        # twice: stopped by TERM and resumed, so that the marks go through two checkpoints
        kill_after(f / "data", f / f"run{i}", 9, signal.SIGTERM, **kwargs)
        r = go(train_cmd(f / "data", f / f"run{i}", **kwargs))
        after = {n: digest(f / f"run{i}" / n) for n in keep}
        left = sorted(p.name for p in (f / f"run{i}").glob("model_*.pt"))
        record(1, f"milestones of --milestone-every 2 after {other or 'no flag'}, killed, resumed twice", r.status == 0 and before == after, f"kept {keep}, there {left}")
    # a new branch that fills the same steps
    r = go(train_cmd(f / "data", f / "branch", branch_from=f / "run0", max_steps=14, checkpoint_every=1, keep_checkpoints=1))
    record(1, "branch leaves the parent's milestones", r.status == 0 and all((f / "run0" / n).exists() for n in keep), r.tail(80))

def weights_only_later():
    import torch
    f = copy("weights_only", "data", "half")
    c = torch.load(f / "half/model_00004.pt", weights_only=True)
    for drop, name in (("optimizer", "model_00008.pt"),):
        c2 = {k: v for k, v in c.items() if k != drop} | {"step": 8}
        torch.save(c2, f / "half" / name)
    before = digest(f / "half/model_00008.pt")
    r = go(train_cmd(f / "data", f / "half", keep_checkpoints=3))
    kept = [p.name for p in f.glob("**/*") if digest(p) == before]
    record(1, "a model_00008.pt with weights only (optimizer taken out) that the run did not write", kept or r.status == 2, f"left of it: {kept}; {r.tail()} // {[l for l in r.out.splitlines() if 'warning' in l]}"[:400])

def foreign_best():
    import torch
    f = copy("foreign_best", "data", "done")
    go(train_cmd(f / "data", f / "donor", keep_best=True))
    (f / "new").mkdir(); shutil.copy(f / "donor/model_best.pt", f / "new/model_best.pt")
    before = digest(f / "new/model_best.pt")
    r = go(train_cmd(f / "data", f / "new", keep_best=True, init_from=f / "new/model_best.pt"))
    kept = [str(p.relative_to(f)) for p in f.rglob("*") if digest(p) == before and "donor" not in str(p)]
    record(3, "model_best.pt copied into the new out-dir as --init-from, with --keep-best", kept, f"kept at {kept}; {r.tail(100)}")
    # the stopped run's best from elsewhere
    g = f / "g"; (g).mkdir(); (g / "model_best.pt").write_bytes(b"my own notes")
    r = go(train_cmd(f / "data", g, keep_best=True))
    kept = [str(p.relative_to(f)) for p in f.rglob("*") if p.is_file() and p.read_bytes() == b"my own notes"]
    record(3, "a user's file called model_best.pt, new run with --keep-best", kept or r.status == 2, f"kept at {kept}; {r.tail(100)}")

def before_first_checkpoint():
    f = copy("nofirst", "data", "other")
    kw = dict(checkpoint_every=0, max_steps=400)
    kill_after(f / "data", f / "run", 3, **kw)
    for name, data, changes in (("seed", "data", dict(seed=7)), ("max-lr", "data", dict(max_lr=1e-3)), ("other data, same lengths", "other", {}), ("init-from", "data", dict(init_from=base() / "done/hf")), ("branch-from", "data", dict(branch_from=base() / "done"))):
        g = f / ("x-" + name.replace(" ", "-").replace(",", "")); shutil.copytree(f / "run", g)
        before = (g / "log.txt").read_bytes()
        p = go(train_cmd(f / data, g, **(kw | changes | dict(max_steps=400 if name == "max-lr" else 400))), before=lambda p: (wait_for(lambda: (g / "log.txt").read_bytes() != before, 12, p), p.send_signal(signal.SIGTERM)))
        after = (g / "log.txt").read_bytes()
        record(3, f"killed before the first checkpoint, repeated with another {name}", p.status == 2 and after == before, p.tail())
    for name, change in (("no run.txt", lambda g: (g / "run.txt").unlink()), ("empty run.txt", lambda g: (g / "run.txt").write_text("")), ("run.txt with broken config", lambda g: (g / "run.txt").write_text("config: {nope\n")), ("run.txt a folder", lambda g: ((g / "run.txt").unlink(), (g / "run.txt").mkdir())), ("config: []", lambda g: (g / "run.txt").write_text("config: []\n")), ("config of null", lambda g: (g / "run.txt").write_text("config: null\n"))):
        g = f / "y"; shutil.rmtree(g, ignore_errors=True); shutil.copytree(f / "run", g); change(g)
        before = (g / "log.txt").read_bytes()
        p = go(train_cmd(f / "data", g, seed=7, **kw), limit=60, before=lambda p: (wait_for(lambda: (g / "log.txt").read_bytes() != before, 12, p), p.send_signal(signal.SIGTERM)))
        record(3, f"log without a checkpoint, {name}, another seed", (g / "log.txt").read_bytes() == before and p.one_line, p.tail())

def look_and_lock():
    """Stop a second process after it has started and before it locks; the first one finishes meanwhile."""
    f = copy("race", "data")
    kw = dict(max_steps=400, checkpoint_every=50)
    hook = f / "hook"; hook.mkdir()
    # the second process waits where it would take the lock, and just after it
    for where in ("before", "branch"):
        (hook / "sitecustomize.py").write_text(
            "import os, sys, time, threading\n"
            "go = os.environ['GO']\n"
            "import importlib.abc, importlib.util\n"
            "class F(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path, target=None):\n"
            "        if name == 'plumbing.files' and not getattr(self, 'busy', 0):\n"
            "            self.busy = 1\n"
            "            spec = importlib.util.find_spec(name); self.busy = 0\n"
            "            old = spec.loader.exec_module\n"
            "            def exec_module(m):\n"
            "                old(m); lock = m.lock_folder\n"
            "                def slow(*a, **k):\n"
            "                    open(go + '.there', 'w').close()\n"
            "                    while not os.path.exists(go): time.sleep(0.05)\n"
            "                    return lock(*a, **k)\n"
            "                m.lock_folder = slow\n"
            "            spec.loader.exec_module = exec_module\n"
            "            return spec\n"
            "sys.meta_path.insert(0, F())\n")
        out = f / where
        if where == "branch":
            go(train_cmd(f / "data", f / "parent", max_steps=12))
        change = dict(max_steps=24) | (dict(branch_from=f / "parent") if where == "branch" else {})
        gate = f / f"go-{where}"
        # the other command differs in the seed (or is the same branch with another rate)
        second = train_cmd(f / "data", out, **(change | (dict(seed=9) if where == "before" else dict(max_lr=1e-3))))
        p = subprocess.Popen(second, env=ENV | {"PYTHONPATH": str(hook), "GO": str(gate)}, cwd=SCRATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert wait_for(lambda: Path(f"{gate}.there").exists(), 60, p), p.communicate()
        r = go(train_cmd(f / "data", out, **change)); assert r.status == 0, r.text
        before = listing(out); gate.touch(); o, e = p.communicate(timeout=90)
        record(2, f"second process waits at the lock while the first one runs to its end ({where})", listing(out) == before and p.returncode == 2, f"status {p.returncode}: {e.strip()[-200:]}")
        if where == "before":  # same command: must call it finished and change nothing
            gate.unlink(); Path(f"{gate}.there").unlink()
            p = subprocess.Popen(train_cmd(f / "data", f / "same", **change), env=ENV | {"PYTHONPATH": str(hook), "GO": str(gate)}, cwd=SCRATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_for(lambda: Path(f"{gate}.there").exists(), 60, p)
            # meanwhile the folder becomes a link to the finished run
            r = go(train_cmd(f / "data", f / "other-run", **change))
            (f / "same").symlink_to(f / "other-run"); before = listing(f / "other-run"); gate.touch(); o, e = p.communicate(timeout=90)
            record(2, "the out-dir becomes a link to a finished run of the same settings before the lock", listing(f / "other-run") == before, f"status {p.returncode} {o.strip()[-150:]}")

def parallel_starts():
    f = copy("parallel", "data")
    ps = [subprocess.Popen(train_cmd(f / "data", f / "run", seed=s), env=ENV, cwd=SCRATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for s in (1, 2, 3)]
    res = [(p.communicate(timeout=120), p.returncode) for p in ps]
    log = losses(f / "run")
    record(2, "three commands with three seeds at once", sorted(s for _, s in res) == [0, 2, 2] and len([k for k in log if k[1] == "train"]) == 12, str([(s, e.strip()[-90:]) for (o, e), s in res]))

def lock_other_user():
    f = copy("otheruser", "data"); os.chmod(f, 0o777)
    for p in [SCRATCH, SCRATCH.parent]:
        os.chmod(p, os.stat(p).st_mode | 0o005)
    out = f / "run"; out.mkdir(); os.chmod(out, 0o777)
    p = subprocess.Popen(train_cmd(f / "data", out, max_steps=2000), env=ENV, cwd=SCRATCH, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (out / "model_00004.pt").exists(), 60, p)
    r = go(["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *train_cmd(f / "data", out, max_steps=2000, resume=False)], env={"HOME": str(SCRATCH)}, limit=40, before=lambda q: (time.sleep(15), q.send_signal(signal.SIGTERM)))
    p.terminate(); p.wait()
    moved = Path(f"{out}.1").exists()
    record(2, "another user's second process in a folder open to both (its .lock cannot be opened)", r.status == 2 and not moved, r.tail(300))

def links():
    f = copy("links", "data")
    for name in (".lock", "run.txt.part", "log.txt.part", "model_00004.pt.part", "model_best.pt.part", "hf.part", "log.txt", "run.txt", "model_00004.pt", "model_best.pt", "hf", "wandb"):
        for kind in ("link to a file", "dangling link", "link to a folder"):
            out = f / "o"; shutil.rmtree(out, ignore_errors=True); out.mkdir()
            victim = f / "victim"; shutil.rmtree(victim, ignore_errors=True); victim.mkdir(); (victim / "v").write_text("precious"); (victim / "d").mkdir(); (victim / "d" / "inner").write_text("x")
            (out / name).symlink_to({"link to a file": victim / "v", "dangling link": victim / "new", "link to a folder": victim / "d"}[kind])
            before = listing(victim)
            r = go(train_cmd(f / "data", out, max_steps=4, keep_best=True))
            same = listing(victim) == before
            record(5, f"{kind} at {name}", same and (r.status == 0 or r.one_line), r.tail(150) if not same or r.status not in (0,) else "ran, target untouched")

def hard_lock():
    f = copy("hardlock", "data"); out = f / "o"; out.mkdir(); (f / "v").write_text("precious"); os.link(f / "v", out / ".lock")
    r = go(train_cmd(f / "data", out, max_steps=2)); record(5, "hard link to a user's file at .lock", (f / "v").read_text() == "precious", f"file is now {(f / 'v').read_text()!r}; {r.tail(80)}")
    out = f / "o2"; out.mkdir(); (out / ".lock").write_text("a lock file of another program"); 
    r = go(train_cmd(f / "data", out, max_steps=2)); record(5, "a user's file called .lock", r.status == 2 or ((out / ".lock").exists() and "another program" in (out / ".lock").read_text()), f"exists {(out / '.lock').exists()}; {r.tail(80)}")
    out = f / "o3"; out.mkdir(); os.mkfifo(out / ".lock"); 
    r = go(train_cmd(f / "data", out, max_steps=2), limit=30); record(14, "FIFO at .lock", r.status != "timeout" and (r.one_line or r.status == 0), r.tail(150))

def hf_states():
    f = copy("hf", "data", "done")
    (f / "done2").mkdir(); 
    go(train_cmd(f / "data", f / "other-run", seed=3))
    def t_trunc(h): p = h / "model.safetensors"; p.write_bytes(p.read_bytes()[:-100])
    def t_flip(h):
        p = h / "model.safetensors"; b = bytearray(p.read_bytes()); b[-5] ^= 1; p.write_bytes(b)
    def t_stale(h): shutil.rmtree(h); shutil.copytree(f / "other-run/hf", h)
    def t_empty(h): shutil.rmtree(h); h.mkdir()
    def t_none(h): shutil.rmtree(h)
    def t_file(h): shutil.rmtree(h); h.write_text("a file")
    def t_link(h): shutil.rmtree(h); h.symlink_to(f / "other-run/hf")
    def t_tok(h): (h / "tokenizer.json").write_text("{}")
    def t_tok2(h): (h / "tokenizer.json").write_bytes((h / "tokenizer.json").read_bytes()[:100])
    def t_nocfg(h): (h / "config.json").unlink()
    def t_cfg(h): c = json.loads((h / "config.json").read_text()); c["n_head"] = 1; (h / "config.json").write_text(json.dumps(c))
    def t_cfg2(h): c = json.loads((h / "config.json").read_text()); c["n_positions"] = 7; c["eos_token_id"] = 3; (h / "config.json").write_text(json.dumps(c))
    def t_gen(h): (h / "generation_config.json").write_text("[]")
    def t_gen2(h): (h / "generation_config.json").unlink()
    def t_tik(h): (h / "tokenizer.tiktoken").unlink()
    def t_fifo(h): (h / "model.safetensors").unlink(); os.mkfifo(h / "model.safetensors")
    def t_part(h): shutil.copy(h / "model.safetensors", h / "model-00001-of-00001.safetensors"); (h / "model.safetensors").unlink()
    def t_extra(h): shutil.copy(f / "other-run/hf/model.safetensors", h / "model-00001-of-00001.safetensors")
    for t in (t_trunc, t_flip, t_stale, t_empty, t_none, t_file, t_link, t_tok, t_tok2, t_nocfg, t_cfg, t_cfg2, t_gen, t_gen2, t_tik, t_fifo, t_part):
        run = f / "r"; shutil.rmtree(run, ignore_errors=True); [shutil.rmtree(p, ignore_errors=True) if p.is_dir() else 0 for p in f.glob("r.*")]
        shutil.copytree(f / "done", run); t(run / "hf")
        foreign = listing(f / "other-run")
        r = go(train_cmd(f / "data", run), limit=60)
        good = all(digest(run / "hf" / n) == digest(f / "done/hf" / n) for n in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json", "tokenizer.tiktoken"))
        record(6, f"hf/: {t.__name__[2:]}", good and r.status == 0 and listing(f / "other-run") == foreign, r.tail(150) if not good or r.status else "exported again")

def other_val():
    f = copy("otherval", "data", "half", "done")
    import numpy as np
    p = f / "data/tiny_val_000000.npy"; a = np.load(p); b = a.copy(); b[1000:1100] = b[1100:1000:-1]; 
    for name, arr in (("middle tokens reversed", b), ("one token", np.where(np.arange(len(a)) == 50, a ^ 1, a).astype(np.uint16))):
        np.save(p, arr)
        for what, c in (("resume", train_cmd(f / "data", f / "half")), ("resume of the last step", train_cmd(f / "data", f / "done")), ("branch", train_cmd(f / "data", f / "br", branch_from=f / "half")), ("branch of a file", train_cmd(f / "data", f / "br2", branch_from=f / "half/model_00004.pt"))):
            (f / "half/.lock").unlink(missing_ok=True); before = listing(f / "half"), listing(f / "done")
            r = go(c); record(7, f"other validation data ({name}): {what}", r.one_line and before == (listing(f / "half"), listing(f / "done")) and not (f / "br").exists(), r.tail(160))
    np.save(p, a)
    p = f / "data/tiny_val_000000.mask"
    with open(p, "wb") as file: np.save(file, (np.arange(len(a)) % 2).astype(np.uint8))
    r = go(train_cmd(f / "data", f / "half")); record(7, "a mask appears beside the validation shard", r.one_line, r.tail(160)); p.unlink()
    # a large validation shard that differs where no sample is taken
    g = fresh("bigval"); make_shards(g / "data", lengths=(200_000, 3000, 1700)); kill_after(g / "data", g / "run", 5)
    p = g / "data/tiny_val_000000.npy"; a = np.load(p); a[30_000:60_000] = a[30_000:60_000][::-1].copy(); np.save(p, a)
    r = go(train_cmd(g / "data", g / "run", val_tokens=200_000)); 
    r = go(train_cmd(g / "data", g / "run")); record(7, "400 KB validation shard, 60 KB of it changed between the sampled blocks", r.status == 2, r.tail(160))

def other_hella():
    f = copy("otherhella", "data")
    def ex(n, right):
        words = ["abcd" * 6, "ponm" * 6, "gaga" * 6, "zzyx" * 6]
        return "".join(json.dumps({"ind": i, "activity_label": "a", "ctx": "abcd efgh", "ctx_a": "abcd", "ctx_b": "efgh", "endings": words, "label": right}) + "\n" for i in range(n))
    kw = dict(hellaswag_every=4, hellaswag_data=f / "h.jsonl", hellaswag_limit=8)
    for i in range(4):
        (f / "h.jsonl").write_text(ex(8, i)); kill_after(f / "data", f / f"run{i}", 5, **kw)
        (f / "h.jsonl").write_text(ex(8, (i + 1) % 4)); r = go(train_cmd(f / "data", f / f"run{i}", **kw))
        record(7, f"other HellaSwag examples between stop and resume ({i})", r.status == 2, r.tail(20) + str([l for l in (f / f"run{i}/log.txt").read_text().splitlines() if "hella" in l]))

def peers_folder():
    import torch
    f = copy("peers", "data", "done")
    out = f / "log"; out.mkdir(); (out / "log.txt").write_text("0 val 10.9514\n0 hella 0.2463\n0 train 10.955029\n")
    torch.save({"model": {}, "config": {}, "step": 19072, "val_loss": 3.0}, out / "model_19072.pt")
    for kw in ({}, dict(resume=False)):
        before = listing(f)
        r = go(train_cmd(f / "data", out, **kw)); 
        kept = all(d in listing(f).values() for d in before.values())
        record(3, f"the log/ of build-nanogpt as --out-dir, {kw or 'resume'}", kept and (r.one_line or r.status == 0), r.tail(200))

if __name__ == "__main__": main([milestones, weights_only_later, foreign_best, before_first_checkpoint, look_and_lock, parallel_starts, lock_other_user, links, hard_lock, hf_states, other_val, other_hella, peers_folder])
