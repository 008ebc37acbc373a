"""JAX: the example of its page on several meshes of CPU devices, and what the adapter refuses.

- ``jax_processes``: the program that runs the example in processes, and has them killed.
"""
