"""``streampack check producer.yaml --samples N``: show the first samples as tokens, which are learned, and media.

Samples are read as a producer reads them, in the order of the files. The broker's policies are not applied. Only
broker.yaml declares fields. So values that ``fields`` in producer.yaml names count as media if they are references. For
the same reason, samples with a known key that only a declared field reads are shown, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from streampack.config.config_files import read_either
from streampack.config.daemon_settings import ProducerConfig, ProducerStream
from streampack.core.media.references import Reference, inline_bytes, reference_of
from streampack.core.model.fields import LOSS_MASK, PATCHES, Field
from streampack.core.stats.sample_warnings import advice
from streampack.errors import UserError
from streampack.producer.first_rows import MASK, NOT_APPLIED, meaning_of, of_known_key, passed_on, warnings_of
from streampack.sources import RawSample, Tokenizer, open_tokenizer
from streampack.sources.files.image_files import BadImage, as_image, decoded, size_of
from streampack.sources.files.read_bytes import read_bytes
from streampack.sources.files.video_files import frames_of, video_of
from streampack.sources.settings import KEYS
from streampack.tokenizers.processors.image_family import PIXELS
from streampack_services.amounts import media_text, size_text
from streampack_services.daemons.producer import open_sources
from streampack_services.terminal import new_console

Tree = dict[str, Any]
_SIZES = Field(name="media_sizes", dtype="int64", axis="item")
"""A field of media. A sample's ``patches`` are read if there is one."""
_MEDIA = "media_"
_THUMBNAIL, _SHADES = 32, " ░▒▓█"
"""Characters of the line that stands for an image, and the characters for dark to bright."""
_REPEATED = re.compile(r"(<[^<>\s]+>)\1{2,}")
_SHOWN = 4
"""Media items of a sample to show."""


def preview(files: Sequence[Path], samples: int) -> dict[str, list[Tree]]:
    """Return the first ``samples`` samples of each stream of the producer.yaml files, as trees of ``_sample``.

    Raises UserError if there is none, ConfigError and SourceError as a producer does.
    """
    configs = [config for file in files if isinstance(config := read_either(file), ProducerConfig)]
    if not configs:
        raise UserError(f"{files[0]} is a broker.yaml, but only producers read samples. Pass a producer.yaml.")
    streams: dict[str, list[Tree]] = {}
    for config in configs:
        for name, shown in _preview(config, samples).items():
            streams.setdefault(name, []).extend(shown)
    return streams


def _preview(config: ProducerConfig, samples: int) -> dict[str, list[Tree]]:
    """Return the first samples of each stream of one producer.yaml."""
    streams = {}
    shown, applied = _first_samples(config, samples, _not_applied), _first_samples(config, samples, lambda _: {})
    for name, stream in config.streams.items():
        tokenizer = open_tokenizer(stream.tokenizer or config.tokenizer)
        pairs = zip(shown[name], applied[name], strict=True)
        streams[name] = [_sample(*pair, tokenizer, list(stream.fields)) for pair in pairs]
    return streams


def _first_samples(
    config: ProducerConfig, count: int, passed: Callable[[ProducerStream], dict[str, str]]
) -> dict[str, list[RawSample]]:
    """Return the first ``count`` samples of each stream; the values of ``passed`` keys are passed on as they are."""
    streams = {
        name: msgspec.structs.replace(stream, fields=_renamed(stream.fields) | passed(stream))
        for name, stream in config.streams.items()
    }
    records = {}
    for name, source in open_sources(msgspec.structs.replace(config, streams=streams)).items():
        images = [Field(name=PIXELS, dtype="reference", axis="item")] if source.image_fields else []
        # A reference is passed on as it is, so any value may be read as one. The values say which of them are.
        media = [Field(name=key, dtype="reference", axis="item") for key in streams[name].fields if key != LOSS_MASK]
        records[name] = list(islice(source.read(0, 1, seed=0, passes=1, fields=(MASK, *media, *images, _SIZES)), count))
    return records


def _renamed(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of the ``fields`` of producer.yaml by names that a field of media may have."""
    return {name if name == LOSS_MASK else f"{_MEDIA}{at}": key for at, (name, key) in enumerate(fields.items())}


def _not_applied(stream: ProducerStream) -> dict[str, str]:
    """Return the known keys that only a declared field reads, by such names. A preview applies none of them."""
    return passed_on(NOT_APPLIED)[0] if "fields" in KEYS[stream.source] else {}


def _sample(record: RawSample, applied: RawSample, tokenizer: Tokenizer, fields: list[str]) -> Tree:
    """Return a sample as a tree: place, reason of a rejection (or None), tokens, learned tokens, and parts of its text.

    ``applied`` is the sample with the known keys applied. If one of them rejects it, ``undeclared`` says so.

    Each of ``parts`` has its ``text``, whether it is ``learned``, and whether its tokens are ``special``. ``media`` has
    the number of ``items`` and ``patches``, and the ``places`` of items by field. It is None without media. If a
    processor reads the images, its ``images`` have the size, the tokens and a line of brightness of each. ``fields``:
    names of the fields in producer.yaml.
    """
    media, wrong = _media(record, fields)
    if media is not None and PIXELS in record.fields:
        media["images"] = [_image(reference, tokenizer) for reference in record.fields[PIXELS]]
    learned = record.fields.get(LOSS_MASK)
    mask = [1] * len(record.tokens) if learned is None else learned.tolist()
    special = np.isin(record.tokens, list(tokenizer.special_ids)).tolist() or [False] * len(mask)
    parts, place = [], 0
    for (value, is_special), run in groupby(zip(mask, special, strict=True)):
        size = len(list(run))
        text = tokenizer.decode(record.tokens[place : place + size])
        parts.append({"learned": bool(value), "special": is_special, "text": text})
        place += size
    return {
        "where": record.place, "reason": record.reason or wrong, "num_tokens": len(mask),
        "num_learned": sum(map(bool, mask)), "parts": parts, "media": media, "warnings": list(warnings_of(record)),
        "undeclared": meaning_of(applied.reason, applied) if applied.reason and of_known_key(applied) else None,
    }  # fmt: skip


def _short(text: str) -> str:
    """Return a text with a number in place of a special token that follows itself, as those of images do.

    >>> _short("<|vision_start|><|image_pad|><|image_pad|><|image_pad|>")
    '<|vision_start|><|image_pad|>(3 times)'
    """
    return _REPEATED.sub(lambda run: f"{run[1]}({len(run[0]) // len(run[1])} times)", text)


def _media(record: RawSample, fields: list[str]) -> tuple[Tree | None, str | None]:
    """Return a sample's media as a tree, or None, and the reason why a producer rejects them, or None.

    ``fields``: names of the fields in producer.yaml, in the order of ``_renamed``.
    """
    sizes = record.fields.get(PATCHES)
    try:
        patches = [] if sizes is None else [int(size) for size in sizes]
    except (TypeError, ValueError):
        return None, f"{PATCHES}: dtype"
    values: Tree = {name: record.fields.get(f"{_MEDIA}{at}") for at, name in enumerate(fields)}
    values |= {PIXELS: record.fields[PIXELS]} if PIXELS in record.fields else {}
    places = {name: places for name, value in values.items() if (places := _places(value))}
    items = {len(items) for items in places.values()} | ({len(patches)} if sizes is not None else set())
    if not any(items):
        return None, None
    result = {"items": max(items), "patches": sum(patches), "places": places}
    return result, "media: items" if len(items) > 1 else None


def _image(reference: Any, tokenizer: Any) -> Tree:
    """Return the size and the tokens of an image or a video, and its brightness from left to right as a line of text.

    ``frames`` is the number of frames that the processor samples, None for an image. The line is that of the first one.
    """
    family, frames = tokenizer.family, None
    try:
        size: Any = size_of(reference)
        tokens = sum(family.tokens_of(*size).repeats)
    except BadImage:
        size = video_of(reference)
        tokens, frames = sum(family.tokens_of_video(size).repeats), len(family.frames_of_video(size).places)
    try:
        data = read_bytes(reference)
        image = decoded(data) if frames is None else as_image(frames_of(data, size, [0])[0])
        small = image.convert("L").resize((_THUMBNAIL, 1))
        line = "".join(_SHADES[shade * len(_SHADES) // 256] for shade in small.tobytes())
    except Exception as error:  # damaged pixels: the trainer raises for them
        line = f"cannot be decoded: {' '.join(str(error).split())[:100]}"
    about = {"height": size.height, "width": size.width, "frames": frames, "num_tokens": tokens}
    return {**about, "thumbnail": line}


def _places(value: Any) -> list[Tree]:
    """Return the places that a value refers to, one for each item; empty if the value is no list of references."""
    try:
        listed = value if isinstance(value, list | tuple) else [value]
        return [_place(reference_of(item)) for item in listed]
    except (ValueError, TypeError):
        return []


def _place(reference: Reference) -> Tree:
    """Return the uri, offset and size of a reference as a tree; the uri is None for bytes in the reference."""
    if reference.is_inline:
        return {"uri": None, "offset": reference.offset, "size": len(inline_bytes(reference))}
    return {"uri": reference.uri, "offset": reference.offset, "size": reference.size}


def show_preview(streams: dict[str, list[Tree]]) -> None:
    """Print the result of ``preview``: learned text green, special tokens reversed, and the rest dim.

    Without colors, learned text is in ``[[ ]]``, and runs of special tokens are in ``{{ }}``.
    """
    console = new_console()
    plain = not console.color_system
    for name, samples in streams.items():
        for sample in samples:
            console.print()
            counts, media = f"{sample['num_tokens']} tokens, {sample['num_learned']} in the loss", sample["media"]
            counts += f", {media_text(media['items'], media['patches'])}" if media else ""
            about = f"rejected: {sample['reason']}" if sample["reason"] else counts
            console.print(Text(f"{name}  {sample['where']}  {about}", style="bold"), soft_wrap=True)
            for sentence in (*map(advice, sample["warnings"]), *filter(None, [sample["undeclared"]])):
                console.print(f"warning: {sentence}", style="yellow", soft_wrap=True)
            text = Text()
            for learned, parts in groupby(sample["parts"], key=itemgetter("learned")):
                style = "green" if learned else "dim"
                text.append("[[" * (learned and plain))
                for part in parts:
                    before, after = ("{{", "}}") if plain and part["special"] else ("", "")
                    text.append(before + _short(part["text"]) + after, style=style + " reverse" * part["special"])
                text.append("]]" * (learned and plain))
            console.print(text, soft_wrap=True)
            for field, places in media["places"].items() if media else ():
                _show_places(console, field, places, media.get("images", []) if field == PIXELS else [])


def _show_places(console: Console, field: str, places: list[Tree], images: list[Tree]) -> None:
    """Print where the first items of a field are, one line each; and their ``images``, if they are known."""
    for number, place in enumerate(places[:_SHOWN]):
        size = "" if place["size"] is None else f", {size_text(place['size'])}"
        where = "in the sample" if place["uri"] is None else place["uri"].partition("?")[0]
        where += f" at byte {place['offset']:,}" if place["offset"] else ""
        console.print(f"  {field}: {where}{size}", style="dim", soft_wrap=True)
        for image in images[number : number + 1]:
            frames = "" if image["frames"] is None else f"{image['frames']} frames, "
            about = f"{image['width']} x {image['height']} pixels, {frames}{image['num_tokens']} tokens"
            console.print(Text(f"    {about}  |{image['thumbnail']}|"), soft_wrap=True)
    if len(places) > _SHOWN:
        console.print(f"  {field}: {len(places) - _SHOWN} more", style="dim")
