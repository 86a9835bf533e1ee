"""What the TPU's compiler says is understood; one process at a time has it; and it is missed by name."""

import fcntl
import threading

import jax
import jax.numpy as jnp
import pytest

from launch import topology
from launch.config import ConfigError
from launch.topology import HbmExceeded, compile_program, devices_of, sole_use

GIB = 2**30


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (38.97G) exceeds available HBM (15.75G). HLO module: jit_update.\nSee https://openxla.org/xla/errors/error_1000",
            38.97 * GIB,
            15.75 * GIB,
        ),
        ("E1000: ... 38.97G exceeds available HBM (15.75G)", 38.97 * GIB, 15.75 * GIB),
        ("Ran out of memory in memory space hbm. Used 1.5T of 95.7G hbm. Exceeded", 1536 * GIB, 95.7 * GIB),
        ("the total memory (900M) exceeds available HBM (512.5M)", 900 * 2**20, 512.5 * 2**20),
        ("RESOURCE_EXHAUSTED: the HBM is too small, and no number is given", None, None),
    ],
)
def test_a_refusal_for_memory_is_read(message, needed, available):
    exceeded = HbmExceeded(message)
    assert (exceeded.needed, exceeded.available) == (
        pytest.approx(needed) if needed else None,
        pytest.approx(available) if available else None,
    )


class Refused:
    """A program that the compiler refuses."""

    def __init__(self, message: str):
        self._message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self._message)


def test_only_a_lack_of_hbm_is_a_question_of_size():
    with pytest.raises(HbmExceeded):
        compile_program("a step", Refused("RESOURCE_EXHAUSTED: E1000: ... (20.00G) exceeds available HBM (15.75G)"))
    for message in ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem", "INTERNAL: RET_CHECK failure"):
        with pytest.raises(ConfigError, match="the TPU's compiler refuses a step: .*" + message[:10]):
            compile_program("a step", Refused(message))


def test_a_peak_is_what_lies_in_memory_with_a_donated_argument_once():
    shape = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    kept = compile_program("sine", jax.jit(jnp.sin).lower(shape))
    donated = compile_program("sine", jax.jit(jnp.sin, donate_argnums=0).lower(shape))
    assert kept.arguments == donated.arguments == 2**20
    assert kept.peak - kept.temporary == 2 * 2**20
    assert donated.peak - donated.temporary == 2**20


def test_a_second_process_waits_for_the_first_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(topology.tempfile, "gettempdir", lambda: str(tmp_path))
    waits, entered = threading.Event(), threading.Event()

    def second():
        with sole_use(waits.set):
            entered.set()

    with sole_use(lambda: pytest.fail("nobody else is there")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        assert not entered.wait(0.05)
    thread.join(30)
    assert entered.is_set()
    (path,) = tmp_path.iterdir()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again


def test_without_libtpu_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"libtpu, which is not installed; pip install -e '\.\[plan\]'"):
        devices_of("v5e:2x2")
