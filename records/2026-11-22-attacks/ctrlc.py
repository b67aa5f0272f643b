from common import *
import collections
f = fresh("ctrlc"); kinds = collections.Counter(); ex = {}
(f / "a.txt").write_text("hello world " * 1000)
for script, c in {"fineweb.py": cmd("fineweb.py", "--input", f / "a.txt", out_dir=f / "o", tokenizer="bytes"), "train_gpt2.py": cmd("train_gpt2.py", data=f / "nothing")}.items():
    for i in range(25):
        d = 0.012 * i
        r = go(c, limit=60, before=lambda p: (time.sleep(d), p.send_signal(signal.SIGINT) if p.poll() is None else 0))
        frames = re.findall(r'File "([^"]+)", line (\d+)', r.err)
        ours = [(Path(a).name, int(n)) for a, n in frames if a.startswith(str(ROOT))]
        kind = "no traceback" if "Traceback" not in r.text else "before any line of ours" if not ours else f"in {ours[0][0]} line {ours[0][1]}" + (f" -> {ours[1][0]} line {ours[1][1]}" if len(ours) > 1 else "")
        kinds[script, kind] += 1; ex.setdefault((script, kind), []).append((round(d, 3), r.status))
for k, n in sorted(kinds.items()): print(n, k, ex[k][:8], flush=True)
