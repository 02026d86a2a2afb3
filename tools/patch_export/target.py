# SPDX-License-Identifier: Apache-2.0
"""The tree that the series is laid over: a git checkout or an unpacked archive."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from patch_export.errors import ExportError

_TAG = re.compile(r"v(?P<version>\d[\w.]*)")


@dataclass(frozen=True)
class Identity:
    """Who signs off: name and mail address."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"


@dataclass(frozen=True)
class Change:
    """One commit to be made: its message, and files by path; None removes one."""

    message: str
    files: Mapping[str, tuple[str, bytes] | None]
    """Mode as git writes it, and content."""


class Target:
    """Upstream's tree; only branches are added to it, by git."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not (self.root / "vllm").is_dir():
            raise ExportError(
                f"{root} has no folder vllm/: name the root of upstream's checkout or "
                "of its unpacked source distribution"
            )

    @property
    def is_checkout(self) -> bool:
        """Whether git knows the tree."""
        return (self.root / ".git").exists()

    def version(self) -> str | None:
        """The version of vLLM, or None where nothing tells it."""
        information = self.root / "PKG-INFO"
        if information.is_file():
            text = information.read_text(encoding="utf-8")
            found: str | None = Parser().parsestr(text, headersonly=True)["Version"]
            return found
        if not self.is_checkout:
            return None
        for tag in self._git("tag", "--points-at", "HEAD").split():
            if match := _TAG.fullmatch(tag):
                return match["version"]
        return None

    def refuse_unless_base(self, base: str) -> None:
        """Refuse a tree of another version than the base.

        Raises:
            ExportError: it is another, or unknown.
        """
        version = self.version()
        if version == base:
            return
        if version is None:
            raise ExportError(
                f"cannot tell the version of {self.root}: it has no PKG-INFO, and no "
                f"tag v… points at its HEAD. Check out the tag v{base}"
            )
        raise ExportError(
            f"{self.root} is vLLM {version}, but the fork is made for {base}. Run "
            f"`make rebase-check BASE={version}`: it names each name and signature "
            "that we use and that differs. CONTRIBUTING.md tells how to move the base. "
            f"Or take the tree of {base}"
        )

    def refuse_unfit(self, branch: str) -> None:
        """Refuse local changes, and a branch that there is.

        Raises:
            ExportError: either is found.
        """
        if not self.is_checkout:
            return
        if changes := self._git("status", "--porcelain"):
            shown = "\n  ".join(changes.splitlines()[:10])
            raise ExportError(
                f"{self.root} has local changes:\n  {shown}\nCommit or stash them; "
                "nothing is laid over a tree that is not as it was released"
            )
        exists = subprocess.run(
            ["git", "-C", str(self.root), "rev-parse", "-q", "--verify", branch],
            capture_output=True,
            check=False,
        )
        if exists.returncode == 0:
            raise ExportError(
                f"{self.root} has a {branch!r} already, and nothing is rewritten. Name "
                "another with --branch, or delete it yourself"
            )

    def identity(self, signoff: str | None) -> Identity:
        """Who signs off: as told, or git's user.

        Raises:
            ExportError: neither is usable.
        """
        if signoff is None:
            name, email = self._config("user.name"), self._config("user.email")
            if not name or not email:
                raise ExportError(
                    "upstream takes signed-off commits only, and git has no user.name "
                    "and user.email here. Set them (`git config --global user.name …`) "
                    "or give --signoff 'Name <mail>'"
                )
            return Identity(name, email)
        match = re.fullmatch(r"\s*([^<>\n]+?)\s*<([^<>\s]+@[^<>\s]+)>\s*", signoff)
        if not match:
            raise ExportError(
                f"--signoff is {signoff!r}, expected 'Name <mail@example.org>'"
            )
        return Identity(match[1], match[2])

    def make_checkout(self, identity: Identity, base: str) -> None:
        """Put an unpacked archive under git, as one commit."""
        if self.is_checkout:
            return
        self._git("init", "--quiet", "--initial-branch=upstream")
        # What the archive holds is what was released; its ignore rules are for builds.
        self._git("add", "--force", "--all", ".")
        self._git(
            *("-c", f"user.name={identity.name}"),
            *("-c", f"user.email={identity.email}"),
            *("commit", "--quiet", "--no-verify", "-m", f"vLLM {base}, as released"),
        )

    def files(self) -> set[str]:
        """The paths in HEAD."""
        listed = self._git("ls-tree", "-r", "-z", "--name-only", "HEAD")
        return {name for name in listed.split("\0") if name}

    def text(self, path: str) -> str:
        """A file's text in HEAD.

        Raises:
            ExportError: it is not there.
        """
        try:
            return self._git("show", f"HEAD:{path}")
        except ExportError as error:
            raise ExportError(
                f"upstream's tree has no {path}, which the series edits: adapt "
                "tools/patch_export/series.toml"
            ) from error

    def add_branch(
        self, branch: str, changes: Sequence[Change], identity: Identity
    ) -> None:
        """Make the commits on HEAD and name the last one; no file is touched."""
        stream = bytearray()
        # The base's own date keeps the result the same however often it is made.
        date = self._git("log", "-1", "--format=%ct", "HEAD").strip()
        start = self._git("rev-parse", "HEAD").strip()
        for number, change in enumerate(changes, 1):
            message = change.message.encode()
            person = f"{identity} {date} +0000"
            stream += f"commit refs/heads/{branch}\nmark :{number}\n".encode()
            stream += f"author {person}\ncommitter {person}\n".encode()
            stream += f"data {len(message)}\n".encode() + message + b"\n"
            stream += f"from {start if number == 1 else f':{number - 1}'}\n".encode()
            for path, content in sorted(change.files.items()):
                if content is None:
                    stream += f"D {path}\n".encode()
                    continue
                mode, data = content
                stream += f"M {mode} inline {path}\ndata {len(data)}\n".encode()
                stream += data + b"\n"
            stream += b"\n"
        self._git("fast-import", "--quiet", "--done", feed=bytes(stream) + b"done\n")

    def _config(self, key: str) -> str:
        where = str(self.root) if self.is_checkout else "."
        outcome = subprocess.run(
            ["git", "-C", where, "config", key],
            capture_output=True,
            text=True,
            check=False,
        )
        return outcome.stdout.strip()

    def _git(self, *arguments: str, feed: bytes | None = None) -> str:
        try:
            outcome = subprocess.run(
                ["git", "-C", str(self.root), *arguments],
                input=feed,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise ExportError("git is needed here; install it") from error
        if outcome.returncode != 0:
            reason = outcome.stderr.decode(errors="replace").strip()
            raise ExportError(f"git {arguments[0]} failed in {self.root}: {reason}")
        return outcome.stdout.decode(errors="surrogateescape")
