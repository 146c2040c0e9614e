"""A stand-in for the Hugging Face Hub on the loopback interface: one repository, one branch."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "someone/adapter"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
TOKEN = "hf_good"
READ_ONLY = "hf_read_only"


class StubHub(ThreadingHTTPServer):
    """Answers as the Hub does for what this package asks of it.

    Attributes:
        files: (revision, name) -> content.
        is_private: Whether a token is asked for.
        status: Answered to everything, if set.
        requests: (method, path) of what was asked.
        commits: Bodies of the commits that came in, one list of JSON lines each.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[tuple[str, str], bytes] = {}
        self.is_private = False
        self.status: int | None = None
        self.requests: list[tuple[str, str]] = []
        self.commits: list[list[dict[str, Any]]] = []
        self.created: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, content: str | bytes, revision: str = "main") -> None:
        content = content.encode() if isinstance(content, str) else content
        self.files[revision, name] = content

    def has_revision(self, revision: str) -> bool:
        return revision == "main" or revision in {known for known, _ in self.files}

    def uploaded(self) -> dict[str, bytes]:
        """Return name -> content of all files that were committed."""
        return {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for commit in self.commits
            for line in commit
            if line["key"] == "file"
        }


@contextmanager
def serve() -> Iterator[StubHub]:
    """Run a stub in a thread."""
    with StubHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubHub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._note()
        if self._refused(needs_write=True):
            return
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._json({"url": f"{self.server.address}/{REPOSITORY}", "name": REPOSITORY})
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif "/commit/" in path:
            self.server.commits.append([json.loads(line) for line in body.splitlines()])
            address = f"{self.server.address}/{REPOSITORY}/commit/{COMMIT}"
            self._json({"success": True, "commitOid": COMMIT, "commitUrl": address})
        else:
            self._fail(404, "EntryNotFound")

    def _get(self) -> None:
        path = self._note()
        if self._refused():
            return
        prefix = f"/{REPOSITORY}/resolve/"
        if not path.startswith(prefix):
            self._fail(404, "RepoNotFound")
            return
        revision, _, name = path.removeprefix(prefix).partition("/")
        revision = "main" if revision == COMMIT else revision
        if not self.server.has_revision(revision):
            self._fail(404, "RevisionNotFound")
            return
        content = self.server.files.get((revision, name))
        if content is None:
            self._fail(404, "EntryNotFound", revision)
            return
        self._answer(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, revision)

    def _note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        return path

    def _refused(self, *, needs_write: bool = False) -> bool:
        if self.server.status is not None:
            self._fail(self.server.status)
            return True
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token and (self.server.is_private or needs_write):
            self._fail(401)
            return True
        if token == READ_ONLY and (self.server.is_private or needs_write):
            self._fail(403)
            return True
        return False

    def _fail(self, status: int, code: str | None = None, revision: str | None = None) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._answer(status, json.dumps({"error": str(status)}).encode(), headers, revision)

    def _json(self, values: dict[str, Any]) -> None:
        self._answer(200, json.dumps(values).encode(), {"Content-Type": "application/json"})

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], revision: str | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if revision is not None:
            commit = COMMIT if revision == "main" else OLD_COMMIT
            self.send_header("X-Repo-Commit", commit)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
