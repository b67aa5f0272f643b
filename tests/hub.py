"""A small hub on the loopback interface: what the real clients ask, answered as the hub answers it, and its faults."""

import hashlib
import http.server
import json
import threading
import urllib.parse

import datasets
import huggingface_hub


class Handler(http.server.BaseHTTPRequestHandler):
    """Data sets by name, plain files by path. A fault in `server.faults` is met once, in `server.lasting` always."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        self.server.asked.append(f"{self.command} {path}")
        for words, fault in (self.server.faults | self.server.lasting).items():
            method, _, place = words.partition(" ")
            if method in ("ANY", self.command) and place in path:
                self.server.faults.pop(words, None)
                return self.fail(fault, path, url.query)
        self.reply(path, url.query)

    do_HEAD = do_GET

    def fail(self, fault, path, query):
        if fault == "reset":
            self.connection.close()
            self.close_connection = True
        elif fault == "hang":
            self.server.stopping.wait(100)
            self.close_connection = True
        elif fault in ("short", "wrong"):
            self.reply(path, query, fault)
        else:
            self.answer(int(fault), b"{}", {"Retry-After": 0} if fault == "429" else {})

    def reply(self, path, query, fault=""):
        server = self.server
        if path in server.files:
            return self.answer(200, server.files[path], fault=fault)
        words = [urllib.parse.unquote(word) for word in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        is_api = words[0] == "api"
        words = words[1 + is_api :] if "datasets" in words[:2] else []
        if is_api and "/".join(words) in server.renamed:  # the hub sends one on to the new name
            return self.answer(307, b"", {"Location": f"/api/datasets/{server.renamed['/'.join(words)]}"})
        name = "/".join(words[:2])
        rest = words[2:]
        data_set = server.data_sets.get(name)
        allowed = self.headers["Authorization"] == "Bearer hf_right"
        if not data_set or (data_set.get("private") and not allowed):
            return self.answer(401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if rest[1:] else "main"
        commit = data_set["refs"].get(revision, revision)
        files = data_set["commits"].get(commit)
        if files is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if is_api and rest[:1] in ([], ["revision"]):
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
            return self.answer(200, json.dumps(info).encode())
        if is_api and rest[0] == "tree":
            return self.tree(files, "/".join(rest[2:]))
        if is_api or rest[0] != "resolve":
            return self.answer(404, b"{}")
        path = "/".join(rest[2:])
        if data_set.get("gated") and not allowed:
            return self.answer(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
        if path not in files:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        sha = hashlib.sha256(files[path]).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{sha}"', "X-Linked-ETag": f'"{sha}"'}
        headers["X-Linked-Size"] = len(files[path])
        if "cdn" not in query and path.endswith(".parquet"):  # large files lie elsewhere
            return self.answer(302, b"", headers | {"Location": f"{self.path}?cdn"})
        return self.answer(200, files[path], headers, fault)

    def tree(self, files, folder):
        """The files and folders below a folder."""
        inside = {path: content for path, content in files.items() if path.startswith(folder and folder + "/")}
        places = {"/".join(path.split("/")[:depth]) for path in inside for depth in range(1, path.count("/") + 1)}
        entries = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in places - {folder}]
        for path, content in inside.items():
            oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entries.append({"type": "file", "path": path, "size": len(content), "oid": oid})
            if path.endswith(".parquet"):
                sha = hashlib.sha256(content).hexdigest()
                entries[-1]["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 130}
        if not entries:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        self.answer(200, json.dumps(sorted(entries, key=lambda entry: entry["path"])).encode())

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
                content, self.close_connection = content[: len(content) // 2], True
            self.wfile.write(content)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data_sets, self.files, self.renamed = {}, {}, {}
        self.asked, self.faults, self.lasting = [], {}, {}
        self.stopping, self.url = threading.Event(), f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a connection that was reset

    def add(self, name, files, **settings):
        """Commit these files to a data set; its sha."""
        data_set = self.data_sets.setdefault(name, {"commits": {}, "refs": {}} | settings)
        contents = sorted((path, text if isinstance(text, bytes) else text.encode()) for path, text in files.items())
        commit = hashlib.sha1(repr((contents, settings)).encode()).hexdigest()
        data_set["commits"][commit] = dict(contents)
        data_set["refs"]["main"] = commit
        return commit

    def configure(self, monkeypatch, folder):
        """Make this the hub of the clients in this process, with a cache of its own in `folder`."""
        url = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        values = dict(ENDPOINT=self.url, HUGGINGFACE_CO_URL_TEMPLATE=url, HF_HUB_OFFLINE=False)
        values |= dict(HF_HUB_CACHE=str(folder / "hub"), HF_TOKEN_PATH=str(folder / "token"), HF_HUB_DISABLE_XET=True)
        for name, value in values.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.url)
        monkeypatch.setenv("HF_TOKEN", "hf_right")

    def stop(self):
        self.stopping.set()
        self.shutdown()
        self.server_close()
