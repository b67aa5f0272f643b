from common import *
f = fresh("tokdisk"); src = f / "a.txt"; src.write_text("hello world, this is text of some length. " * 800)
for fill in range(40, 65, 4):
    m = f / "m"; m.mkdir(exist_ok=True); subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(m)], check=True); (m / "fill").write_bytes(b"x" * 1024 * fill)
    r = go(cmd("tokenizer.py", "--input", src, vocab_size=2500, out=m / "t.tiktoken")); left = {k for k in listing(m) if k != "fill"}
    ok = (r.status == 0 and left == {"t.tiktoken", "t.tiktoken.json"}) or (r.one_line and not left and "space" in r.err)
    record(15, f"tokenizer.py on a disk with {64 - fill} KB", ok, f"left {sorted(left)}; {r.tail(120)}")
    if r.status:
        (m / "fill").write_bytes(b""); r = go(cmd("tokenizer.py", "--input", src, vocab_size=2500, out=m / "t.tiktoken")); record(15, f"tokenizer.py again after room was made ({64 - fill} KB)", r.status == 0, r.tail(60))
    subprocess.run(["umount", str(m)], check=True)
