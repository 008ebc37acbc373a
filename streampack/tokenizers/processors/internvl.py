"""InternVL: an image is cut into tiles of one size, and each tile becomes as many tokens.

The grid of tiles is the one whose ratio of sides is closest to that of the image. An image of several tiles gets one
more, of the whole image. (transformers 5, ``get_optimal_tiled_canvas`` of image_processing_got_ocr2)
"""

from __future__ import annotations

from streampack.tokenizers.processors.image_family import ImageFamily, ImageTokens, ProcessorFiles


class InternVL(ImageFamily):
    """Tiles, each a row of pixel values."""

    classes = ("InternVLProcessor",)

    def __init__(self, files: ProcessorFiles) -> None:
        self.placeholder = self.token = files.token("context_image_token", "<IMG_CONTEXT>")
        start, end = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")
        self.options = {"crop_to_patches": True}  # whatever the folder says
        self._text = f"{start}{self.token}{end}"
        self._length = int(files.processor.get("image_seq_length") or 256)
        least, most = files.number("min_patches", 1), files.number("max_patches", 12)
        size = files.image.get("size") or {"height": 384, "width": 384}
        self._tile = int(size["height"]), int(size["width"])
        sides = range(1, most + 1)
        grids = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
        self._grids = sorted(grids, key=lambda grid: grid[0] * grid[1]) if most > 1 else [(1, 1)]

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return the tokens and tiles of an image."""
        tiles = self._tiles(height, width)
        return ImageTokens(self._text, (self._length * tiles,), tiles)

    def _tiles(self, height: int, width: int) -> int:
        """Return the number of tiles."""
        best, least, (tile_height, tile_width) = (1, 1), float("inf"), self._tile
        for columns, rows in self._grids:
            off = abs(width / height - columns / rows)
            # Between grids that are equally close, the one with more tiles, if the image has half of their pixels.
            is_filled = height * width > 0.5 * tile_height * tile_width * columns * rows
            if off < least or (off == least and is_filled):
                best, least = (columns, rows), off
        count = best[0] * best[1]
        return count if count == 1 else count + 1
