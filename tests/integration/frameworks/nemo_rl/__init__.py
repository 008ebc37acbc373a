"""NeMo-RL from a checkout: its policy worker on streampack's micro-batches and its own, and the results of that run."""
