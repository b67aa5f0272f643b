"""Downloads when the network fails: without one, one line within seconds; and only what http and https can name."""

import http.server
import os
import subprocess
import sys
import threading

import pytest
from plumbing import documents
from plumbing.program import UserError

from harness import ROOT, patched

# a program on a machine whose network resolves no name, with a clock that counts instead of waiting
WITHOUT_A_NETWORK = """
import os, socket, sys, time
def refuse(*args, **options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
slept = 0
def sleep(seconds):
    global slept
    slept += seconds
    if slept > 5:
        print("waited for", slept, "seconds", file=sys.stderr)
        os._exit(1)
socket.getaddrinfo, time.sleep = refuse, sleep
program = __import__(sys.argv[1])
program.program.run(lambda: program.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "words", ["fineweb --pretokenized 1", "fineweb --tokenizer bytes", "smoltalk --tokenizer bytes"]
)
def test_without_a_network_a_download_ends_in_one_line_within_seconds(tmp_path, words):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", WITHOUT_A_NETWORK, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    (line,) = done.stderr.splitlines()
    assert [path.name for path in tmp_path.iterdir()] in ([], ["hub"])  # nothing is left of what never began
    assert line.startswith("error: Could not download ") and "Name or service not known. Check the network" in line


class Redirecting(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        location = {"/there": "/content", "/file": (ROOT / "README.md").as_uri()}.get(self.path)
        self.send_response(302 if location else 200)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", "0" if location else "7")
        self.end_headers()
        self.wfile.write(b"" if location else b"content")

    def log_message(self, *args):
        pass


def test_a_redirect_is_followed_but_not_to_a_file_of_this_machine(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        documents.download(f"{url}/there", str(tmp_path / "a"), "")
        with patched(documents, "RETRY_SECONDS", 0), pytest.raises(UserError, match="is not allowed"):
            documents.download(f"{url}/file", str(tmp_path / "b"), "")
        server.shutdown()
    assert (tmp_path / "a").read_bytes() == b"content" and not (tmp_path / "b").exists()
