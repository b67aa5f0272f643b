"""A small hub on the loopback interface: what the real clients ask, answered as the hub answers it, and its faults."""

import hashlib
import http.server
import json
import threading
import urllib.parse
from pathlib import Path, PurePosixPath

import datasets
import huggingface_hub


class Handler(http.server.BaseHTTPRequestHandler):
    """Data sets by name. A fault in `server.faults` is met once, in `server.lasting` always."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer's headers and content come in two packets, and each would take 40 ms

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.server.asked.append(f"{self.command} {path}")
        fault = self.server.next_fault(self.command, path)
        if fault in ("reset", "hang"):
            if fault == "hang":
                self.server.stopping.wait(100)
            self.close_connection = True
        elif fault.isdigit():
            self.refuse(int(fault), "Fault")
        else:
            self.reply(fault)

    do_HEAD = do_GET

    def reply(self, fault):
        """Answer /datasets/OWNER/NAME/resolve/REVISION/FILE, or a question that begins with /api/datasets."""
        server = self.server
        address = self.path.partition("?")[0].removeprefix("/api")
        words = [urllib.parse.unquote(word) for word in address.strip("/").split("/")]
        is_api = self.path.startswith("/api/")
        name = "/".join(words[1:3])
        action, revision, *rest = [*words[3:], "", ""]
        path = "/".join(filter(None, rest))
        if is_api and name in server.renamed:  # the hub sends one on to the new name
            return self.answer(307, b"", {"Location": f"/api/datasets/{server.renamed[name]}"})
        data_set = server.data_sets.get(name, {"private": True})
        is_allowed = self.headers["Authorization"] == "Bearer hf_right"
        if data_set.get("private") and not (is_allowed and "refs" in data_set):
            return self.refuse(401, "RepoNotFound")
        commit = data_set["refs"].get(revision or "main", revision)
        files = data_set["commits"].get(commit)
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        if action == "tree":
            return self.tree(files, path)
        if is_api:
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
            return self.answer(200, json.dumps(info).encode())
        if data_set.get("gated") and not is_allowed:
            return self.refuse(403, "GatedRepo")
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        tag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
        headers = {"X-Repo-Commit": commit, "ETag": tag, "X-Linked-ETag": tag, "X-Linked-Size": len(files[path])}
        if path.endswith(".parquet") and not self.path.endswith("?cdn"):  # large files lie elsewhere
            return self.answer(302, b"", headers | {"Location": f"{server.url}{self.path}?cdn"})
        return self.answer(200, files[path], headers, fault)

    def tree(self, files, folder):
        """The files and folders below a folder."""
        entries = {}
        for path, content in files.items():
            if not path.startswith(folder and folder + "/"):
                continue
            for parent in map(str, PurePosixPath(path).parents):
                entries[parent] = {"type": "directory", "path": parent, "size": 0, "oid": "0" * 40}
            entry = entries[path] = {"type": "file", "path": path, "size": len(content)}
            in_git = content
            if path.endswith(".parquet"):
                sha = hashlib.sha256(content).hexdigest()
                in_git = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\n".encode()
                entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": len(in_git)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(in_git) + in_git).hexdigest()
        if not entries:
            return self.refuse(404, "EntryNotFound")
        for parent in [folder or ".", *map(str, PurePosixPath(folder).parents)]:
            entries.pop(parent, None)
        self.answer(200, json.dumps([entries[path] for path in sorted(entries)]).encode())

    def refuse(self, status, code):
        self.answer(status, b"{}", {"X-Error-Code": code})

    def answer(self, status, content, headers=None, fault=""):
        headers = {"Content-Length": len(content)} | (headers or {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            if fault == "wrong":
                content = content[::-1]
            if fault == "short":
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data_sets = {}
        self.renamed = {}
        self.asked = []
        self.faults = {}
        self.lasting = {}
        self.stopping = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a connection that was reset

    def next_fault(self, method, path):
        """The fault that a request meets, "" for none."""
        for words, fault in (self.faults | self.lasting).items():
            method_there, _, place = words.partition(" ")
            if method_there in ("ANY", method) and place in path:
                self.faults.pop(words, None)
                return fault
        return ""

    def add(self, name, files, **settings):
        """Commit these files to a data set; its sha."""
        data_set = self.data_sets.setdefault(name, {"commits": {}, "refs": {}} | settings)
        contents = {path: text.encode() if isinstance(text, str) else text for path, text in sorted(files.items())}
        commit = hashlib.sha1(repr((contents, settings)).encode()).hexdigest()
        data_set["commits"][commit] = contents
        data_set["refs"]["main"] = commit
        return commit

    def stop(self):
        self.stopping.set()
        self.shutdown()
        self.server_close()


def configure(url, monkeypatch):
    """Make this the hub of the clients in this process, with a cache in the current folder."""
    cache = Path(".hf").absolute()
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in values.items():
        for module in (huggingface_hub.constants, huggingface_hub.file_download):  # the second had copies
            monkeypatch.setattr(module, name, value, raising=False)
    if hasattr(huggingface_hub.utils, "reset_sessions"):  # before version 1, a client stays offline
        huggingface_hub.utils.reset_sessions()
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
