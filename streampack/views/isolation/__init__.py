"""Keep the samples of a pack apart in each call of a transformers model.

- ``hf_isolation``: wraps the calls, and checks their arguments.
- ``hf_dependence``: tests once for each model whether samples of a pack affect each other.
- ``ids_of_packs``: tells token ids of packs from those of one text.
- ``hf_images``: masks for tokens of images, and a check of the shape of images.
"""
