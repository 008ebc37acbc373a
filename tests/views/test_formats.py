"""Views: the pack's own values in a framework's words, in the pack's own memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from streampack.core.model.mesh import Mesh
from streampack.errors import UserError
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.views.device import SideStream
from streampack.views.formats import Views, view
from streampack.views.view import View
from tests.packs.cases import Case, attached, cases, equal
from tests.views.shown import TWO, seen, steps_of

IGNORED = -100
HF_KEYS = [
    "input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
]  # fmt: skip
SLABS = Slabs()


def halves(case: Case) -> set[str]:
    return {field.name for field in attached(case).rules.fields if field.dtype == "bfloat16"}


@given(cases())
def test_thd_is_the_pack_with_tensors_for_arrays(case: Case) -> None:
    for step, same in zip(steps_of(case), steps_of(case), strict=True):
        for pack, batch in zip(same, Views("thd", Mesh()).make(step, attached(case).rules), strict=True):
            assert list(batch) == list(pack)
            for name, value in pack.items():
                assert batch[name] is getattr(batch, name)
                if name in halves(case):
                    assert batch[name].dtype == torch.bfloat16
                    assert np.array_equal(batch[name].float().numpy(), value)
                elif isinstance(value, np.ndarray):
                    assert np.array_equal(batch[name].numpy(), value)
                    assert batch[name].numpy().dtype == value.dtype
                else:
                    assert batch[name] == value


@given(cases().filter(lambda case: case.cp == 1))
def test_hf_is_what_a_model_shifts_back_to_the_pack(case: Case) -> None:
    for format in ("hf", "hf_shifted"):
        shown = Views(format, Mesh()).make(steps_of(case)[0], attached(case).rules)
        for pack, batch in zip(steps_of(case)[0], shown, strict=True):
            total = len(pack.input_ids)
            extra = ["shift_labels"] if format == "hf_shifted" else []
            assert list(batch) == [*HF_KEYS[:2], *extra, *HF_KEYS[2:]]
            shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]  # as ForCausalLMLoss
            assert shifted.tolist() == [pack.labels.tolist()]
            assert (batch["labels"][0, pack.cu_seqlens_padded[:-1].astype(np.int64)] == IGNORED).all()
            if extra:
                assert batch["shift_labels"].tolist() == shifted.tolist()
            assert batch["input_ids"].tolist() == [pack.input_ids.tolist()]
            slots = np.diff(pack.cu_seqlens_padded)
            positions = batch["position_ids"].squeeze(-2).tolist()
            if pack.position_ids.ndim == 2:  # three that came with the sample, behind the position in the sample
                places = np.arange(total) - np.repeat(pack.cu_seqlens_padded[:-1], slots)
                assert positions.pop(0) == places.tolist()
            assert positions == pack.position_ids.tolist()
            assert batch["seq_idx"].tolist() == [np.repeat(np.arange(pack.num_segments), slots).tolist()]
            assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == pack.cu_seqlens_padded.tolist()
            assert batch["max_length_q"] == batch["max_length_k"] == slots.max()
            assert all(batch[name].shape == (1, total) for name in ("input_ids", "labels", "seq_idx"))
            # What is no key is there as an attribute, as in thd.
            assert batch.num_loss_tokens == pack.num_loss_tokens
            assert batch.sample_ids.tolist() == pack.sample_ids.tolist()
            assert batch.cu_seqlens.tolist() == pack.cu_seqlens.tolist()
            assert equal(batch.canonical, pack)


def test_padding_counts_in_no_label_of_hf_and_the_tail_is_a_sequence() -> None:
    """Alignment padding goes on with its sample; the tail is a sequence of its own; no label counts in either."""
    first = seen(TWO, "hf")[0]
    assert first["input_ids"].tolist() == [[5, 6, 7, 0, 8, 9, 0, 0, 0, 0, 0, 0]]
    assert first["labels"].tolist() == [[-100, 6, 7, -100, -100, 9, *[-100] * 6]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert first["seq_idx"].tolist() == [[0] * 4 + [1] * 4 + [2] * 4]
    assert first["cu_seq_lens_q"].tolist() == [0, 4, 8, 12]
    assert first["max_length_q"] == 4
    dtypes = {name: value.dtype for name, value in first.items() if isinstance(value, torch.Tensor)}
    wide = dict.fromkeys(("input_ids", "labels", "position_ids"), torch.int64)
    assert dtypes == {**wide, **dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), torch.int32)}


def test_a_tensor_keeps_its_memory_while_a_pack_gives_its_back() -> None:
    slabs = Slabs()
    rules = attached(TWO).rules
    pack = steps_of(TWO, slabs)[0][0]
    kept = view(pack, "hf", rules)["input_ids"]
    place, before = kept.data_ptr(), kept.clone()
    assert place == pack.input_ids.__array_interface__["data"][0], "not copied"
    del pack
    others = [step for _ in range(20) for step in steps_of(Case([[[1] * 12], [[2] * 12]], 4, 12, 1), slabs)]
    assert (kept == before).all()
    assert place not in {batch.input_ids.__array_interface__["data"][0] for step in others for batch in step}
    del kept, others
    again = [steps_of(TWO, slabs)[0] for _ in range(21)]
    assert place in {batch.input_ids.__array_interface__["data"][0] for step in again for batch in step}


def test_packs_of_one_message_may_be_changed_apart() -> None:
    """A backward pass refuses tensors that were changed since it kept them: of this pack, not of another."""
    step = Views("thd", Mesh()).make(steps_of(TWO)[0], attached(TWO).rules)
    weights = torch.ones(2, len(step[0].labels), requires_grad=True)
    for batch in step:
        kept = (weights * batch.labels).sum()
        batch.labels[0] = 3
        batch.position_ids.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
    kept = (weights * step[0].labels).sum()
    step[1].labels[:] = IGNORED
    kept.backward()
    assert weights.grad is not None


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_copied() -> None:
    pack = steps_of(TWO)[0][0]
    pack.input_ids.flags.writeable = False
    found = view(pack, "thd", attached(TWO).rules)["input_ids"]
    assert found.tolist() == pack.input_ids.tolist()
    assert found.data_ptr() != pack.input_ids.__array_interface__["data"][0]


@pytest.mark.parametrize("format", ["thd", "hf"])
def test_a_view_survives_what_loops_do_to_batches(format: str) -> None:
    batch = seen(TWO, format)[0]
    for same in (copy.copy(batch), batch.to("cpu"), batch.to("cpu", non_blocking=True)):
        assert isinstance(same, View)
        assert list(same) == list(batch)
        assert same.num_loss_tokens == batch.num_loss_tokens
        assert same.canonical is batch.canonical
        assert same.input_ids.tolist() == batch.input_ids.tolist()
    plain = View(dict(batch.items()))  # as transformers' _prepare_input makes it
    assert dict(**plain).keys() == batch.keys()
    assert batch != plain
    assert len({batch, plain}) == 2
    with pytest.raises(AttributeError, match=r"got attribute 'attention_mask', expected one of: input_ids"):
        _ = batch.attention_mask


def test_moving_a_view_leaves_ids_with_the_host_and_moves_shared_tensors_once() -> None:
    batch = seen(TWO, "hf")[0]
    moved = batch.to("meta")
    assert {v.device.type for v in moved.values() if isinstance(v, torch.Tensor)} == {"meta"}
    assert moved.cu_seqlens.device.type == "meta"
    assert moved.sample_ids.tolist() == batch.sample_ids.tolist()
    assert moved.slices.tolist() == batch.slices.tolist()
    assert moved["cu_seq_lens_q"] is moved["cu_seq_lens_k"] is moved.cu_seqlens_padded


@pytest.mark.parametrize("format", ["thd", "hf", "hf_shifted", "megatron", "bshd", "torchtitan"])
def test_no_memory_moves_twice_to_a_device(format: str) -> None:
    places = [tensor.data_ptr() for tensor in seen(TWO, format)[0].tensors().values()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("format", ["thd", "hf"])
def test_a_step_is_copied_on_a_side_stream(format: str) -> None:
    """On the CPU, where a copy is the tensor itself and streams do nothing."""
    step = Views(format, Mesh()).make(steps_of(TWO)[0], attached(TWO).rules)
    stream = SideStream(torch.device("cpu"))
    copied = stream.copy(step)
    stream.arrive(copied)
    assert (copied.index, copied.num_loss_tokens, len(copied)) == (step.index, step.num_loss_tokens, len(step))
    for ours, theirs in zip(copied, step, strict=True):
        assert isinstance(ours.copied, torch.cpu.Event)
        assert ours.copied is copied[0].copied
        assert list(ours) == list(theirs)
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert Views(format, Mesh(), "cpu").make(step_of_numpy(), attached(TWO).rules)[0].copied is None, "costs nothing"


def step_of_numpy() -> Step:
    return steps_of(TWO)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "sbhd"}, r"got format 'sbhd', expected one of: thd, hf, hf_shifted, megatron, bshd, torchtitan, p"),
        ({"format": "hf", "mesh": Mesh(cp=2)}, r"got format 'hf' with cp=2 .* Use format='thd'"),
        ({"format": "hf_shifted", "mesh": Mesh(cp=4, cp_rank=1)}, r"got format 'hf_shifted' with cp=4"),
        ({"format": "numpy", "device": "cuda"}, r"got device='cuda' with format 'numpy', expected no device"),
        ({"format": "thd", "device": "toaster"}, r"got device='toaster', which torch cannot use"),
        ({"format": "thd", "device": "meta"}, r"got device='meta', which torch cannot use"),
        ({"format": "thd", "device": 1.5}, r"got device=1\.5, which torch cannot use"),
    ],
)
def test_formats_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Views(**{"mesh": Mesh(), **arguments})


def test_transformers_own_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for none in ("", "0", "1"):
        monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", none)
        Views("hf", Mesh())
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    Views("thd", Mesh())
    with pytest.raises(UserError, match=r"PARALLELISM_CONFIG_CP_SIZE=2, expected no context parallelism"):
        Views("hf", Mesh())


def test_torch_is_the_default_where_it_is_installed_and_imported_only_for_a_view() -> None:
    code = (
        "import sys, streampack, streampack.views.formats as f, streampack.core.model.mesh as m\n"
        "f.Views('numpy', m.Mesh())\n"
        "assert 'torch' not in sys.modules\n"
        "assert f.Views(None, m.Mesh()).format == 'thd'\n"
        "sys.modules['torch'] = None\n"
        "assert f.Views(None, m.Mesh()).format == 'numpy'\n"
        "try: f.Views('hf', m.Mesh())\n"
        "except streampack.StreampackError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert (
        done.stdout
        == "got format 'hf' without torch, expected an installed torch. Run pip install 'streampack[torch]'\n"
    )
