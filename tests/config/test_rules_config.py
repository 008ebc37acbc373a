"""Rules and configuration: a mistake is an error that names the key and says what was expected."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.arena import arena_tokens
from streampack_services.broker.memory_plan import plan

from streampack.config.alignment import PRECISION_TOKENS, AlignSettings, derived_align
from streampack.config.config_files import read_broker, read_either, read_producer
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.typed_yaml import convert, parse_size
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.layout.shards import LAYOUTS
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits, Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin, WeightsRamp
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules, StreamRules, as_recorded
from streampack.core.model.shapes import Sizes
from streampack.core.packers.blocks.first_fit import FirstFitShuffle
from streampack.core.packers.blocks.modified_first_fit import ModifiedFirstFitDecreasing
from streampack.core.packers.blocks.unpacked import Unpacked
from streampack.core.packers.joint.joint import Joint
from streampack.core.packers.joint.joint_bounds import held_tokens
from streampack.errors import ConfigError

# Rules


def test_golden_digests_of_rules_are_held_still() -> None:
    """Runs are recorded under these, and trainers insist on them."""
    assert Rules().digest == GOLDEN_DEFAULT
    full = Rules(
        budget=32768, packs=128, window=4096, packer="sliding_ffd", align=Align(sample=4, pack=64),
        balance=Balance(kind="none", hidden_size=4096), tail="drop", seed=2**61,
        streams=(StreamRules("web", 0.75, 4, overlong="split"), StreamRules("código", 0.25, 1)),
    )  # fmt: skip
    assert full.digest == GOLDEN_FULL


def test_a_rule_left_at_its_default_is_not_in_the_digest() -> None:
    """So a rule that a later version adds leaves the digests of recorded runs as they are."""
    assert msgspec.json.encode(Rules()) == b"{}"
    assert msgspec.json.encode(Rules(streams=(StreamRules("a"),))) == b'{"streams":[{"name":"a"}]}'


GOLDEN_DEFAULT = "2afb9b83f9314e5d029766197f539792"
GOLDEN_FULL = "630942210470ecd38b79696dded4e4db"


PIXELS = Field(name="pixels", dtype="uint8", axis="patch")


RECORDED_BY_0_1 = b'{"budget":8192,"window":1024,"align":{},"balance":{},"streams":[{"name":"a","weight":1.0}]}'


def test_every_rule_changes_the_digest() -> None:
    A, B = StreamRules("a"), StreamRules("b")
    of_a: list[dict[str, Any]] = [
        {"weight": 2.0}, {"partitions": 1}, {"passes": 2}, {"passes": None}, {"overlong": "drop"}, {"poison": "drop"},
        {"no_loss_tokens": "drop"}, {"paused": True},
        {"on_exhaust": "stop"}, {"pushed": True},
    ]  # fmt: skip
    changes: list[dict[str, Any]] = [
        {}, {"budget": 4096}, {"packs": 32}, {"window": 512}, {"packer": "concatenative"}, {"align": Align(pack=2)},
        {"window": "auto"}, {"in_turn": True},
        {"align": Align(sample=2, pack=2)}, {"balance": Balance(kind="none")}, {"balance": Balance(a=1)},
        {"balance": Balance(b=2)}, {"balance": Balance(sliding=(64, 1))},
        {"balance": Balance(hidden_size=4096)}, {"tail": "drop"}, {"tokens": "uint16"},
        {"fields": (Field(name="a", dtype="int8"),)}, {"fields": (Field(name="a", dtype="uint8"),)},
        {"weight_unit": "samples"}, {"merge": "arrival"}, {"between_passes": "drain"},
        {"packer": "concatenative", "max_samples_per_pack": 2}, {"packer": "none", "micro_batch_size": 2},
        {"packer": "modified_first_fit_decreasing", "leftovers": "emptiest"},
        *[{"shape": shape} for shape in ("exact", Sizes(multiple=64), Sizes(buckets=(64,)), Sizes(buckets=(32, 64)))],
        *[{"balance": Balance("joint", group=group, patience=each)} for group, each in ((2, 64), (4, 64), (2, 9))],
        {"batch": Batch()}, {"batch": Batch(samples=4)}, {"batch": Batch(min_samples=2)},
        {"batch": Batch(empty="error")}, {"batch": Batch(micro_batch_multiple=2)},
        {"batch": Batch(min_micro_batches=2)},
        {"batch": Batch(), "packer": "none", "micro_batch_size": 1, "shape": "exact", "padded": True},
        {"batch": Batch(), "packer": "none", "micro_batch_size": 1, "shape": "exact"},
        {"warmup": Warmup(8, 9)}, {"balance": Balance(order="packer")}, {"max_policy_lag": 0}, {"max_policy_lag": 2},
        {"max_policy_lag": 2, "batch": Batch(samples=4), "paces": True}, {"late_timeout_s": 9}, {"seed": 1},
        {"share": "prefix"}, {"media_fields": (PIXELS,)}, {"media_fields": (PIXELS,), "limits": MediaLimits(patches=4)},
        {"media_fields": (PIXELS,), "limits": MediaLimits(items=4)},
        {"media_fields": (PIXELS,), "balance": Balance(patches=(1, 2))},
        {"media_fields": (PIXELS,), "balance": Balance(items=1)},
        {"packs_ramp": Warmup(8, 9)}, {"weights_ramp": WeightsRamp(0, 9, (1.0,))},
        *[{"stages": (Stage(name=name, at=StageBegin(step)),)} for name, step in (("a", 0), ("a", 1), ("b", 0))],
        *[{"streams": streams} for streams in ((A,), (B,), (A, B), (B, A))],
        *[{"streams": (msgspec.structs.replace(A, **change),)} for change in of_a],
    ]  # fmt: skip
    assert {key for change in changes for key in change} == {field.name for field in msgspec.structs.fields(Rules)}
    assert {"name", *(key for change in of_a for key in change)} == set(StreamRules.__struct_fields__)
    assert len({Rules(**change).digest for change in changes}) == len(changes)


def test_a_group_is_the_planned_ranks_where_none_is_given_and_goes_into_the_digest() -> None:
    """FORM never sees the mesh: two runs planned for other ranks are two runs, whatever reads them."""
    text = WEB + "rules: {balance: {kind: joint}, max_samples_per_pack: 7}\nplanned_mesh: {dp: %s}"
    four, eight = (checked(convert(yaml.safe_load(text % dp), BrokerConfig)).plan() for dp in (4, 8))
    assert four.balance == Balance("joint", group=4)
    assert four.new_packer() == Joint(group=4, patience=64, max_samples_per_pack=7)
    assert four.digest != eight.digest == msgspec.structs.replace(four, balance=Balance("joint", group=8)).digest


def test_the_packer_of_rules_has_the_parameters_that_they_name_and_the_run_s_seed() -> None:
    rules = Rules(packer="modified_first_fit_decreasing", leftovers="emptiest", max_samples_per_pack=7)
    assert rules.new_packer() == ModifiedFirstFitDecreasing(max_samples_per_pack=7, leftovers="emptiest")
    assert Rules(packer="first_fit_shuffle", seed=17).new_packer() == FirstFitShuffle(seed=17)
    assert Rules(packer="none").new_packer() == Unpacked(micro_batch_size=1)
    with pytest.raises(
        ValueError,
        match=r"got `leftovers: emptiest` with `packer: none`, expected only these keys: max_samples_per_pack, m",
    ):
        Rules(packer="none", leftovers="emptiest")


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 12))
def test_rules_exist_only_where_their_multiples_fit(budget: int, sample: int, pack: int) -> None:
    align = Align(sample=sample, pack=pack)
    if budget % pack == 0 and pack % sample == 0:
        assert Rules(budget=budget, align=align).align == align
    else:
        with pytest.raises(ValueError, match="expected a multiple"):
            Rules(budget=budget, align=align)


def test_wrong_settings_are_a_value_error_too() -> None:
    """Code that validates settings with ``except ValueError`` catches them."""
    with pytest.raises(ValueError, match=r"rules\.budget") as error:
        checked(convert(yaml.safe_load(WEB + "rules: {budget: -1}"), BrokerConfig))
    assert isinstance(error.value, ConfigError)


def test_a_budget_that_is_no_multiple_is_told_one_that_is() -> None:
    with pytest.raises(ValueError, match=r"got budget 100, expected a multiple of align.pack, 64. Use 64"):
        Rules(budget=100, align=Align(pack=64))
    with pytest.raises(ValueError, match="Use 64"):
        Rules(budget=10, align=Align(pack=64))


def test_a_sample_costs_a_s_and_b_s_squared() -> None:
    slots = np.array([0, 1, 1000])
    assert Balance(a=3, b=2).costs(slots).tolist() == [0, 5, 3000 + 2 * 10**6]
    assert Balance(hidden_size=10, a=3, b=2).costs(slots).tolist() == [0, 61, 60 * 1000 + 10**6]
    assert Balance().costs(slots).tolist() == Balance(hidden_size=4096).costs(slots).tolist()
    dearest = Balance(a=2**32 - 1, b=2**12 - 1).costs(np.array([2**22]))
    assert dearest.tolist() == [2**22 * (2**32 - 1 + (2**12 - 1) * 2**22)], "within 64 bits"


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0), (123, 123), ("123", 123), ("5B", 5), ("1KB", 1000), ("1KiB", 1024), ("1.5KiB", 1536),
        (" 2 MiB ", 2 << 20), ("16GiB", 16 << 30), ("500MB", 500 * 10**6), ("1TiB", 1 << 40), ("0.5GB", 5 * 10**8),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text, "memory") == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", -1, "1e9", "1 Mb", "1kib", "1,5GiB", "1GiB2", "0x10", "1.", ".5GiB", "١GiB", "inf", "nan"],
)
def test_a_value_that_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(
        ConfigError, match=r"^limits.chunk: got .*, expected a size such as 16GiB or 500MB(\. Write 1[MK]iB)?$"
    ):
        parse_size(text, "limits.chunk")


@pytest.mark.parametrize("text", ["9" * 400, "9999999TiB", 2**63])
def test_a_size_that_nobody_has_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"^memory: got \d+(TiB)?, expected at most"):
        parse_size(text, "memory")


# Files


def refusal(path: Path, text: str) -> str:
    file = path / "broker.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_broker(file)
    return str(error.value).removeprefix(f"{file}: ")


WEB = "streams: {web: {}}\n"
TWO = "streams: {a: {}, b: {}}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # keys
        ("", "got no key 'streams', which is required. Add the key"),
        (WEB + "bogus: 1", "got the unknown key 'bogus', expected one of: run, listen,"),
        (WEB + "rules: {windw: {}}", "rules: got the unknown key 'windw', expected one of: packer, "),
        (
            WEB + "rules: {align: {smaple: 4}}",
            "rules.align: got the unknown key 'smaple', expected one of: sample, pack, lcm. Did you mean 'sample'?",
        ),
        ("streams: {a: {}, web: {weigth: 1}}", "streams.web: got the unknown key 'weigth', expected one of: weight, "),
        # keys that are there twice
        (
            WEB + "rules: {}\nstreams: {code: {}}",
            "streams: got this key twice, in lines 1 and 3, expected each key once",
        ),
        (
            "streams: {a: {}, web: {weight: 2,\n  weight: 3}}",
            "streams.web.weight: got this key twice, in lines 1 and 2,",
        ),
        # types
        (WEB + "rules: {budget: 8k}", "rules.budget: got '8k', expected a whole number"),
        (WEB + "rules: {budget: 8.5}", "rules.budget: got 8.5, expected a whole number"),
        (WEB + "memory: true", "memory: got true, expected a whole number or text"),
        (WEB + "listen: {http: 7400}", "listen.http: got 7400, expected text such as 127.0.0.1:7400"),
        (
            WEB + 'listen: {producers: "0.0.0.0:7401"}',
            "listen.producers: got endpoint '0.0.0.0:7401', expected tcp://host:port or ipc:///path/of/a/socket. Did",
        ),
        (WEB + "listen: {trainers: 7402}", "listen.trainers: got 7402, expected text such as tcp://0.0.0.0:7402"),
        (WEB + "run: 5", "run: got 5, expected text. Put the value in quotes"),
        ("streams: [web]", "streams: got a list, expected a mapping"),
        ("streams: {a: {}, web: null}", "streams.web: got nothing, expected a mapping"),
        ("streams: {1: {}}", "streams: a key: got a whole number, expected text. Put the value in quotes"),
        ("just text", "got 'just text', expected a mapping"),
        # bounds
        (WEB + "rules: {budget: 0}", "rules.budget: got 0, expected a whole number >= 1"),
        (WEB + "rules: {align: {pack: 0}}", "rules.align.pack: got 0, expected a whole number >= 1"),
        (
            WEB + "rules: {balance: {a: 4294967296}}",
            "rules.balance.a: got 4294967296, expected a whole number <= 429496",
        ),
        (WEB + "rules: {balance: {b: 4096}}", "rules.balance.b: got 4096, expected a whole number <= 4095"),
        (WEB + "rules: {balance: {kind: joint, group: 0}}", "rules.balance.group: got 0, expected a whole number >= 1"),
        (
            WEB + "rules: {balance: {patience: 9}}",
            "rules.balance: got `patience: 9` with `kind: deal`, expected this key only with `kind: joint`",
        ),
        (
            WEB + "rules: {balance: {kind: joint, group: 3}, step: {packs: 8}}",
            "rules: got `balance.group: 3` with 8 packs per step, expected a divisor of 8",
        ),
        (
            WEB + "planned_mesh: {dp: 3}\nrules: {balance: {kind: joint}, step: {packs: 8}}",
            "rules: got `balance.group: 3` with 8 packs per step, expected a divisor of 8. The default of",
        ),
        (
            WEB + "rules: {balance: {kind: joint}, packer: none}",
            "rules: got `balance.kind: joint` with `packer: none`, expected `packer: exact_fill`",
        ),
        (
            WEB + "rules: {balance: {kind: joint}, leftovers: emptiest}",
            "rules: got `leftovers: emptiest` with `balance.kind: joint`, expected only these keys: max_",
        ),
        (
            WEB + "rules: {balance: {kind: joint}, budget: 16777216}",
            "rules: got a budget of 16777216 times align.sample, expected less than 16777216",
        ),
        (
            WEB + "rules: {budget: 268435456, align: {sample: 2, pack: 2}}",
            "rules: got a budget of 134217728 times align.sample, expected less than 134217728 times with `packer: e",
        ),
        (WEB + "steps_ahead: 65", "steps_ahead: got 65, expected a whole number <= 64"),
        (WEB + "seed: -1", "seed: got -1, expected a whole number >= 0"),
        ("streams: {}", "streams: got {}, expected a mapping of length >= 1"),
        ("streams: {'': {}}", "streams: a key: expected text of length >= 1"),
        ("streams: {web: {partitions: 4097}}", "streams.web.partitions: got 4097, expected a whole number <= 4096"),
        ("streams: {web: {weight: 0}}", "streams.web.weight: got 0, expected a number > 0.0"),
        ("streams: {web: {weight: .nan}}", "streams.web.weight: got nan, expected a number > 0.0"),
        ("streams: {web: {weight: .inf}}", "streams.web.weight: got inf, expected a number <= 1000000000.0"),
        # choices
        (WEB + "tokens: int8", "tokens: got 'int8', expected one of: uint16, int32"),
        (
            WEB + "rules: {packer: concatenative, leftovers: emptiest}",
            "rules: got `leftovers: emptiest` with `packer: concatenative`, expected only these keys: max_sample",
        ),
        (WEB + "rules: {packer: best}", "rules.packer: got 'best', expected one of: exact_fill, sliding_ffd,"),
        (WEB + "rules: {overlong: cut}", "rules.overlong: got 'cut', expected one of: error, drop, truncate, split"),
        (WEB + "feeds: {train: {cp_layout: ring}}", "feeds.train.cp_layout: got 'ring', expected one of: zigzag,"),
        # what contradicts itself
        (
            WEB + "rules: {budget: 10, align: {sample: 4, pack: 8}}",
            "rules: got budget 10, expected a multiple of align.pack, 8",
        ),
        (
            WEB + "rules: {align: {sample: 3, pack: 8}}",
            "rules: got align.pack 8, expected a multiple of align.sample, 3",
        ),
        (WEB + "planned_mesh: {cp: 3}", "rules: got budget 8192, expected a multiple of align.pack, 6. Use 8190"),
        (
            WEB + "planned_mesh: {dp: 7}",
            "planned_mesh.dp: got 7, expected a divisor of 64, the number of packs in a step",
        ),
        # shapes
        (WEB + "rules: {shape: round}", "rules.shape: got 'round', expected one of: fixed, exact"),
        (WEB + "rules: {shape: 5}", "rules.shape: got 5, expected text or a mapping"),
        (
            WEB + "rules: {shape: {mutiple: 8}}",
            "rules.shape: got the unknown key 'mutiple', expected one of: multiple, buckets. Did you mean 'multiple'?",
        ),
        (
            WEB + "rules: {shape: {}}",
            "rules.shape: got neither of multiple and buckets, expected exactly one of the two keys",
        ),
        (
            WEB + "rules: {shape: {multiple: 8, buckets: [8]}}",
            "rules.shape: got both of multiple and buckets, ex",
        ),
        (
            WEB + "rules: {shape: {multiple: 48}}",
            "rules: got shape.multiple 48, expected a multiple of align.pack (1)",
        ),
        (
            WEB + "rules: {shape: {buckets: [8, 4]}}",
            "rules: got shape.buckets [8, 4], expected ascending multiples of",
        ),
        (
            WEB + "rules: {shape: {buckets: [8193]}}",
            "rules: got shape.buckets [8193], expected ascending multiples of",
        ),
        (
            WEB + "rules: {shape: {multiple: 64}}\nplanned_mesh: {cp: 64}",
            "rules: got shape.multiple 64, expected a multiple of align.pack (128) that divides the budget (8192)",
        ),
        # feeds
        (
            WEB + "feeds: {a: {}, b: {}}",
            "feeds.a.streams: got no streams, expected some of web. If there are several feeds",
        ),
        (WEB + "feeds: {train: {streams: [web, code]}}", "feeds.train.streams: got 'code', expected one of: web"),
        (
            TWO + "feeds: {x: {streams: [a, b]}, y: {streams: [b]}}",
            "feeds.y.streams: got 'b', which feed 'x' also lists,",
        ),
        (
            TWO + "feeds: {x: {streams: [a]}}",
            "streams.b: got a stream that no feed lists",
        ),
        (WEB + "feeds: {}", "feeds: got {}, expected a mapping of length >= 1"),
        (
            WEB + "feeds: {x: {rules: {step: {pack: 2}}}}",
            "feeds.x.rules.step: got the unknown key 'pack', expected one of: p",
        ),
        (
            WEB + "feeds: {x: {rules: {sept: {}}}}",
            "feeds.x.rules: got the unknown key 'sept', expected one of: packer, ",
        ),
        (WEB + "feeds: {x: {rules: {budget: 8k}}}", "feeds.x.rules.budget: got '8k', expected a whole number"),
        (
            WEB + "feeds: {x: {rules: {budget: 9, align: {pack: 2}}}}",
            "feeds.x.rules: got budget 9, expected a multiple of align.pack, 2",
        ),
        ("streams: {a: {}, b: {weight: 1.0e-5}}", "streams.b.weight: got 1e-05, expected at least 0.000244141"),
        (
            "streams: {b: {repeat: true, on_exhaust: stop}}",
            "streams.b: got `repeat: true` and `on_exhaust: stop`, expected",
        ),
        ("streams: {b: {on_exhaust: end}}", "streams.b.on_exhaust: got 'end', expected one of: renormalise, stop"),
        (WEB + "rules: {between_passes: end}", "rules.between_passes: got 'end', expected one of: continue, drain"),
        (WEB + "rules: {weight_unit: bytes}", "rules.weight_unit: got 'bytes', expected one of: tokens, samples"),
        ("streams: {b: {overlong: cut}}", "streams.b.overlong: got 'cut', expected one of: error, drop, truncate,"),
        (
            "streams: {a: {}, b: {repeat: true, passes: 3}}",
            "streams.b: got `repeat: true` and `passes: 3`, expected only one",
        ),
        # sizes
        (WEB + "memory: lots", "memory: got 'lots', expected a size such as 16GiB or 500MB"),
        (WEB + "limits: {chunk: 1 Mb}", "limits.chunk: got '1 Mb', expected a size such as 16GiB or 500MB"),
        (WEB + "limits: {chunk: 257MiB}", "limits.chunk: got 257MiB, expected at most 256MiB"),
        # YAML
        ("streams: {", "got text that is not valid YAML:"),
        ("streams:\n\t- a", "got a tab at the beginning of line 2, expected spaces. YAML allows no tabs there"),
        ("run: [", "got text that is not valid YAML:"),
    ],
)
def test_a_mistake_names_its_key_and_what_was_expected(tmp_path: Path, text: str, said: str) -> None:
    found = refusal(tmp_path, text)
    assert found.startswith(said)
    assert "\n" not in found


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for read in (read_broker, read_producer, read_either):
        with pytest.raises(ConfigError, match=r"absent.yaml: cannot be read: No such file"):
            read(tmp_path / "absent.yaml")
        with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
            read(tmp_path)


def test_a_producer_s_mistake_is_named_too(tmp_path: Path) -> None:
    file = tmp_path / "producer.yaml"
    file.write_text("streams: {web: {source: jsonl, shards: a.jsonl}, code: {source: zip, shards: b}}")
    with pytest.raises(ConfigError, match=r"producer.yaml: streams.code.source: got 'zip', expected one of: "):
        read_producer(file)
    file.write_text("streams: {web: {source: jsonl, shards: a.jsonl}}\nprocesses: 0")
    with pytest.raises(ConfigError, match=r"producer.yaml: processes: got 0, expected a whole number >= 1"):
        read_either(file)


# What a good file means


def test_a_file_is_known_by_its_streams(tmp_path: Path) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(WEB)
    assert isinstance(read_either(file), BrokerConfig)
    file.write_text("streams: {web: {source: jsonl, shards: a.jsonl}}")
    assert isinstance(read_either(file), ProducerConfig)


def broker(**tree: Any) -> BrokerConfig:
    return checked(convert({"streams": {"web": {}}, **tree}, BrokerConfig))


def test_the_largest_chunk_and_a_repeated_stream_of_one_pass_are_good() -> None:
    assert broker(limits={"chunk": "256MiB"}, streams={"web": {"repeat": True, "passes": 1}}).streams["web"].repeat


@pytest.mark.parametrize(
    ("mesh", "align"),
    [({}, 1), ({"cp": 2}, 4), ({"cp": 4}, 8), ({"tp": 4}, 4), ({"cp": 2, "tp": 2}, 8), ({"dp": 8}, 1)],
)
def test_the_alignment_is_derived_from_the_planned_mesh(mesh: dict[str, int], align: int) -> None:
    assert broker(planned_mesh=mesh).plan().align == Align(sample=align, pack=align)


@pytest.mark.parametrize(
    ("mesh", "more", "sample", "pack"),
    [
        # NeMo-RL's 128, 32 and 16 times the mesh's own
        ({}, {"precision": "fp8"}, 1, 16),
        ({"cp": 2}, {"precision": "mxfp8"}, 4, 128),
        ({"cp": 2, "tp": 2}, {"precision": "fp8_blockwise"}, 8, 1024),
        # 2 * cp alone, the pack carrying tp
        ({"cp": 2, "tp": 8}, {"rules": {"align": {"sample": "tight"}}}, 4, 16),
        ({"cp": 4, "tp": 2}, {"rules": {"align": {"sample": "tight"}}}, 8, 8),
        ({"tp": 4}, {"rules": {"align": {"sample": "tight"}}}, 1, 4),
        ({"cp": 2, "tp": 8}, {"rules": {"align": {"sample": "tight"}}, "precision": "mxfp8"}, 4, 512),
        # ROLL's lcm with 16
        ({"cp": 2}, {"rules": {"align": {"lcm": 16}}}, 16, 16),
        ({"cp": 2, "tp": 8}, {"rules": {"align": {"sample": "tight", "lcm": 16}}}, 16, 16),
        # what is not given follows
        ({"cp": 2}, {"rules": {"align": {"pack": 64}}}, 4, 64),
        ({"cp": 2}, {"rules": {"align": {"sample": 8}}}, 8, 8),
        ({"cp": 2}, {"rules": {"align": {"sample": 8, "lcm": 32}}, "precision": "fp8"}, 32, 64),
        # layouts that cut the pack as one
        ({"cp": 4, "tp": 2}, {"feeds": {"train": {"cp_layout": "contiguous"}}, "precision": "fp8"}, 1, 128),
    ],
)
def test_the_alignment_follows_from_mesh_and_precision(
    mesh: dict[str, int], more: dict[str, Any], sample: int, pack: int
) -> None:
    assert broker(planned_mesh=mesh, **more).plan().align == Align(sample=sample, pack=pack)


@given(
    st.integers(1, 8), st.integers(1, 8), st.sampled_from(LAYOUTS), st.sampled_from([*PRECISION_TOKENS]),
    st.sampled_from(["tight", None, 48]), st.integers(1, 40),
)  # fmt: skip
def test_derived_rules_suit_the_mesh_and_every_rank_s_products(
    cp: int, tp: int, layout: str, precision: Any, sample: Any, multiple: int
) -> None:
    if sample == 48 and layout == "zigzag":
        sample = 2 * cp * 3
    align = derived_align(cp, tp, layout, precision, AlignSettings(sample=sample, lcm=multiple))
    rules = Rules(budget=align.pack, align=align, shape="exact")
    assert mesh_refusal(Mesh(cp=cp), rules, layout) == ""
    assert align.sample % multiple == 0
    assert align.pack % (cp * tp * PRECISION_TOKENS[precision]) == 0, "each rank's tokens are whole blocks"


def test_a_planned_mesh_that_the_alignment_does_not_suit_is_refused_naming_both() -> None:
    said = r"planned_mesh: got cp=4 with align.sample=4 and align.pack=8, expected multiples of 2 \* cp = 8"
    with pytest.raises(ConfigError, match=said):
        broker(planned_mesh={"cp": 4}, rules={"align": {"sample": 4, "pack": 8}})


def test_an_alignment_that_is_given_is_kept() -> None:
    given_align = {"sample": 16, "pack": 128}
    assert broker(planned_mesh={"cp": 2}, rules={"align": given_align}).plan().align == Align(**given_align)


def test_digests_of_runs_that_0_1_began_are_those_of_0_1() -> None:
    """Their snapshots and checkpoints name them."""
    assert broker(rules={"step": {"samples": 8}}, streams={"a": {}}).plan().digest == "cc8290bc44acf69390852bcab1c6ab3c"
    by_hand = broker(rules={"window": {"samples": 1024}, "in_turn": False}, streams={"a": {}})
    assert by_hand.plan().digest == "518ad3a73ce3704eea52ed62aeb6e7b9"
    recorded = msgspec.json.decode(RECORDED_BY_0_1, type=Rules)
    assert as_recorded(broker(streams={"a": {}}).plan(), recorded).digest == "518ad3a73ce3704eea52ed62aeb6e7b9"


def test_the_rules_are_those_of_the_file() -> None:
    found = broker(
        seed=5, streams={"b": {"weight": 2, "partitions": 3}, "a": {}},
        rules={"budget": 4096, "window": {"samples": 7}, "step": {"packs": 9}, "packer": "concatenative",
               "max_samples_per_pack": 5,
               "balance": {"kind": "none"}, "overlong": "split", "tail": "drop"},
    ).plan()  # fmt: skip
    assert found == Rules(
        budget=4096, window=7, packs=9, packer="concatenative", max_samples_per_pack=5, balance=Balance(kind="none"),
        tail="drop", seed=5, streams=(StreamRules("b", 2.0, 3, overlong="split"), StreamRules("a", overlong="split")),
    )  # fmt: skip
    assert found.digest != broker(seed=6).plan().digest


def test_a_stream_s_policies_stand_before_those_of_all() -> None:
    found = broker(
        streams={"a": {"overlong": "split", "on_exhaust": "stop"}, "b": {"poison": "error"}, "c": {"repeat": True}},
        rules={"overlong": "drop", "poison": "drop", "weight_unit": "samples", "between_passes": "drain"},
    ).plan()
    assert [(s.overlong, s.poison, s.on_exhaust, s.passes) for s in found.streams] == [
        ("split", "drop", "stop", 1), ("drop", "error", "renormalise", 1), ("drop", "drop", "renormalise", None),
    ]  # fmt: skip
    assert (found.weight_unit, found.between_passes) == ("samples", "drain")


def test_a_run_s_number_is_held_still() -> None:
    assert broker(run="streampack").run_id == GOLDEN_RUN
    assert broker(run="other").run_id != GOLDEN_RUN


GOLDEN_RUN = 0xBA7D1E0C14C2C0


# Fields


def declared(**fields: Any) -> tuple[Field, ...]:
    return broker(fields=fields).plan().fields


def test_fields_with_a_meaning_need_no_more_than_their_names() -> None:
    assert declared(loss_mask={}, labels={}, position_ids={"shape": [3]}) == (
        Field(name="loss_mask", dtype="uint8", align="target"),
        Field(name="labels", dtype="int32", align="target", pad=-100),
        Field(name="position_ids", dtype="int32", shape=(3,)),
    )
    assert declared(loss_mask={"dtype": "bool"})[0].dtype == "bool"
    assert declared(group={}, policy_version={"default": 0}) == (
        Field(name="group", dtype="int64", axis="sample", default=-1),
        Field(name="policy_version", dtype="int64", axis="sample", default=0),
    )
    two = broker(
        fields={"routes": {"dtype": "int16", "shape": [4, 2]}, "reward": {"dtype": "float32", "axis": "sample"}}
    )
    assert two.plan().token_bytes == 4 + 16
    assert two.plan().digest != broker().plan().digest


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        (
            "image",
            {"dtype": "uint8", "axis": "patch", "late": True},
            "got `default`, `pad` or `late` with `axis: pat",
        ),
        ("image", {"dtype": "uint8", "axis": "item", "default": 0}, "A sample without the field has no media"),
        ("mark", {"dtype": "uint8", "placeholder": {"tokens": [7]}}, "got `placeholder` with `axis: token`"),
        ("image", {"dtype": "uint8", "axis": "item", "cp": "replicate"}, "got `align` or `cp` with `axis: item`"),
        (
            "image",
            {"dtype": "uint8", "axis": "patch", "shape": [2**17]},
            "bytes per patch, expected at most 65536",
        ),
        ("a", {}, "fields.a: got a field without `dtype`, expected one of: bool, uint8"),
        (
            "input_ids",
            {"dtype": "int32"},
            "got the name 'input_ids', expected another name, because packs have their own",
        ),
        ("a b", {"dtype": "int8"}, "it is not an identifier"),
        ("a", {"dtype": "int8", "pad": 128}, "got the value 128, expected a value of dtype int8"),
        ("a", {"dtype": "int8", "default": 0.5}, "got the value 0.5, expected a value of dtype int8"),
        (
            "a",
            {"dtype": "int8", "axis": "sample", "cp": "replicate"},
            "got `align` or `cp` with `axis: sample`, expected neither",
        ),
        ("a", {"dtype": "float64", "shape": [1024]}, "got 8192 bytes per token, expected at most 4096"),
        ("loss_mask", {"dtype": "float32"}, "got loss_mask with dtype float32 and pad "),
        ("loss_mask", {"cp": "replicate"}, "got `cp: replicate` for loss_mask, expected `cp: slice`"),
        ("labels", {"pad": 0}, "got pad 0 for labels, expected -100"),
        ("labels", {"align": "token"}, "expected `axis: token`, `align: target` and no shape"),
        (
            "position_ids",
            {"shape": [2]},
            r"expected an integer dtype, `axis: token`, `align: token`, and no shape or shape \[3\]",
        ),
    ],
)
def test_a_field_that_cannot_be_is_named(name: str, field: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        declared(**{name: field})


def test_too_many_bytes_a_sample_are_refused() -> None:
    wide = {"dtype": "float64", "axis": "sample", "shape": [128]}
    assert len(declared(a=wide)) == 1
    with pytest.raises(
        ConfigError, match="got 2048 bytes per sample in fields with `axis: sample`, expected at most 1024"
    ):
        declared(a=wide, b=wide)


@pytest.mark.parametrize(
    ("layout", "mesh", "align"),
    [
        ("zigzag", {"cp": 2, "tp": 4}, Align(sample=16, pack=16)), ("whole", {"cp": 2}, Align(sample=4, pack=4)),
        ("zigzag_pack", {"cp": 4}, Align(pack=8)), ("contiguous", {"cp": 4, "tp": 2}, Align(pack=8)),
        ("contiguous", {"tp": 2}, Align(pack=2)),
    ],
)  # fmt: skip
def test_layouts_that_cut_the_pack_as_one_ask_nothing_of_samples(
    layout: str, mesh: dict[str, int], align: Align
) -> None:
    assert broker(planned_mesh=mesh, feeds={"train": {"cp_layout": layout}}).plan().align == align


def test_a_feed_has_its_streams_and_the_runs_rules_with_its_own_laid_over_them() -> None:
    tree = {
        "rules": {"budget": 512, "step": {"packs": 8}, "balance": {"kind": "none", "a": 5}},
        "streams": {"val": {}, "web": {"repeat": True}, "code": {}},
        "feeds": {
            "train": {"streams": ["code", "web"]},
            "valid": {"streams": ["val"], "rules": {"step": {"packs": 2}, "balance": {"a": 7}}},
        },
    }
    config = checked(convert(tree, BrokerConfig))
    train, valid = config.plan("train"), config.plan("valid")
    assert [stream.name for stream in train.streams] == ["web", "code"], "in the order of the run's streams"
    assert [stream.name for stream in valid.streams] == ["val"]
    assert (train.packs, valid.packs, train.budget, valid.budget) == (8, 2, 512, 512)
    assert (valid.balance.kind, valid.balance.a) == ("none", 7)
    assert (train.finite, valid.finite) == (False, True)


def test_memory_is_shared_out_so_that_every_feed_can_always_make_a_step() -> None:
    rules = {"budget": 512, "window": {"samples": 64}, "step": {"packs": 8}}
    tree = {
        "memory": "64MiB", "limits": {"sample_tokens": 4096, "chunk": "64KiB"}, "rules": rules,
        "streams": {"web": {}, "val": {"partitions": 1}},
        "feeds": {"train": {"streams": ["web"]}, "valid": {"streams": ["val"], "rules": {"step": {"packs": 64}}}},
    }  # fmt: skip
    found = plan(checked(convert(tree, BrokerConfig)))
    for feed in found.feeds:
        assert feed.merged_tokens >= needed_tokens(feed.rules, found.capacity.max_sample_tokens)
    held = sum(feed.merged_tokens for feed in found.feeds) + 5 * found.capacity.quota_tokens
    assert held <= arena_tokens(found.memory_bytes, found.token_bytes, found.block_tokens)
    joint = {"kind": "joint", "group": 4}
    more = plan(checked(convert(tree | {"rules": {**rules, "balance": joint}}, BrokerConfig)))
    train = more.feeds[0]
    held = held_tokens(512, 4, 64)
    assert train.merged_tokens >= held + 2 * 8 * 512 + more.capacity.max_sample_tokens
    assert needed_tokens(train.rules, 0) == held + 2 * 8 * 512 > needed_tokens(found.feeds[0].rules, 0)
    with pytest.raises(
        ConfigError, match=r"memory: got 1MiB, .*8 packs of .* in each step .*and a window of 64 .* 64 packs"
    ):
        plan(checked(convert(tree | {"memory": "1MiB"}, BrokerConfig)))
