"""The core: events in, effects out. No clock, no I/O, no threads, no randomness, no logging.

The folders stand in the order in which samples pass them:

- ``model``: the data types: samples, fields, steps, rules, snapshots.
- ``columns``: the columns of samples, each declared once.
- ``intake``: the producers' side: leases partitions, and checks and admits samples.
- ``merge``: the order in which the samples of all partitions are taken.
- ``packers``: the choice of samples that share a budget. Packers know only lengths.
- ``form``: FORM, from the window to a step.
- ``deal``: DEAL, from a step to the ranks of a mesh.
- ``trees``: the prefix tree of a group whose samples begin alike.
- ``layout``: the place of each token in a pack, and the rank that holds it.
- ``serve``: the trainers' side: gives ranks to readers, and sends them steps.
- ``feed``: one feed, from the merge to the readers; it owns most of these parts.
- ``journal``: the broker's decisions as records in a log.
- ``protocol``: the messages between peers, and the events and effects of the state machines.
- ``sessions``: the other ends of the protocol: producers and clients.
- ``stats``: counts that decide nothing.
- ``flops``: useful FLOPs of a model, and factors of costs.

The state machine of a broker is in ``broker``, which owns the feeds. ``run_log`` recovers and cuts its log, and
``claims`` checks the keys of its peers. Kernels are compiled in ``jit``, and ``shuffle``
returns orders that are the same on every machine. Begin to read with ``model`` and ``broker``.

The following list shows the path of a chunk's bytes to a pack, function by function. The core returns four effects on
the way (Store, Form, SendShard, Deliver), and the process around the core performs them:

1. Broker process: ``MessageReader._decoded`` decodes a message, ``BrokerService._handle`` gives it to
   ``Broker.handle``.
2. ``intake``: ``Leases.receive``, ``_samples``; ``PartitionAccounts.take``; ``Admission.admit`` asks for **Store**.
   ``Arena.store`` of the services copies the tokens.
3. ``feed`` and ``form``: ``Feed.advance``; ``Planner.fill`` merges (``merge``) and gives the window samples
   (``Former.admit``); ``Former.request`` asks for **Form**. The service runs the packer in a thread
   (``_form_step``). ``Planner.formed`` takes the choice, ``Former.apply`` and ``cut`` make steps of it.
4. ``feed`` and ``serve``: ``Feed._publish``; ``Outbox.hand_out`` waits until the log is safe; ``Readers.add``;
   ``StepSender.serve`` and ``_send_parts`` ask for **SendShard**. ``Arena.gather`` copies what one rank gets.
5. Trainer process: ``client.prefetch`` receives; ``ClientSession.handle``, ``_on_part`` ask for **Deliver**, of a whole
   step; ``packs.build.build_step``. ``Reading.next_pack`` takes it; ``Content.make`` builds the pack when it is read.

To add something:

- A packer: one class, and one entry in ``packers.registry``; ``packers.packer`` has the protocol.
- A file format: one module in ``streampack.sources.formats``, whose docstring lists the steps.
- A metric: its count here, and one declaration in ``streampack_services.broker.status``; ``streampack_services.figure``
  says how.

Ten rules, R1 to R10, keep delivery exactly once; modules cite them by number. ``docs/concepts/exactly-once.md`` defines
each rule, and names a test of ``tests/simulation/test_mutants.py``, which breaks the rule in the code.
"""
