"""Files that are kept from one process to the next, in a folder of the user's cache."""

import contextlib
import hashlib
import logging
import os
import pathlib
import tempfile

log = logging.getLogger("jaxspec")

MAGIC = b"jaxspec 1\n"
DIGEST_BYTES = 32


class KeptFiles:
    """Contents by name, one file each, shared by all processes.

    A file appears whole or not at all, so processes need no lock. A content is returned only if its
    checksum is right. If a file cannot be written, a log line says so and everything else goes on.
    """

    def __init__(self, folder: pathlib.Path, limit_bytes: int):
        self.folder = folder
        self.limit_bytes = limit_bytes
        """Size of all files beyond which those that were unused for longest are deleted."""

    def read(self, name: str) -> bytes | None:
        """The content, or None if there is none or the file is damaged."""
        path = self.folder / name
        try:
            file = path.read_bytes()
        except OSError:
            return None
        head, content = file[: len(MAGIC) + DIGEST_BYTES], file[len(MAGIC) + DIGEST_BYTES :]
        if head != _head(content):
            self.drop(name, "its checksum is wrong")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used now
        return content

    def write(self, name: str, content: bytes) -> None:
        try:
            _write_whole(self.folder / name, _head(content) + content)
            self._delete_oldest()
        except OSError as error:
            log.warning("compiled programs are not kept in %s: %s", self.folder, error)

    def drop(self, name: str, reason: str) -> None:
        """Deletes a file that cannot be used."""
        log.warning("compiling again, since %s cannot be used: %s", self.folder / name, reason)
        _delete(self.folder / name)

    def _delete_oldest(self) -> None:
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process deleted it
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit_bytes:
                return
            _delete(path)
            total -= size


def open_files(folder: pathlib.Path, limit_bytes: int) -> KeptFiles | None:
    """The files in this folder, which is made if it is missing. Returns None, with a log line, if
    it cannot be used. Its files are executed, so no other user may be able to write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if problem := _problem(folder):
            raise PermissionError(problem)
    except OSError as error:
        log.warning("compiled programs are not kept: %s", error)
        return None
    return KeptFiles(folder, limit_bytes)


def _problem(folder: pathlib.Path) -> str | None:
    """Why the files of this folder may not be run."""
    if not hasattr(os, "getuid"):
        return None
    found = folder.stat()
    if found.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    return f"other users can write to {folder}" if found.st_mode & 0o022 else None


def _head(content: bytes) -> bytes:
    return MAGIC + hashlib.sha256(content).digest()


def _write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes under another name first, so that no reader sees a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        _delete(pathlib.Path(name))
        raise


def _delete(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
