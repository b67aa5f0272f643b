"""Downloads when the network fails, and only of what http and https can name."""

import http.server
import threading

import pytest
from plumbing import documents
from plumbing.cli import UserError

from conftest import ROOT, patched


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
