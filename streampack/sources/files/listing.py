"""Lists the files that paths and patterns name, with their sizes, and opens one of them, local or at a URL."""

import contextlib
import errno
import glob
import os
from collections.abc import Iterator, Sequence

from streampack.errors import ConfigError, SourceError
from streampack.sources.files.braces import expand_braces
from streampack.sources.files.byte_source import File, MissingFile, ShardFile, is_url
from streampack.sources.files.local_files import LocalFile


@contextlib.contextmanager
def open_file(file: File, need: range | None = None) -> Iterator[ShardFile]:
    """Open a listed file, local or at a URL, and close it at the end.

    ``need``: range of bytes that will be read, for the kernel to fetch ahead; None for all. Raises SourceError if the
    file is gone, or changed since it was listed.
    """
    if is_url(file.path):
        from streampack.sources.files.remote import RemoteFile

        opened: ShardFile = RemoteFile(file)
    else:
        opened = LocalFile(file, range(file.size) if need is None else need)
    try:
        yield opened
    finally:
        opened.close()


def read_file(file: File) -> bytes:
    """Return the whole contents of a small file."""
    with open_file(file) as opened:
        return opened.pread(file.size, 0)


def find(shards: str | Sequence[str] | None, path: str | None) -> list[str]:
    """Return the paths and URLs of a source: ``shards`` are patterns to expand, ``path`` is taken literally.

    In both, ``~`` stands for the home folder.
    """
    return [os.path.expanduser(path)] if path is not None else expand(shards or ())


def expand(shards: str | Sequence[str]) -> list[str]:
    """Expand paths, brace patterns and globs to paths, in the order given; a glob's matches sort by code point.

    Raises SourceError for a glob that matches nothing or a path that occurs twice, ConfigError for an invalid pattern.

    >>> expand("web-{00..02}.tar")
    ['web-00.tar', 'web-01.tar', 'web-02.tar']
    """
    patterns = [os.path.expanduser(pattern) for pattern in ([shards] if isinstance(shards, str) else shards)]
    if not patterns:
        raise ConfigError("shards: got an empty list, expected at least one path or pattern. Add a path")
    paths: list[str] = []
    for pattern in patterns:
        for path in _expand_braces(pattern):
            paths.extend(_expand_glob(path))
    seen: set[str] = set()
    for path in (path if is_url(path) else os.path.abspath(path) for path in paths):
        if path in seen:
            raise SourceError(
                f"shards: got {path} from two patterns, expected each file once. Change the patterns so that they do "
                "not overlap"
            )
        seen.add(path)
    return paths


def _expand_braces(pattern: str) -> list[str]:
    """Return the paths that a brace pattern stands for. Raises ConfigError for an invalid pattern."""
    if pattern.startswith("pipe:"):
        raise ConfigError(
            f"shards: got the command {pattern!r}, expected files, because the output of a command cannot be read at "
            "an offset. Give the URL that the command reads"
        )
    if "{" not in pattern or (not is_url(pattern) and os.path.exists(pattern)):
        return [pattern]
    try:
        return expand_braces(pattern)
    except ValueError as error:
        raise ConfigError(
            f"shards: got {pattern!r} with unmatched braces, expected a pattern such as web-{{000..511}}.tar"
        ) from error


def _expand_glob(path: str) -> list[str]:
    """Return the files that match a glob, sorted, or the path itself. Raises SourceError without a match."""
    if is_url(path):
        before, query, _ = path.partition("?")  # "?" alone is no pattern: it begins the query of a URL
        if "*" not in before and "[" not in before:
            return [path]
        if query and path.startswith(("http://", "https://")):
            raise ConfigError(
                f"shards: got the pattern {before!r} with a query, expected no query, because the listing of a folder "
                "has none. Give the files one by one, or as a brace pattern such as web-{000..127}.tar?key=1"
            )
        from streampack.sources.files.remote import list_urls

        paths = list_urls(path)
    elif not glob.has_magic(path) or os.path.exists(path):
        return [path]
    else:
        paths = sorted(glob.glob(path, recursive=True))
        path = os.path.abspath(path)
    if not paths:
        raise SourceError(f"{path}: got no matching file, expected at least one file. Correct the pattern")
    return paths


def measure(paths: Sequence[str]) -> list[File]:
    """Return a File for each path or URL: its size in bytes, and its name relative to the folder common to all.

    Local paths are made absolute. Raises SourceError for a path that does not exist or is not a file, and for two
    paths of one file.
    """
    _refuse_links_to_each_other(paths)
    urls = [path for path in paths if is_url(path)]
    sizes: dict[str, int] = {}
    if urls:
        from streampack.sources.files.remote import size_urls

        sizes = size_urls(urls)
    places = [_path_in_one_tree(path) for path in paths]
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


def _refuse_links_to_each_other(paths: Sequence[str]) -> None:
    """Raise SourceError if two local paths lead to one file by symbolic links, or by ``file://``."""
    seen: dict[str, str] = {}
    for path in paths:
        local = path.removeprefix("file://")
        if is_url(local):
            continue
        other = seen.setdefault(os.path.realpath(local), path)
        if other is not path:
            raise SourceError(
                f"shards: got {other} and {path}, which are one file, expected each file once. Remove one of the two "
                "from the patterns"
            )


def _path_in_one_tree(path: str) -> str:
    """Return an absolute path for a local path, or ``/scheme/rest`` for a URL.

    The result omits a URL's query, which may hold a secret that changes.
    """
    scheme, url, rest = path.partition("://")
    return os.path.normpath(f"/{scheme}/{rest.partition('?')[0]}") if url else os.path.abspath(path)


def _stat(path: str) -> os.stat_result:
    """Return the status of a regular file. Raises SourceError if it is missing or not a regular file."""
    try:
        status = os.stat(path)
    except OSError as error:
        kind = MissingFile if error.errno in (errno.ENOENT, errno.ENOTDIR) else SourceError
        raise kind(
            f"{path}: the file cannot be read ({error.strerror}). Create the file, or correct the path"
        ) from error
    if not os.path.isfile(path):
        raise SourceError(f"{path}: the path is not a regular file. To read the files of a folder, write {path}/*")
    return status
