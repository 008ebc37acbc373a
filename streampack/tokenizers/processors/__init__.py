"""Processors of vision-language models: how an image's size becomes tokens, grids and positions.

- ``image_family``: the interface of a family, and the settings in a processor's folder.
- ``qwen_vl``: Qwen2-VL and Qwen2.5-VL. Patches of 14 pixels, and positions in time, height and width.
- ``qwen3_vl``: Qwen3-VL. The same with patches of 16 pixels, and videos.
- ``internvl``: InternVL. Tiles, each of as many tokens.
- ``llava_next``: LLaVA-NeXT. Tiles of one of several sizes, without their padding.
- ``gemma3``: Gemma 3. As many tokens for each image.
- ``paligemma``: PaliGemma. The same, and a question whose tokens see each other.
- ``open_family``: the family of a folder.
- ``image_parts``: the images and videos of a chat's messages, and the places that stand for them.
- ``processor_tokenizer``: a tokenizer of chats with images.

Another family is one file with a subclass of ``ImageFamily``, and a line in ``open_family``. A family knows sizes and
settings. It reads no pixels, and needs neither torch nor transformers. The client decodes images with the processor of
transformers (``streampack.media.processor``).
"""
