"""What each key of broker.yaml and producer.yaml means, in a line: for ``streampack check``.

By the settings' struct and field; a test sees that none is missing and none is left over.
"""

from __future__ import annotations

MEANINGS: dict[str, dict[str, str]] = {
    "BrokerConfig": {
        "run": "the run's name: peers of another run are turned away",
        "rendezvous": "file where clients and producers find the broker",
        "memory": "the arena: all samples that the broker holds, no more",
        "seed": "order of shards and samples, and where streams begin",
        "merge": "streams take turns by weight and position, or samples are taken as they come",
        "state_dir": "folder of the log: what a killed broker goes on from",
        "durability": "when a record of the log counts: safe from a power cut (os), or from a kill (process)",
        "tokens": "dtype of token ids; uint16 halves every byte",
        "fields": "what samples carry beside their token ids",
        "steps_ahead": "steps formed before the slowest rank has returned the first",
        "drain_timeout_s": "what trainers have, after SIGTERM, to take what is formed",
    },
    "Listen": {
        "producers": "where producers connect",
        "trainers": "where trainers connect",
        "http": "metrics, status and health, and where changes are asked for",
        "control": "who may change a run over http: this machine alone (loopback), or any",
    },
    "PlannedMesh": {
        "dp": "data-parallel ranks, planned; must divide the packs of a step",
        "cp": "context-parallel ranks, planned; alignment follows from it",
        "tp": "tensor-parallel ranks, planned; alignment follows from it",
    },
    "RulesSettings": {
        "packer": "how samples are chosen for a pack",
        "max_samples_per_pack": "a pack with so many takes no more",
        "leftovers": "of modified first fit: how it packs what no large sample took along",
        "micro_batch_size": "of packer none: samples of a pack",
        "budget": "tokens of a pack",
        "shape": "tokens that a pack is delivered with: the budget (fixed), its samples' (exact), or some sizes",
        "overlong": "what happens to samples over the budget",
        "poison": "what happens to samples that cannot be used",
        "tail": "the packs that do not fill the last step: padded with empty ones, or dropped",
        "weight_unit": "what the streams' weights are shares of",
        "between_passes": "passes over the data run into one another, or each is drained into its own last step",
    },
    "Window": {"samples": "samples that the packer looks over"},
    "StepSettings": {"packs": "packs of an optimizer step, over all ranks"},
    "Align": {
        "sample": "each sample is padded to a multiple",
        "pack": "the budget must be a multiple",
    },
    "Sizes": {
        "multiple": "packs are padded to a multiple",
        "buckets": "packs are padded to the first of these that holds them, or the budget",
    },
    "Balance": {
        "kind": "deal packs to ranks by cost, or in order",
        "hidden_size": "of the model: a = 6 * hidden_size, b = 1",
        "a": "a sample of s tokens costs a * s + b * s * s",
        "b": "see a",
    },
    "StreamSettings": {
        "weight": "share, relative to the other streams",
        "passes": "how often its data is gone over",
        "repeat": "gone over for ever",
        "partitions": "parts that producers read, each by one at a time",
        "pushed": "sent once by streampack.Producer; the log keeps it",
        "on_exhaust": "used up, it leaves its place to the others, or the feed ends",
        "overlong": "what happens to its samples over the budget",
        "poison": "what happens to its samples that cannot be used",
    },
    "FieldSettings": {
        "dtype": "of its values",
        "axis": "one value a token, or a sample",
        "shape": "of one value; none: a number",
        "align": "target: belongs to predicting its token, and is shifted with the labels",
        "pad": "its value at padding",
        "default": "its value in samples that come without it; none: such a sample is rejected",
        "cp": "a context-parallel rank gets its slice, or all",
    },
    "FeedSettings": {
        "streams": "what it is a mixture of",
        "merge": "the run's, or its own",
        "on_rewind": "pushed samples since then come again, or are dropped",
        "cp_layout": "what each context-parallel rank gets of a pack",
        "rules": "laid over the run's rules, key by key",
    },
    "Retain": {
        "checkpoints": "committed ones that trainers can go back to",
        "bytes": "beyond it nothing more comes in order of arrival until a checkpoint is committed",
    },
    "Limits": {
        "sample_tokens": "a longer sample is over-long before it is sent",
        "chunk": "bytes of samples in one message",
    },
    "ProducerConfig": {
        "broker": "the producers' endpoint, or file:// and the rendezvous file",
        "processes": "how many read and tokenize; changes speed, never the steps",
    },
    "SourceSettings": {
        "source": "format of the files",
        "shards": "files: a path, pattern or glob, or a list of these",
        "path": "one file, folder, prefix or import path, as it is written",
        "text_key": "where the text is",
        "messages_key": "where the chat is",
        "prompt_key": "where the prompt is",
        "completion_key": "where its answer is",
        "fields": "a declared field's name to its key, where they differ",
        "unit": "what of a text is a sample",
        "tokens_key": "where the ids are",
        "shuffle": "shards and samples in another order in every pass",
    },
    "TokenizerSettings": {
        "name": "bytes, or a callable as package.module:function",
        "append_eos": "each text ends with the end-of-text token",
        "file": "a tokenizer.json, or a folder with one and what belongs to it",
        "eos_token": "ends a text; default: as the tokenizer_config.json beside the file says",
        "bos_token": "begins a text, where given; templates see the one beside the file",
        "chat_template": "a path or the text of one; default: the one beside the file",
        "allow_special": "the text of a special token, in the data, becomes that token",
        "train_on": "what of chats and pairs is learned: answers, or all",
        "date": "what a template that asks for today's date is told",
    },
}
