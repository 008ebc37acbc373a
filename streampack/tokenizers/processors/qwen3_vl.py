"""Qwen3-VL: images as Qwen2-VL, and videos, whose frames are sampled by a rate.

Two frames make one part of a video. The text before it is its time, and its tokens are a grid of their own. All parts
share the pixels that a video may have. (transformers 5, ``Qwen3VLProcessor`` and ``Qwen3VLVideoProcessor``)
"""

from __future__ import annotations

import math

import numpy as np

from streampack.tokenizers.processors.image_family import ImageTokens, ProcessorFiles, VideoFrames, VideoSize
from streampack.tokenizers.processors.qwen_vl import GRID, LONGEST_ASPECT, QwenVL

_MEAN = _STD = (0.5, 0.5, 0.5)


class Qwen3VL(QwenVL):
    """Grids of patches, and a grid for each pair of frames of a video."""

    classes = ("Qwen3VLProcessor",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.video_token = files.token("video_token", "<|video_pad|>")
        self._around = (
            files.token("vision_start_token", "<|vision_start|>"), files.token("vision_end_token", "<|vision_end|>"),
        )  # fmt: skip
        self._video = {
            "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "fps": 2,
            "num_frames": None, "do_sample_frames": True, "cap_pixels_per_frame": None, "max_video_tokens": 768,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
            "image_mean": _MEAN, "image_std": _STD,
        } | {key: value for key, value in files.video.items() if value is not None}  # fmt: skip

    def tokens_of_video(self, video: VideoSize) -> ImageTokens:
        """Return the tokens, the patches and the grid of a video."""
        frames = self.frames_of_video(video)
        patch, merge, group = (self._video[key] for key in ("patch_size", "merge_size", "temporal_patch_size"))
        rows, columns, parts = frames.height // patch, frames.width // patch, len(frames.places) // group
        times = np.array(frames.places) / video.fps
        seconds = [(times[at] + times[at + group - 1]) / 2 for at in range(0, len(times), group)]
        start, end = self._around
        text = "".join(f"<{time:.1f} seconds>{start}{self.video_token}{end}" for time in seconds)
        grid = (parts, rows, columns)
        return ImageTokens(text, (rows * columns // merge**2,) * parts, parts * rows * columns, {GRID: grid})

    def frames_of_video(self, video: VideoSize) -> VideoFrames:
        """Return the frames that the processor samples, and their scaled size."""
        settings = self._video
        wanted, count = video.frames, video.frames
        if settings["do_sample_frames"]:
            wanted = settings["num_frames"] or int(video.frames / video.fps * settings["fps"])
            count = min(max(wanted, settings["min_frames"]), settings["max_frames"], video.frames)
            count = wanted if settings["num_frames"] else count
        group = settings["temporal_patch_size"]
        if count < group:
            raise ValueError(f"the processor samples {count} of its {video.frames} frames, and needs {group}")
        places = np.linspace(0, video.frames - 1, count).round().astype(int).tolist()
        height, width = self._scaled(video, count)
        copied = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
        return VideoFrames(
            places + places[-1:] * (-count % group), count, height, width, {key: settings[key] for key in copied},
            count < wanted,
        )  # fmt: skip

    def _scaled(self, video: VideoSize, count: int) -> tuple[int, int]:
        """Return the sides of the scaled frames, of which there are ``count``."""
        settings = self._video
        factor, group = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
        if settings["cap_pixels_per_frame"]:
            cap = min(settings["max_video_tokens"] * factor**2, most // count)
            most = max(cap, int(least * 1.05)) * count
        height, width = video.height, video.width
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        longer, shorter = max(height, width), min(height, width)
        if longer > LONGEST_ASPECT * shorter:
            raise ValueError(f"its sides have a ratio of {longer / shorter:.0f}, more than {LONGEST_ASPECT}")
        sides = round(height / factor) * factor, round(width / factor) * factor
        pixels = round(count / group) * group * sides[0] * sides[1]
        if pixels > most:
            scale = math.sqrt(count * height * width / most)
            return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        if pixels < least:
            scale = math.sqrt(least / (count * height * width))
            return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))
        return sides
