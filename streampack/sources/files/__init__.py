"""Files: names, sizes and exact reads at an offset, on this machine or at a URL.

- ``byte_source``: what a file is, and an open one.
- ``listing``: from a path or a pattern to a list of files with their sizes; opens one file for reading.
- ``braces``: patterns such as ``{000..127}`` as the paths that they stand for.
- ``local_files``: files of this machine.
- ``remote``: files at URLs, read through fsspec in ranges, with a bounded cache of blocks.
- ``retries``: which failures of requests are tried again, and what is waited for.
- ``contents``: kinds of files by their first bytes: compressed ones, and others that are no text.
- ``joined_file``: several open files as one.
- ``compressed``: a gzip or Zstandard file, read as the plain file in it.
- ``read_bytes``: the bytes that a reference to a media item names.
- ``image_files``: the size of an image from its first bytes, and images that are not used.
- ``video_files``: the size, the rate and the frames of a video.

A path or a pattern becomes a list of ``File`` (name and size), and opening one gives a ``ShardFile`` with exact reads.
A file whose size changes after it was listed raises SourceError. These modules know bytes and offsets. They do not
know samples, formats or the order of samples.
"""
