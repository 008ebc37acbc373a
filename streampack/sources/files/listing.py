"""From paths and patterns to files with their sizes; opens one file for reading, here or at a URL."""

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence

from streampack.errors import ConfigError, SourceError
from streampack.sources.files.braces import expand_braces
from streampack.sources.files.byte_source import File, ShardFile, is_url
from streampack.sources.files.local_files import LocalFile


@contextlib.contextmanager
def open_file(file: File, need: range | None = None) -> Iterator[ShardFile]:
    """``need``: the bytes that will be read, None for all.

    Raises SourceError when it is gone or is not what it was when the source was opened.
    """
    if is_url(file.path):
        from streampack.sources.files.remote import RemoteFile

        found: ShardFile = RemoteFile(file)
    else:
        found = LocalFile(file, range(file.size) if need is None else need)
    try:
        yield found
    finally:
        found.close()


def read_file(file: File) -> bytes:
    """All of a small one."""
    with open_file(file) as opened:
        return opened.pread(file.size, 0)


def find(shards: str | Sequence[str] | None, path: str | None) -> list[str]:
    """The paths and URLs that ``shards`` (patterns) or ``path`` (one, as it is) name."""
    return [path] if path is not None else expand(shards or ())


def expand(shards: str | Sequence[str]) -> list[str]:
    """Paths, brace patterns and globs as paths, in the order given, each glob's matches sorted by code point.

    Raises SourceError for a glob that matches nothing or a path that comes twice, ConfigError for a pattern that
    is none.

    >>> expand("web-{00..02}.tar")
    ['web-00.tar', 'web-01.tar', 'web-02.tar']
    """
    patterns = [shards] if isinstance(shards, str) else list(shards)
    if not patterns:
        raise ConfigError("shards: got an empty list, expected at least one path or pattern")
    paths: list[str] = []
    for pattern in patterns:
        for path in _expand_braces(pattern):
            paths.extend(_expand_glob(path))
    seen: set[str] = set()
    for path in (path if is_url(path) else os.path.abspath(path) for path in paths):
        if path in seen:
            raise SourceError(f"shards: {path} comes more than once: make the patterns disjoint")
        seen.add(path)
    return paths


def _expand_braces(pattern: str) -> list[str]:
    if pattern.startswith("pipe:"):
        raise ConfigError(f"shards: got {pattern!r}, expected files: a pipe has no offsets to seek to; give its URL")
    if "{" not in pattern or (not is_url(pattern) and os.path.exists(pattern)):
        return [pattern]
    try:
        return expand_braces(pattern)
    except ValueError as error:
        raise ConfigError(
            f"shards: the braces of {pattern!r} do not match; expected e.g. web-{{000..511}}.tar"
        ) from error


def _expand_glob(path: str) -> list[str]:
    if is_url(path):
        if "*" not in path and "[" not in path:  # "?" begins the query of a URL
            return [path]
        from streampack.sources.files.remote import list_urls

        found = list_urls(path)
    elif not glob.has_magic(path) or os.path.exists(path):
        return [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
        path = os.path.abspath(path)
    if not found:
        raise SourceError(f"{path}: got no file, expected at least one to match: mend the pattern")
    return found


def measure(paths: Sequence[str]) -> list[File]:
    """Each path or URL with its size in bytes, and its name under the folder common to all; paths made absolute.

    Raises SourceError for what is not there or is no file.
    """
    urls = [path for path in paths if is_url(path)]
    sizes: dict[str, int] = {}
    if urls:
        from streampack.sources.files.remote import size_urls

        sizes = size_urls(urls)
    places = [_place(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(place) for place in places])
    files = []
    for path, place in zip(paths, places, strict=True):
        name = os.fsencode(os.path.relpath(place, folder)).decode("utf-8", "backslashreplace")
        if is_url(path):
            files.append(File(path, name, sizes[path], None))
        else:
            status = _stat(path)
            files.append(File(place, name, status.st_size, status.st_mtime_ns))
    return files


def _place(path: str) -> str:
    """A path as if all were in one tree; without a URL's query, which may hold a secret that changes."""
    scheme, url, rest = path.partition("://")
    return os.path.normpath(f"/{scheme}/{rest.partition('?')[0]}") if url else os.path.abspath(path)


def _stat(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}); expected a file: make it, or mend the path"
        ) from error
    if not os.path.isfile(path):
        raise SourceError(f"{path}: is no regular file; expected one: a folder is written as {path}/*")
    return status
