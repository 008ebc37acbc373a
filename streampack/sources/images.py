"""The images and videos of rows: where they are, and their sizes.

The images of a chat are in its messages, or in a list beside it, under the key ``images_key``. In tar files they are
members of the sample. Sizes come from the first bytes of each image. Videos are in the
messages, or in a list under ``videos``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from streampack.core.media.references import reference_of
from streampack.sources.files.image_files import BadImage, size_of
from streampack.sources.files.video_files import video_of
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.processors.image_parts import MediaPlaces, Sized, SizedImage, SizedVideo
from streampack.tokenizers.token_ids import Because

_ENDINGS = "jpg;jpeg;png;webp"
VIDEOS = "videos"


class ImageReader:
    """Puts images with their sizes into the chats of rows.

    - ``keys``: keys that may hold a list of images.
    - ``endings``: extensions of members of tar files that are images.
    """

    def __init__(self, settings: SourceSettings) -> None:
        named = settings.images_key
        self.keys = ("images", "image") if named is None else (named,)
        self.endings = _ENDINGS if named is None else named
        self._is_named = named is not None or settings.source == "webdataset"
        self._folder = settings.image_folder

    def __call__(self, chats: list[Any], row: Mapping[str, Any]) -> list[Any] | Because:
        """Return the chats of a row, lists of messages, with an image or a video in each place; or a reason.

        Values that are no lists are returned as they are.
        """
        lists = {
            kind: _listed(next((row[key] for key in keys if row.get(key) is not None), []))
            for kind, keys in (("image", self.keys), ("video", (VIDEOS,)))
            if (kind == "image" and self._is_named) or any(key in row for key in keys)
        }
        numbers = itertools.count()
        places = MediaPlaces(lists, lambda kind, value: self._sized(kind, value, next(numbers)))
        try:
            placed = [places.fill(chat) if isinstance(chat, list) else chat for chat in chats]
        except BadImage as bad:
            return Because(bad.reason, str(bad))
        return places.wrong_count() or placed

    def _sized(self, kind: str, value: Any, number: int) -> Sized:
        """Return an image or a video with its size. Raises BadImage."""
        try:
            reference = reference_of(self._with_folder(value))
        except (ValueError, TypeError):
            raise BadImage(f"{kind}_unreadable", f"{kind} {number} is a {_advice(value)}") from None
        try:
            if kind == "video":
                return SizedVideo(reference, video_of(reference))
            return SizedImage(reference, *size_of(reference))
        except BadImage as bad:
            raise BadImage(bad.reason, f"{kind} {number} ({reference.shown[:200]}): {bad}") from None

    def _with_folder(self, value: Any) -> Any:
        """Return a value whose relative path begins with the folder of images."""
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if isinstance(value, Mapping) and isinstance(value.get("path"), str) and value.get("bytes") is None:
            value = value["path"]
        if isinstance(value, Mapping) and isinstance(value.get("uri"), str):
            return {**value, "uri": self._path(value["uri"])}
        return self._path(value) if isinstance(value, str) else value

    def _path(self, path: str) -> str:
        """Return a path or URL in the folder of images; as it is if it is absolute."""
        is_relative = not path.startswith(("/", "~", "data:")) and "://" not in path
        return f"{self._folder.rstrip('/')}/{path}" if self._folder and is_relative else path


def _listed(value: Any) -> list[Any]:
    """Return the images of a row as a list; a row may have one image without a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _advice(value: Any) -> str:
    """Return the type of a value that is no image, and what to do."""
    name = type(value).__name__
    if hasattr(value, "getexif"):
        return (
            f"{name}, which is decoded. Give a path or bytes, in a dataset by cast_column('image', Image(decode=False))"
        )
    return f"{name}, expected a path, a URL or bytes"
