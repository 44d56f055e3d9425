"""A model hub on loopback: tokens, repositories, commits and large files as huggingface_hub asks for them."""

from __future__ import annotations

import base64
import hashlib
import json
from urllib.parse import unquote

from support.loopback import Handler, Server, serving


class ModelHub(Server):
    """The repositories {repository: {file: content}} and the number of commits. `fault` names what goes wrong next."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.fault = ""


class _Handler(Handler):
    server: ModelHub

    def _send(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.answer(status, body, {"Content-Type": "application/json", **(headers or {})})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refused(self) -> bool:
        role = {"Bearer writer": "write", "Bearer reader": "read"}.get(
            self.headers.get("Authorization", "")
        )
        if role is None:
            self._send({"error": "Invalid user token."}, 401)
        return role is None

    def do_PUT(self) -> None:
        content = self._body()
        if self.server.fault == "upload":  # the line goes dead in the middle of a large file
            self.close_connection = True
            self.connection.close()
            return
        self.server.objects[self.path.rsplit("/", 1)[1]] = content
        self._send(b"")

    def do_POST(self) -> None:
        content = self._body()
        if self._refused():
            return
        if self.path == "/api/repos/create":
            self._create(json.loads(content))
        elif self.path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(content)["files"]
            modes = [
                ("lfs" if file["path"].endswith(".safetensors") else "regular") for file in files
            ]
            answer = [
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
                for file, mode in zip(files, modes, strict=True)
            ]
            self._send({"files": answer})
        elif self.path.endswith("/info/lfs/objects/batch"):
            large = [
                {
                    **item,
                    "actions": {"upload": {"href": f"{self.server.address}/objects/{item['oid']}"}},
                }
                for item in json.loads(content)["objects"]
            ]
            self._send(
                {"objects": large, "transfer": "basic"},
                headers={"Content-Type": "application/vnd.git-lfs+json"},
            )
        else:
            self._commit(self.path.split("/api/models/")[1].split("/commit/")[0], content)

    def _create(self, asked: dict) -> None:
        name = (
            f"{asked['organization']}/{asked['name']}"
            if asked.get("organization")
            else f"me/{asked['name']}"
        )
        if not name.startswith("me/"):
            self._send(
                {"error": "You don't have the rights to create a model under this namespace"}, 403
            )
            return
        there = name in self.server.repositories
        self.server.repositories.setdefault(name, {})
        if (
            asked.get("private") or asked.get("visibility") == "private"
        ):  # before and since huggingface_hub 1.0
            self.server.private.add(name)
        self._send({"url": f"{self.server.address}/{name}", "name": name}, 409 if there else 200)

    def _commit(self, name: str, content: bytes) -> None:
        if self.server.fault == "commit":
            self._send({"error": "Internal Error"}, 500)
            return
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.server.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.server.repositories[name][value["path"]] = self.server.objects[value["oid"]]
        self.server.commits.append(name)
        commit = hashlib.sha1(str(len(self.server.commits)).encode()).hexdigest()
        address = f"{self.server.address}/{name}/commit/{commit}"
        self._send({"success": True, "commitOid": commit, "commitUrl": address, "hookOutput": ""})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/api/whoami-v2":
            if not self._refused():
                role = "read" if self.headers["Authorization"].endswith("reader") else "write"
                self._send(
                    {
                        "name": "me",
                        "type": "user",
                        "orgs": [],
                        "auth": {"accessToken": {"role": role}},
                    }
                )
        elif "/revision/" in path:  # before huggingface_hub 1.0: where large files go
            self._send(
                {"id": path.split("/api/models/")[1].split("/revision/")[0], "xetEnabled": False}
            )
        elif "/resolve/" in path:
            name, file = path.strip("/").split("/resolve/")
            content = self.server.repositories.get(name, {}).get(file.split("/", 1)[1])
            if content is None:
                self._send({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            else:
                tag = hashlib.sha1(content).hexdigest()
                self._send(content, headers={"ETag": f'"{tag}"', "X-Repo-Commit": "0" * 40})
        else:
            self._send({"error": "not found"}, 404)


def model_hub():
    """A hub that answers until the block ends."""
    return serving(ModelHub())
