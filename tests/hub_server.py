"""A Hub for tests: the HTTP calls that huggingface_hub makes to create, fill and download model repositories.

Repositories live in memory. Any other call is answered 404 and kept in `unexpected`; `fail` injects failures.
The large-file protocol is Git LFS with one PUT a file, as used where hf_xet is off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_test_token"


@dataclass
class Repository:
    """Branches of commits, each a map from path to content; the first commit is empty, as on the Hub."""

    is_private: bool
    branches: dict[str, str] = field(default_factory=dict)  # name: commit
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        """Make a commit the head of a branch; its hash."""
        sha = hashlib.sha1(f"{branch}/{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """Commit of a branch or hash."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Failure:
    """What to answer instead, how often."""

    method: str
    pattern: str
    status: int
    times: int


@dataclass
class Hub:
    """State of the server."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256
    calls: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, method: str, pattern: str, status: int, times: int = 1000) -> None:
        """Answer calls whose path matches `pattern` with `status`, the first `times` of them."""
        self.failures.append(Failure(method, pattern, status, times))

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """Content of a branch."""
        found = self.repositories[repository]
        return found.commits[found.branches[revision]]


class Refused(Exception):
    """An answer that is an error: status, message, code."""


class Handler(BaseHTTPRequestHandler):
    """One call."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        """Any call."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.hub.calls.append(f"{self.command} {path}")
        try:
            self.check_failures(path)
            self.answer(*self.route(path, body))
        except Refused as refused:
            status, message, code = refused.args
            headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
            # the url is read where a repository exists already
            told = {"error": message, "url": f"{self.hub.endpoint}/of/the-repository"}
            self.answer(json.dumps(told).encode(), headers, status)

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        """Send a response; a HEAD tells the length only."""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def check_failures(self, path: str) -> None:
        """Raise what was injected for this call."""
        for failure in self.hub.failures:
            is_meant = failure.method == self.command and re.search(failure.pattern, path)
            if is_meant and failure.times:
                failure.times -= 1
                raise Refused(failure.status, f"injected {failure.status}", "")

    def route(self, path: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        """Find who answers; content and headers."""
        methods = "GET" if self.command == "HEAD" else self.command
        for method, pattern, respond in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == methods and match:
                found = respond(self, body, **match.groupdict())
                return found if isinstance(found, tuple) else (json.dumps(found).encode(), {})
        self.hub.unexpected.append(f"{self.command} {path}")
        raise Refused(404, "unknown call", "")

    def check_token(self) -> None:
        """Writers need the token."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid credentials in Authorization header", "")

    def repository(self, name: str) -> Repository:
        """A repository that the caller may see."""
        found = self.hub.repositories.get(name)
        if found is None or (found.is_private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return found

    def commit_of(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Hash and files of a revision."""
        repository = self.repository(name)
        sha = repository.resolve(revision)
        if sha is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repository.commits[sha]

    def create(self, body: bytes) -> Any:
        """POST /api/repos/create."""
        self.check_token()
        given = json.loads(body)
        name = f"{given['organization']}/{given['name']}"
        if name in self.hub.repositories:
            raise Refused(409, "You already created this model repo", "")
        is_private = given.get("visibility") == "private" or bool(given.get("private"))
        self.hub.repositories[name] = Repository(is_private)
        self.hub.repositories[name].commit("main", {".gitattributes": b""})
        return {"url": f"{self.hub.endpoint}/{name}", "id": name}

    def branch(self, body: bytes, name: str, revision: str) -> Any:
        """POST /api/models/NAME/branch/REVISION."""
        self.check_token()
        repository = self.repository(name)
        if revision in repository.branches:
            raise Refused(409, "Reference already exists", "")
        start = repository.resolve(json.loads(body or b"{}").get("startingPoint", "main"))
        repository.branches[revision] = start or ""
        return {}

    def info(self, body: bytes, name: str, revision: str | None = None) -> Any:
        """GET /api/models/NAME[/revision/REVISION]."""
        sha, files = self.commit_of(name, revision or "main")
        siblings = [{"rfilename": path} for path in files]
        private = self.repository(name).is_private
        return {"id": name, "modelId": name, "sha": sha, "private": private, "tags": [], "siblings": siblings}

    def tree(self, body: bytes, name: str, revision: str) -> Any:
        """GET /api/models/NAME/tree/REVISION."""
        _, files = self.commit_of(name, revision)
        return [listed(path, content) for path, content in files.items()]

    def validate(self, body: bytes) -> Any:
        """POST /api/validate-yaml: the front matter of a README.md."""
        content = json.loads(body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        metadata = yaml.safe_load(match[1]) if match else None
        if not isinstance(metadata, dict) or not {"license", "library_name", "tags"} <= metadata.keys():
            raise Refused(400, f"front matter {metadata}", "")
        return {"errors": [], "warnings": []}

    def preupload(self, body: bytes, name: str, revision: str) -> Any:
        """POST /api/models/NAME/preupload/REVISION."""
        self.check_token()
        _, files = self.commit_of(name, revision)
        asked = [file["path"] for file in json.loads(body)["files"]]
        return {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if is_large(path) else "regular",
                    "shouldIgnore": False,
                    "oid": oid(path, files[path]) if path in files else None,
                }
                for path in asked
            ]
        }

    def lfs_batch(self, body: bytes, name: str) -> Any:
        """POST /NAME.git/info/lfs/objects/batch."""
        self.check_token()
        objects = json.loads(body)["objects"]
        link = {"href": f"{self.hub.endpoint}/lfs/"}
        for item in objects:
            if item["oid"] not in self.hub.blobs:
                upload = {"href": link["href"] + item["oid"]}
                item["actions"] = {"upload": upload, "verify": {"href": link["href"] + "verify"}}
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, body: bytes, sha256: str) -> Any:
        """PUT /lfs/SHA256."""
        if hashlib.sha256(body).hexdigest() != sha256:
            raise Refused(400, "another content", "")
        self.hub.blobs[sha256] = body
        return {}

    def lfs_verify(self, body: bytes) -> Any:
        """POST /lfs/verify."""
        if json.loads(body)["oid"] not in self.hub.blobs:
            raise Refused(404, "not uploaded", "")
        return {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        """POST /api/models/NAME/commit/REVISION: one line an operation."""
        self.check_token()
        files = dict(self.commit_of(name, revision)[1])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        sha = self.repository(name).commit(revision, files)
        return {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha, "success": True}

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> tuple[bytes, dict[str, str]]:
        """GET or HEAD /NAME/resolve/REVISION/PATH."""
        sha, files = self.commit_of(name, revision)
        if path not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        content = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{oid(path, content)}"'}
        large = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
        return content, headers | (large if is_large(path) else {})


def is_large(path: str) -> bool:
    """What the Hub's .gitattributes send to LFS."""
    return path.endswith(".safetensors")


def git_oid(content: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def oid(path: str, content: bytes) -> str:
    """The hash by which the Hub knows a file."""
    return hashlib.sha256(content).hexdigest() if is_large(path) else git_oid(content)


def listed(path: str, content: bytes) -> dict[str, Any]:
    """A file in a listing."""
    size = len(content)
    large = {"lfs": {"oid": oid(path, content), "size": size, "pointerSize": 134}} if is_large(path) else {}
    return {"type": "file", "path": path, "size": size, "oid": git_oid(content), **large}


NAME, REVISION = r"(?P<name>[\w.-]+/[\w.-]+)", r"(?P<revision>[\w./-]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{NAME}/branch/{REVISION}", Handler.branch),
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/{REVISION}", Handler.commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<sha256>[0-9a-f]{64})", Handler.lfs_put),
    ("POST", "/lfs/verify", Handler.lfs_verify),
    ("GET", f"/api/models/{NAME}/tree/{REVISION}", Handler.tree),
    ("GET", f"/api/models/{NAME}(/revision/{REVISION})?", Handler.info),
    ("GET", rf"/{NAME}/resolve/(?P<revision>[\w-]+)/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Serve an empty Hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
