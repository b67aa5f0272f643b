# ran at commit 66420ac; fineweb.py has no --part since
"""One process with two threads, and two processes with a part and a thread each, in turn: wall and CPU seconds."""
import os, resource, shutil, subprocess, sys, time

script, pattern = sys.argv[1:]
runs = {"one process, 2 threads": [["--num-proc", "2"]], "two parts, 1 thread each": [["--num-proc", "1", "--part", f"{i}/2"] for i in (0, 1)]}
for round in range(2):
    for name, flags in runs.items():
        shutil.rmtree("out", ignore_errors=True)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, script, "--input", pattern, "--out-dir", "out"]
        processes = [subprocess.Popen(command + f, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for f in flags]
        assert [p.wait() for p in processes] == [0] * len(flags)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{name}: {time.perf_counter() - start:.1f} s wall, {cpu:.1f} s CPU, load {os.getloadavg()[0]:.1f}", flush=True)
