"""A server with the endpoints of the Hugging Face Hub that downloads use.

``python -m tests.hub DIRECTORY PORT`` serves DIRECTORY/ORG/NAME as the model ORG/NAME.  A file
``gated`` or ``private`` in it makes it a gated or private model, which needs the token `TOKEN`.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_token_of_the_tests"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer the requests of huggingface_hub."""

    protocol_version = "HTTP/1.1"
    home: Path

    def do_GET(self) -> None:
        words = urlsplit(self.path).path.strip("/").split("/")
        is_api = words[:2] == ["api", "models"]
        model, rest = "/".join(words[2 * is_api :][:2]), words[2 * is_api :][2:]
        directory = self.home / model
        is_allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not directory.is_dir() or ((directory / "private").exists() and not is_allowed):
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if (directory / "gated").exists() and not is_allowed and not is_api:
            return self.refuse(403, "GatedRepo", f"Access to model {model} is restricted.")
        files = [path for path in sorted(directory.iterdir()) if path.suffix]
        if is_api and rest[0] == "revision":
            names = [{"rfilename": path.name} for path in files]
            return self.answer_json({"id": model, "sha": COMMIT, "siblings": names})
        if is_api and rest[0] == "tree":
            return self.answer_json(
                [
                    {
                        "type": "file",
                        "path": path.name,
                        "size": path.stat().st_size,
                        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                    }
                    for path in files
                ]
            )
        path = directory / rest[-1]
        if rest[0] != "resolve" or not path.is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        content = path.read_bytes()
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self.answer(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer_json(self, tree: object) -> None:
        self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str, message: str) -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    Handler.home = Path(sys.argv[1])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
