"""Sources and outputs on other machines: a real S3 server and a real HTTP server, both on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structured as s
from qconvert.convert import upload
from qconvert.convert.cli import main
from qconvert.convert.job import Outcome, Request, run_job
from qconvert.formats import remote
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError, TransferError, UsageError
from qconvert.formats.remote import Place, Remote, place

pytest.importorskip("fsspec", reason="NOT INSTALLED: fsspec (extra `remote`)")
TARGET = "comfy_nvfp4"


def model(seed: int = 1) -> Any:
    weights = {n: w for n, w in s.network(seed).items() if not n.startswith(("layers.2", "layers.3"))}
    return {f"{name}.weight": s.bf16(w) for name, w in weights.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(s.write(tmp_path_factory.mktemp("source") / "model.safetensors", model()))


@pytest.fixture(scope="module")
def wanted(original: Path) -> bytes:
    """What a conversion of the local file gives."""
    path = original.with_name("wanted.safetensors")
    convert(original, path)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits; blocks so small that there are many, though the S3 server takes its time for each."""
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 20 if "s3" in request.fixturenames else 1 << 16)


def convert(source: Place, output: Place, **request: Any) -> Outcome:
    with opened(source) as checkpoint:
        return run_job(Request(source, TARGET, output=output, **request), checkpoint)


# ---- HTTP


class Server(ThreadingHTTPServer):
    """Serves `data`; `faults` says what goes wrong with which request for a range, counted from 1."""

    daemon_threads = True

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.etag = data, '"1"'
        self.ranges: list[tuple[int, int]] = []
        self.ignore_ranges = False
        self.drop_every = self.fail_every = 0
        self.change_at = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what this server is for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/folder/model.safetensors"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        if not self.path.endswith(("/model.safetensors", "?signature=secret")):
            self.send_error(404)
            return
        self._begin(200, len(self.server.data))

    def _begin(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", self.server.etag)
        if not self.server.ignore_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        server = self.server
        if not self.path.endswith(("/model.safetensors", "?signature=secret")):
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        if asked is None or server.ignore_ranges:
            self._begin(200, len(server.data))
            self.wfile.write(server.data)
            return
        first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        with server.lock:
            server.ranges.append((first, last))
            count = len(server.ranges)
            if server.change_at and count == server.change_at:
                server.etag = '"2"'
        if server.fail_every and count % server.fail_every == 0:
            self.send_error(503)
            return
        data = server.data[first : last + 1]
        self._begin(206, len(data))
        if server.drop_every and count % server.drop_every == 0:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(data)


@pytest.fixture
def http(original: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="NOT INSTALLED: aiohttp (extra `remote`)")
    server = Server(original.read_bytes())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_http_source_is_read_by_ranges(http: Server, tmp_path: Path, wanted: bytes) -> None:
    out = tmp_path / "out.safetensors"
    convert(place(http.url), out)
    assert out.read_bytes() == wanted
    assert max(last - first for first, last in http.ranges) < remote.BLOCK_BYTES
    # Every byte about once: evidence is gathered first, and a block may have left the cache by then.
    assert sum(last - first + 1 for first, last in http.ranges) < 3 * len(http.data)


def test_http_connections_that_drop_and_servers_that_fail_are_asked_again(
    http: Server, tmp_path: Path, wanted: bytes
) -> None:
    http.drop_every, http.fail_every = 3, 5
    out = tmp_path / "out.safetensors"
    convert(place(http.url), out)
    assert out.read_bytes() == wanted


def test_http_server_that_stays_away_leaves_something_to_resume(
    http: Server, tmp_path: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qconvert.convert import execute, journal

    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(execute, "PIECE_ELEMENTS", 1 << 13)
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    out, source = tmp_path / "out.safetensors", place(http.url)
    with opened(source) as checkpoint:
        request = Request(source, TARGET, output=out, jobs=1)

        def progress(done: int) -> None:
            http.fail_every = 1

        with pytest.raises(TransferError, match="2 attempts failed"):
            run_job(request, checkpoint, progress)
    assert not out.exists() and out.with_name(f".{out.name}.journal").exists()
    http.fail_every = 0
    convert(place(http.url), out, resume=True)
    assert out.read_bytes() == wanted


def test_http_source_that_changes_midway_is_refused(http: Server, tmp_path: Path) -> None:
    for at in (1, 10, 20):
        http.etag, http.change_at = '"1"', len(http.ranges) + at
        out = tmp_path / "out.safetensors"
        with pytest.raises(QConvertError, match="the source changed while it was being read") as refused:
            convert(place(http.url), out)
        assert not isinstance(refused.value, TransferError)
        assert list(tmp_path.iterdir()) == []


def test_http_change_is_seen_while_reading_not_only_at_the_end(
    http: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CHECK_SECONDS", 0.0)
    with opened(place(http.url)) as checkpoint:
        http.etag = '"2"'
        with pytest.raises(QConvertError, match="changed"):
            checkpoint.pread(0, len(http.data) - 10, 10)


def test_resume_from_another_version_is_refused(http: Server, tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    out, source = tmp_path / "out.safetensors", place(http.url)
    with opened(source) as checkpoint, pytest.raises(KeyboardInterrupt):
        run_job(Request(source, TARGET, output=out, jobs=1), checkpoint, stop)
    http.etag = '"2"'
    with pytest.raises(QConvertError, match="another source, plan or version"):
        convert(place(http.url), out, resume=True)


def test_http_server_without_ranges_is_refused_before_it_sends_everything(
    http: Server, tmp_path: Path
) -> None:
    http.ignore_ranges = True
    with pytest.raises(QConvertError, match="does not answer byte ranges"):
        convert(place(http.url), tmp_path / "out.safetensors")


def test_http_absent_file_and_unwritable_target(http: Server, original: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        convert(place(http.url.replace("model", "other")), tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match="can be read, not written"):
        convert(original, place(http.url))


def test_signatures_in_urls_are_not_shown(http: Server) -> None:
    source = place(f"{http.url}?signature=secret")
    with opened(source) as checkpoint:
        assert "secret" not in str(checkpoint.path) and checkpoint.path.name == "model.safetensors"
        assert len(checkpoint.tensors) == len(model())


# ---- S3


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket's URL on a real server."""
    pytest.importorskip("s3fs", reason="NOT INSTALLED: s3fs (extra `remote`)")
    server = pytest.importorskip("moto.server", reason="NOT INSTALLED: moto[server]")
    import fsspec

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {
        "endpoint_url": f"http://{host}:{port}",
        "key": "k",
        "secret": "s",
        "skip_instance_cache": True,
    }
    fsspec.config.conf["s3"] = options
    fsspec.filesystem("s3").mkdir("shelf")
    yield "s3://shelf"
    del fsspec.config.conf["s3"]
    running.stop()


def test_s3_in_and_out(s3: str, original: Path, tmp_path: Path, wanted: bytes) -> None:
    source, out = place(f"{s3}/in/model.safetensors"), place(f"{s3}/out/result.safetensors")
    assert isinstance(source, Remote) and isinstance(out, Remote)
    source.filesystem.put_file(str(original), source.path)
    outcome = convert(source, out, staging=tmp_path / "staging")
    assert outcome.output == out and list(tmp_path.iterdir()) == []
    assert out.filesystem.cat_file(out.path) == wanted
    with pytest.raises(UsageError, match="already exists"):
        convert(source, out, staging=tmp_path / "staging")
    with opened(out) as written:
        assert json.loads(written.metadata["qconvert"])["target"] == TARGET


def test_s3_large_objects_go_up_in_parts(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, target = tmp_path / "large", Remote(f"{s3}/large")
    data = bytes(range(256)) * (11 << 12)
    file.write_bytes(data)
    # The smallest parts that S3 takes, so that a small file has several.
    monkeypatch.setattr(upload, "PART_BYTES", 5 << 20)
    upload.upload(file, target)
    assert target.stat().st_size == len(data)
    assert "-" in target.stat().version  # the etag of a multipart upload
    assert target.filesystem.cat_file(target.path) == data


def test_s3_source_that_is_replaced_midway_is_refused(s3: str, original: Path, tmp_path: Path) -> None:
    source = Remote(f"{s3}/changing/model.safetensors")
    source.filesystem.put_file(str(original), source.path)
    other = s.write(tmp_path / "other.safetensors", model(seed=2))
    assert other.stat().st_size == original.stat().st_size
    replaced = False

    def progress(done: int) -> None:
        nonlocal replaced
        if not replaced:
            replaced = True
            source.filesystem.put_file(str(other), source.path)

    out = tmp_path / "out.safetensors"
    with opened(source) as checkpoint, pytest.raises(QConvertError, match="changed while it was being read"):
        run_job(Request(source, TARGET, output=out, jobs=1), checkpoint, progress)
    assert not out.exists()


def test_a_failed_upload_is_all_that_is_done_again(
    s3: str, original: Path, tmp_path: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, staging = Remote(f"{s3}/again/result.safetensors"), tmp_path / "staging"
    good, ran = upload.upload, upload.execute_plan

    def refuse(file: Path, target: Remote) -> None:
        raise TransferError("no network")

    monkeypatch.setattr(upload, "upload", refuse)
    with pytest.raises(TransferError):
        convert(original, out, staging=staging)
    assert not out.is_file() and [f.name for f in staging.rglob("*.safetensors")] == ["result.safetensors"]
    monkeypatch.setattr(upload, "upload", good)
    monkeypatch.setattr(upload, "execute_plan", lambda *a: pytest.fail("converted twice"))
    convert(original, out, staging=staging)
    monkeypatch.setattr(upload, "execute_plan", ran)
    assert out.filesystem.cat_file(out.path) == wanted and not staging.exists()


def test_s3_batch_of_a_pattern(
    s3: str, original: Path, tmp_path: Path, wanted: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        source = Remote(f"{s3}/many/{name}.safetensors")
        source.filesystem.put_file(str(original), source.path)
    file = tmp_path / "jobs.toml"
    file.write_text(
        f'[[job]]\nsource = "{s3}/many/?.safetensors"\ntarget = "{TARGET}"\noutput = "{s3}/done"\n'
    )
    for status in ("converted", "finished"):
        with pytest.raises(SystemExit) as stop:
            main(["batch", str(file), "--json", "--staging", str(tmp_path / "staging")])
        report = json.loads(capsys.readouterr().out)
        assert stop.value.code == 0 and [job["status"] for job in report["jobs"]] == [status] * 2
    result = Remote(f"{s3}/done/a.{TARGET}.safetensors")
    # The name of the source stands in the header; everything after it is the same.
    data = result.filesystem.cat_file(result.path)
    assert (
        data[8 + int.from_bytes(data[:8], "little") :] == wanted[8 + int.from_bytes(wanted[:8], "little") :]
    )


def test_a_drive_letter_is_no_protocol() -> None:
    assert isinstance(place("C://models/x"), Path) and isinstance(place("file:///x"), Path)
    assert isinstance(place("hf://owner/repo/file.safetensors"), Remote)
