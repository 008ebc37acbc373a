"""JAX on packs: ``JAX_NUM_CPU_DEVICES=8 python jax_train.py FOLDER STEPS``, with STREAMPACK_ENDPOINT set.

The data axis of the mesh has all devices of all processes. Every 4 steps, orbax saves the model and the loader's state,
and a later start resumes from them on any number of devices.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import streampack
from streampack.integrations.jax import arrays, mesh_of

folder, steps = Path(sys.argv[1]).resolve(), int(sys.argv[2])
if "JAX_COORDINATOR_ADDRESS" in os.environ:  # on Slurm and on TPU pods, initialize() needs no arguments
    ranks = {"num_processes": int(os.environ["WORLD_SIZE"]), "process_id": int(os.environ["RANK"])}
    jax.distributed.initialize(**ranks)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
by_rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


@partial(jax.jit, out_shardings=everywhere)
def begin():
    shapes = {"embed": (257, 32), "places": (128, 32), "qkv": (32, 96), "out": (32, 257)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    weights = {name: jax.random.normal(keys[name], shape) * 0.1 for name, shape in shapes.items()}
    return {"weights": weights, "momenta": jax.tree.map(jnp.zeros_like, weights)}


def loss_of(weights, batch, num_loss_tokens):
    x = weights["embed"][batch["input_ids"]] + weights["places"][batch["position_ids"]]
    q, k, v = jnp.split((x @ weights["qkv"]).reshape(*x.shape[:2], 2, 48), 3, axis=-1)
    segments = batch["segment_ids"]
    own = segments[:, None, :, None] == segments[:, None, None, :]  # each sample by itself
    x += jax.nn.dot_product_attention(q, k, v, mask=own, is_causal=True).reshape(x.shape)
    log_probs = jax.nn.log_softmax(x @ weights["out"])
    labels = batch["labels"]
    of_tokens = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return -jnp.where(labels >= 0, of_tokens, 0).sum() / num_loss_tokens


@partial(jax.jit, donate_argnums=0)
def update(state, batch, num_loss_tokens):
    loss, gradients = jax.value_and_grad(loss_of)(state["weights"], batch, num_loss_tokens)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], gradients)
    weights = jax.tree.map(lambda w, m: w - 0.5 * m, state["weights"], momenta)
    return {"weights": weights, "momenta": momenta}, loss


state, manager = begin(), ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))
with streampack.connect(format="numpy", mesh=mesh_of(by_rows)) as loader:
    if (last := manager.latest_step()) is not None:
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(state), loader=ocp.args.JsonRestore())
        saved = manager.restore(last, args=parts)
        state = saved["state"]
        loader.load_state_dict(saved["loader"])
    for step in loader.steps():
        state, loss = update(state, arrays(step, by_rows), step.num_loss_tokens)
        if jax.process_index() == 0:
            print(json.dumps({"step": step.index, "loss": loss.item(), "digest": step.digest}), flush=True)
        if (step.index + 1) % 4 == 0:
            model, data = ocp.args.StandardSave(state), ocp.args.JsonSave(loader.state_dict())
            manager.save(step.index, args=ocp.args.Composite(state=model, loader=data))
            manager.wait_until_finished()
            loader.commit(step.index)  # one process is enough
        if step.index + 1 == steps:
            break
manager.close()
