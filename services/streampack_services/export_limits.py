"""Numbers of an export that follow from the user's files: memory, CPUs, disk, and the time that a broker has to end.

The files in ``deploy/`` have the numbers of their examples, each beside its reason. A number is replaced together with
the text around it, which names its process. So a broker's limit cannot become that of the relay or producer beside it.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.service_settings import Retain
from streampack.config.typed_yaml import parse_size
from streampack.core.model.capacity import step_tokens
from streampack_services.broker.memory_peak import peak
from streampack_services.broker.memory_plan import plan

GIB = 1 << 30
COMPILING_BYTES = 512 << 20
"""Memory of the process that compiles kernels: measured when it compiles all of them."""
RELAY_BYTES = 2 * GIB
"""``--memory`` of every exported relay. The limit is 1 GiB more. A full relay took 75 MiB beyond its ``--memory``."""
PROCESS_GIB = 1
"""Memory of one process of a producer, in GiB. It takes 60 MiB, and its tokenizer, row group and chunks."""
END_S = 35
"""Seconds that a broker has beyond ``drain_timeout_s``."""
TRAINER_END_S = 30
"""Seconds that a trainer has before the broker in its Pod must end."""


def limit_gib(config: BrokerConfig) -> int:
    """Return the memory limit of a broker's process in GiB: its peak with the longest samples, plus compilation."""
    return math.ceil((peak(config, plan(config), mean_tokens=None).total + COMPILING_BYTES) / GIB)


def largest_step(config: BrokerConfig) -> int:
    """Return the most bytes of a step's tokens; 0 if each batch has a size of its own."""
    rules = [feed.rules for feed in plan(config).feeds if feed.rules.batch is None]
    return max((step_tokens(stage) * stage.token_bytes for stage in rules), default=0)


def numbers(broker: BrokerConfig | None, producer: ProducerConfig | None, *, in_trainers_pod: bool) -> dict[str, str]:
    """Return the texts with numbers to fill in, by the texts of ``deploy/`` that they replace.

    A broker ``in_trainers_pod``, beside its producers, also maps their shared memory.
    """
    changes: list[tuple[str, str, str | int]] = []
    if broker is not None:
        producers = "ipc://" if in_trainers_pod else "tcp://"
        limit = limit_gib(replace(broker, listen=replace(broker.listen, producers=producers)))
        drain = math.ceil(broker.drain_timeout_s)
        changes += [
            ('&broker {cpu: "2", memory: 3Gi}', "3Gi", f"{limit}Gi"),
            ("&broker-memory 3g", "3g", f"{limit}g"),
            ("512 MiB to compile kernels.\nMemoryMax=3G", "3G", f"{limit}G"),
            ("terminationGracePeriodSeconds: 60", "60", drain + END_S),
            ("terminationGracePeriodSeconds: 90", "90", TRAINER_END_S + drain + END_S),
            ("terminationGracePeriodSeconds\n  value: 90", "90", TRAINER_END_S + drain + END_S),
            ("stop_grace_period: 60s", "60", drain + END_S),
            ("TimeoutStopSec=60", "60", drain + END_S),
            ("drain_timeout_s (25)", "25", f"{broker.drain_timeout_s:g}"),
        ]
        if broker.retain.bytes != Retain().bytes:
            disk = math.ceil(parse_size(broker.retain.bytes, "retain.bytes") * 1.25 / GIB)
            changes += [
                ("storage: 250Gi", "250Gi", f"{disk}Gi"),
                ("retain.bytes (200GiB)", "200GiB", str(broker.retain.bytes)),
            ]
    if producer is not None:
        count = producer.processes
        changes += [
            ('&producer {cpu: "2", memory: 2Gi}', '"2", memory: 2Gi', f'"{count}", memory: {PROCESS_GIB * count}Gi'),
            ("&producer-memory 2g", "2g", f"{PROCESS_GIB * count}g"),
            ("process of producer.yaml.\nMemoryMax=2G", "2G", f"{PROCESS_GIB * count}G"),
        ]
    return {text: text.replace(old, str(new)) for text, old, new in changes}
