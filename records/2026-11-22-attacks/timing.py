"""Processor time until the first step is printed, of a new run and of a resumed one, and of a finished run; two trees in turn."""
from common import *
import statistics

TREES = [t.split("=") for t in sys.argv[1:]]  # name=path
SHAPE = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, sequence_length=64, batch_size=1, total_batch_size=64,
             val_every=0, val_tokens=512, max_steps=50, checkpoint_every=0)
f = fresh("timing"); make_shards(f / "data", lengths=(2000, 60000, 1700))


def cpu(pid):
    """The processor time of a process and all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def until(tree, out, look, end=lambda p: p.kill(), **changes):
    command = [PY, str(Path(tree) / "train_gpt2.py"), *flags(data=f / "data", out_dir=out, **(TINY | SHAPE | changes))]
    p = subprocess.Popen(command, env=ENV, cwd=f, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    for line in p.stdout:
        seen.append(line)
        if re.match(look, line):
            t = cpu(p.pid); end(p); p.stdout.read(); p.wait(); return t
    raise SystemExit(f"no {look}: {''.join(seen)}")


rows = {}
for name, tree in TREES:  # a run with a checkpoint at step 2, and a finished one
    until(tree, f / f"{name}-half", "step     1 ", end=lambda p: p.terminate(), checkpoint_every=0)
    assert list((f / f"{name}-half").glob("model_*.pt"))
    r = go([PY, str(Path(tree) / "train_gpt2.py"), *flags(data=f / "data", out_dir=f / f"{name}-done", **(TINY | SHAPE | dict(max_steps=1)))], limit=200); assert r.status == 0, r.text
for i in range(int(os.environ.get("TIMES", "5"))):
    for name, tree in TREES:
        shutil.rmtree(f / "new", ignore_errors=True)
        rows.setdefault(("new", name), []).append(until(tree, f / "new", "step     0 .*loss"))
        shutil.rmtree(f / "again", ignore_errors=True); shutil.copytree(f / f"{name}-half", f / "again", copy_function=os.link)
        rows.setdefault(("resume", name), []).append(until(tree, f / "again", "step +[0-9]+ .*loss"))
        if i < 3:
            rows.setdefault(("finished", name), []).append(until(tree, f / f"{name}-done", "Next:|The run in", max_steps=1))
for (what, name), t in rows.items():
    print(f"{what:9s} {name:8s} median {statistics.median(t):.2f} s, least {min(t):.2f} s of the processor: {' '.join(f'{x:.2f}' for x in t)}", flush=True)
