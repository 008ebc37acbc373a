"""Kernels come in the background: steps do not depend on which form ran, nor on when it came."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.jit import Kernel, _example, kernel, key_of
from streampack.core.merge.entries import Entries
from streampack.core.merge.schedule import Merge

STEPS = """
import hashlib, sys, time
import streampack
from streampack.core.packers.exact_fill import exact_fill_kernels
from streampack.kernels import background

until_compiled = "wait" in sys.argv
texts = [f"text {n}: " + "word " * (n * 7 % 150) for n in range(400)]
digest = hashlib.sha256()
with streampack.local(texts, budget=1024, packs=2, format="numpy", repeat=True) as loader:
    for step in loader.steps():
        for pack in step:
            digest.update(pack.input_ids.tobytes() + pack.labels.tobytes() + pack.position_ids.tobytes())
        if step.index == 99 and until_compiled:
            background.compiler.wait()
        if step.index == 199:
            break
helper = background.compiler._helper
print(digest.hexdigest(), exact_fill_kernels.exact_fill.is_compiled, helper._process.pid if helper else 0)
"""


def steps(tmp_path: Path, *words: str, **environment: str) -> list[str]:
    """Run 200 steps in a process of its own; return their digest, and whether the packer was compiled at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", STEPS, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        found = process.stdout.read().split()
        assert found, process.stderr.read()
    if found[2] != "0":
        with contextlib.suppress(ProcessLookupError):  # the helper goes on compiling
            os.kill(int(found[2]), signal.SIGKILL)
    return found[:2]


def test_steps_are_the_same_with_kernels_absent_compiling_and_present(tmp_path: Path) -> None:
    absent = steps(tmp_path, NUMBA_DISABLE_JIT="1")
    compiling = steps(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    present = steps(tmp_path, "wait")
    assert absent[0] == compiling[0] == present[0]
    assert [absent[1], present[1]] == ["False", "True"]


def test_a_machine_without_a_folder_for_kernels_says_so_once(tmp_path: Path) -> None:
    """A read-only installation and no home. A folder of the process takes the place."""
    code = (
        "import numba.core.caching as caching, numba\n"
        "caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]\n"
        "import streampack.core.jit as jit, numpy as np\n"
        "from streampack.kernels import background\n"
        "from streampack.core.form.form_kernels import take_out\n"
        "from streampack.core.merge.merge_kernels import drop_first\n"
        "background.start()\n"
        "try:\n    take_out(*12 * [np.zeros(1, np.int64)])\nexcept Exception:\n    pass\n"
        "print(background.compiler.wait(200), background.compiler._folder > '')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
        env={name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"},
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert done.stderr.count("Set NUMBA_CACHE_DIR to a folder that this user can write") == 1


FAULTS = """
import os, pathlib, signal, sys, threading, time
import numpy as np
from streampack.core.deal.balanced_kernels import difference
from streampack.core.jit import Kernel
from streampack.kernels import background

sys.path.append(pathlib.Path("/nowhere"))  # some programs do
background.start()
first = difference(np.array([5, 4, 3]), 2, 1)
while (helper := background.compiler._helper) is None:
    time.sleep(0.01)
assert os.getpgid(helper._process.pid) != os.getpgid(0), "Ctrl-C is for the parent"
os.kill(helper._process.pid, signal.SIGKILL)
assert background.compiler.wait(100)
assert difference.is_compiled
assert str(first) == str(difference(np.array([5, 4, 3]), 2, 1))
threads = []
compile = Kernel.compile

def noted(*args):
    threads.append(threading.current_thread().name)
    compile(*args)

Kernel.compile = noted
assert str(first) == str(difference(np.array([5, 4, 3], np.int32), 2, 1)), "other types"
assert background.compiler.wait(100)
assert str(first) == str(difference(np.array([5, 4, 3], np.int32), 2, 1))
print(len(difference.signatures), set(threads))
"""


def test_a_helper_that_is_killed_delays_a_kernel_at_most(tmp_path: Path) -> None:
    """Also with a start file that prints, and if other types come when the kernel is compiled."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello from site')")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", FAULTS], capture_output=True, text=True, timeout=300,
        check=False,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["hello from site", "2 {'streampack-kernels'}"], done.stderr
    assert done.stderr.count("failed for difference: the process has ended") == 1
    assert "Traceback" not in done.stderr
    assert "ResourceWarning" not in done.stderr


def test_processes_that_compile_the_same_kernel_keep_both_forms(tmp_path: Path) -> None:
    """As the ranks of a host do, with an empty folder."""
    code = (
        "import sys\n"
        "from streampack.core.layout.layout_kernels import derive\n"
        "from streampack.kernels.background import Helper\n"
        "print(repr(Helper('', quiet=True).compile(derive, derive.keys[int(sys.argv[1])])))\n"
        "print(derive.is_cached(derive.keys[0]), derive.is_cached(derive.keys[1]))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        )
        for number in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    assert [lines[0] for lines in said] == ["''", "''"]
    assert "True True" in (said[0][1], said[1][1])


def test_a_fork_at_the_end_of_the_process_does_not_wait(tmp_path: Path) -> None:
    code = (
        "import atexit, os\n"
        "def fork():\n"
        "    if not (pid := os.fork()):\n"
        "        os._exit(0)\n"
        "    print(os.waitpid(pid, 0)[1])\n"
        "atexit.register(fork)\n"
        "from streampack.kernels import background\n"
        "background.start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True
    )
    assert done.stdout.split() == ["0"]


arrays = st.builds(
    lambda dtype, ndim, writeable: _writeable(np.zeros((3,) * ndim, dtype), writeable),
    st.sampled_from(["<i4", "<i8", "<u2", "<u4", "u1", "?", "<f4"]), st.integers(1, 2), st.booleans(),
)  # fmt: skip
strided = arrays.map(lambda array: array[::2])
values = st.one_of(arrays, strided, st.integers(-9, 9), st.booleans(), st.floats(0, 1), st.just(np.uint32(3)))


def _writeable(array: Any, writeable: bool) -> Any:
    array.flags.writeable = writeable
    return array


@given(st.lists(values, max_size=5))
def test_a_key_says_the_types_that_numba_sees(given_values: list[Any]) -> None:
    import numba

    typeof: Any = numba.typeof
    key = key_of(*given_values)
    assert [typeof(_example(each)) for each in key] == [typeof(each) for each in given_values]


def test_a_key_of_a_named_tuple_is_that_of_its_class() -> None:
    import numba

    typeof: Any = numba.typeof
    (queues,) = [each for each in vars(Merge([1.0], [2], 0)).values() if isinstance(each, Entries)]
    (described,) = key_of(queues)
    assert typeof(_example(described)) == typeof(queues)


def test_a_plain_form_returns_what_the_compiled_one_does() -> None:
    @kernel
    def sums(values: Any) -> Any:
        total = np.int64(0)
        for value in values:
            total += value
        return total, total > 3

    compiled = sums.dispatcher(np.arange(4))
    sums.stay_plain()
    plain = sums(np.arange(4))
    assert compiled == plain == (6, True)
    assert [type(each) for each in plain] == [int, bool]


def test_a_kernel_inside_a_plain_one_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @kernel
    def inner(value: int) -> int:
        return value + 1

    @kernel
    def outer(value: int) -> int:
        return int(inner(inner(value)))

    monkeypatch.setattr(Kernel, "when_missing", lambda each, key: asked.append(each.__name__))
    assert [outer(1), outer(2), inner(3)] == [3, 4, 4]
    assert asked == ["outer", "inner"]


def test_kernels_are_compiled_ahead() -> None:
    """They were, before the tests began. In a process of its own, which has none of them yet."""
    command = [str(Path(sys.executable).with_name("streampack")), "kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["kernels"] > 20
    assert found["compiled"] < 5


LOADS = """
import threading, time
from streampack.kernels import background

def load():
    started.set()
    time.sleep(0.5)
    print("loaded", flush=True)

started = threading.Event()
threading.Thread(target=background.compiler.load, args=(load,), daemon=True).start()
started.wait()
import atexit
atexit._run_exitfuncs()
print(background.compiler.load(lambda: "too late"), flush=True)
"""
RUN_ENDS = """
import subprocess
from streampack.kernels.background import Helper
from streampack_services.run.orphans import end_descendants

helper, other = Helper("", quiet=True), subprocess.Popen(["sleep", "600"])
end_descendants()
print(helper.has_ended, other.poll() is not None)
helper.close()
"""


def printed(script: str) -> str:
    """Run a script in a process of its own, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return done.stdout


def test_the_end_of_a_process_waits_for_a_thread_that_compiles() -> None:
    assert printed(LOADS) == "loaded\nNone\n"


def test_the_end_of_a_run_leaves_the_process_that_compiles() -> None:
    assert printed(RUN_ENDS) == "False True\n"
