"""What the attacks share: the real scripts, run in temporary folders, and a line of results for each attack."""
import json, os, re, shutil, signal, subprocess, sys, tempfile, time, hashlib, random
from pathlib import Path

ROOT = Path(os.environ.get("ATTACK_ROOT") or Path(__file__).resolve().parents[2])
PY = os.environ.get("ATTACK_PYTHON", sys.executable)
SCRATCH = Path(os.environ.get("ATTACK_SCRATCH", tempfile.gettempdir())) / "attack-scratch"
RESULTS = Path(os.environ.get("ATTACK_RESULTS", SCRATCH / "results.jsonl"))
SCRATCH.mkdir(parents=True, exist_ok=True)
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER", "TORCHELASTIC"))}
ENV |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH="", COLUMNS="80")
from conftest import TINY, flags, make_shards  # noqa: E402


def cmd(script, *words, **options):
    return [PY, str(ROOT / script), *map(str, words), *flags(**options)]


def train_cmd(data, out, **changes):
    return cmd("train_gpt2.py", **(dict(data=data, out_dir=out) | TINY | changes))


class Result:
    def __init__(self, status, out, err, seconds, cpu):
        self.status, self.out, self.err, self.seconds, self.cpu = status, out, err, seconds, cpu
        self.text = out + err

    @property
    def one_line(self):
        lines = [l for l in self.err.splitlines() if l.strip()]
        return self.status == 2 and len([l for l in lines if l.startswith("error: ")]) == 1 and "Traceback" not in self.text

    def tail(self, n=240):
        return f"status {self.status}, {self.seconds:.1f}s: " + " / ".join(self.text.strip().splitlines()[-3:])[-n:]


def go(command, limit=90, env=None, cwd=None, stdin=subprocess.DEVNULL, before=None, **kw):
    start = time.time()
    p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin, text=True, errors="replace",
                         env=ENV | (env or {}), cwd=cwd or SCRATCH, start_new_session=True, **kw)
    try:
        if before:
            before(p)
        out, err = p.communicate(timeout=limit)
        status = p.returncode
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, err = p.communicate()
        status = "timeout"
    return Result(status, out, err, time.time() - start, 0)


def fresh(name):
    folder = SCRATCH / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if Path(path).is_file() else None


def listing(folder):
    return {str(p.relative_to(folder)): ("link " + os.readlink(p) if p.is_symlink() else digest(p) or "folder") for p in sorted(Path(folder).rglob("*"))}


def losses(out, streams=("train", "val")):
    values = {}
    for line in (Path(out) / "log.txt").read_text().splitlines():
        step, stream, value = line.split(" ")
        if stream in streams:
            assert (step, stream) not in values, "twice"
            values[step, stream] = value
    return values


def record(point, name, held, said=""):
    line = dict(point=point, attack=name, held=bool(held), said=said)
    with open(RESULTS, "a") as f:
        f.write(json.dumps(line) + "\n")
    print(("held " if held else "HOLE ") + f"[{point}] {name} :: {said}", flush=True)


def wait_for(condition, limit=60, process=None):
    end = time.time() + limit
    while time.time() < end and not condition():
        if process is not None and process.poll() is not None:
            return condition()
        time.sleep(0.005)
    return condition()


def main(attacks):
    chosen = sys.argv[1:]
    for attack in attacks:
        if chosen and not any(re.fullmatch(c, attack.__name__) for c in chosen):
            continue
        try:
            attack()
        except Exception as error:
            import traceback
            print(f"BROKEN {attack.__name__}: {type(error).__name__} {error}", flush=True)
            traceback.print_exc()
