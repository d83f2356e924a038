"""One conversion over a real Ray cluster of three nodes on this machine: workers and nodes die, bytes do not differ."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structured as s
from qconvert.convert import engine_ray
from qconvert.convert.execute import Executor
from qconvert.convert.job import Outcome, Request, plan_job, run_job
from qconvert.convert.ray_worker import Work, run_units
from qconvert.convert.units import ConstUnit, Unit, make_units
from qconvert.formats.checkpoint import Checkpoint, opened
from qconvert.formats.errors import QConvertError

ray = pytest.importorskip("ray", reason="NOT INSTALLED: ray (extra `ray`)")
TARGET = "comfy_nvfp4"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"{name}.weight": s.bf16(w) for name, w in s.network().items()}
    return Path(s.write(tmp_path_factory.mktemp("ray") / "model.safetensors", tensors))


@pytest.fixture(scope="module")
def wanted(original: Path) -> tuple[bytes, Outcome]:
    """What a local conversion gives."""
    path = original.with_name("wanted.safetensors")
    with opened(original) as checkpoint:
        outcome = run_job(Request(original, TARGET, output=path), checkpoint)
    return path.read_bytes(), outcome


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each, all on the loopback."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray would look the cluster up at this machine's outer address, where nothing listens.
    services, address = ray._private.services, ray._private.services.get_node_ip_address
    services.get_node_ip_address = lambda *_, **__: "127.0.0.1"
    common = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": 1,
        "memory": 4 << 30,
        "object_store_memory": 80 << 20,
    }
    running = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    try:
        running.add_node(**common)
        running.add_node(**common)
        os.environ["RAY_ADDRESS"] = running.address
        yield running
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        running.shutdown()
        services.get_node_ip_address = address


class Dying:
    """Runs units on workers, two of which are lost while they work: one process is killed, one node hangs and goes.

    Both have written by then. The others wait until both are lost, so that they get no chance to do everything.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node = folder, node

    def first(self, name: str) -> bool:
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def __call__(self, work: Work, numbers: Sequence[int], known: Sequence[Any]) -> Any:
        if ray.get_runtime_context().get_node_id() == self.node:
            run_units(work, numbers[:1], known)
            self.first("hanging")
            time.sleep(600)
        if self.first("killed"):
            run_units(work, numbers[:1], known)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(600):
            if (self.folder / "hanging").exists():
                break
            time.sleep(0.1)
        return run_units(work, numbers, known)


def test_a_killed_worker_and_a_removed_node_change_no_byte(
    original: Path,
    wanted: tuple[bytes, Outcome],
    tmp_path: Path,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out" / "out.safetensors"
    node = next(iter(cluster.worker_nodes))
    dying = Dying(tmp_path, node.node_id)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(engine_ray, "TASK_BYTES", 1 << 17)
    monkeypatch.setattr(engine_ray, "run_units", lambda *words: dying(*words))
    local: list[int] = []
    encode = Executor._encode_job
    monkeypatch.setattr(
        Executor, "_encode_job", lambda self, task, a: (local.append(a), encode(self, task, a))[1]
    )

    def remove() -> None:
        while not (tmp_path / "hanging").exists():
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    done: list[int] = []
    with opened(original) as checkpoint:
        request = Request(original, TARGET, output=out, engine="ray")
        outcome = run_job(request, checkpoint, done.append)
        assert sum(done) == sum(unit.nbytes for unit in units_of(request, checkpoint))
    remover.join()
    assert (tmp_path / "killed").exists() and len(cluster.worker_nodes) == 1
    assert not local  # every layer was encoded by workers
    assert out.read_bytes() == wanted[0]
    assert outcome.results == wanted[1].results
    assert [file.name for file in out.parent.iterdir()] == [out.name]


def units_of(request: Request, checkpoint: Checkpoint) -> list[Unit]:
    plan, laid = plan_job(request, checkpoint)
    return [unit for unit in make_units(plan, laid) if not isinstance(unit, ConstUnit)]


def test_a_run_on_the_cluster_is_continued_by_a_local_one_and_the_other_way_round(
    original: Path,
    wanted: tuple[bytes, Outcome],
    tmp_path: Path,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qconvert.convert import journal

    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(engine_ray, "TASK_BYTES", 1 << 17)
    for first, then in (("ray", "local"), ("local", "ray")):
        out, done = tmp_path / f"{first}.safetensors", 0

        def stop(nbytes: int) -> None:
            nonlocal done
            done += 1
            if done == 8:
                raise KeyboardInterrupt

        with opened(original) as checkpoint:
            request = Request(original, TARGET, output=out, engine=first, jobs=1)
            with pytest.raises(KeyboardInterrupt):
                run_job(request, checkpoint, stop)
        assert len(out.with_name(f".{out.name}.journal").read_text().splitlines()) > 4
        with opened(original) as checkpoint:
            run_job(Request(original, TARGET, output=out, engine=then, jobs=1, resume=True), checkpoint)
        assert out.read_bytes() == wanted[0]


def test_a_workers_refusal_arrives_as_it_was_said(original: Path, tmp_path: Path, cluster: Any) -> None:
    tensors = s.read(original)
    name = "layers.0.mlp.up_proj.weight"
    bits = tensors[name][1].copy()
    bits[3, 5] = 0x7FC0
    broken = s.write(tmp_path / "broken.safetensors", tensors | {name: ("BF16", bits)})
    out = tmp_path / "out.safetensors"
    with (
        opened(broken) as checkpoint,
        pytest.raises(QConvertError, match="weight holds NaN or Inf") as refused,
    ):
        run_job(Request(broken, TARGET, output=out, engine="ray"), checkpoint)
    assert refused.value.layer == "layers.0.mlp.up_proj"
    assert [file.name for file in tmp_path.iterdir()] == ["broken.safetensors"]
