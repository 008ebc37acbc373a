"""FLOPs: what training on samples costs, and how well a cost explains the time of steps. It decides nothing.

- ``model_layers``: reads the layers of a model from its configuration, in the words of Hugging Face.
- ``model_flops``: useful FLOPs of samples, and the factors of ``rules.balance`` that follow from the layers.
- ``cost_fit``: fits the factors of a cost to measured step times.

Useful FLOPs are those of real tokens: padding, recomputed activations and masked pairs of tokens count nothing.
"""
