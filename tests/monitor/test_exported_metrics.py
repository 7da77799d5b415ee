"""Metrics for Prometheus and OpenTelemetry, read back by parsers that are not weft's."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.monitor.test_step_record import record
from weft.config.errors import InvalidConfig
from weft.config.files import parse_address
from weft.config.reader import read_job
from weft.monitor.event_log import EventLog
from weft.monitor.exported_metrics import (
    NODE_HELP,
    RECORD_HELP,
    Metric,
    export_record,
    export_sample,
    exported_name,
)
from weft.monitor.prometheus import format_metrics, serve_metrics
from weft.monitor.step_record import KEY_PREFIXES, ROUTER_METRICS, TRACKER_NAMES, StepRecord
from weft.monitor.tracker_services import OpenTelemetry
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

FULL = record(
    7,
    eval_loss=2.5,
    ranks={"memory_peak_gib": {"min": 1.0, "median": 1.5, "max": 2.0, "rank": 1}},
    layer_grad_norms={"layers.0": 0.25, "layers.1": 0.5},
    loss_by_source={'a "b"\\c\nd': 1.25},
    metrics={"reward_margin": -0.5},
    anomalies=[{"step": 7}],
)
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_text_format(text: str) -> tuple[Series, dict[str, str]]:
    """Read version 0.0.4 strictly: HELP and TYPE once, before the samples of their metric."""
    samples: Series = {}
    types: dict[str, str] = {}
    current, helped = "", set[str]()
    assert text.endswith("\n")
    for line in text.splitlines():
        if match := re.fullmatch(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line):
            assert match[1] not in helped
            helped.add(match[1])
        elif match := re.fullmatch(r"# TYPE (\S+) (gauge|counter)", line):
            assert match[1] in helped
            assert match[1] not in types
            current, types[match[1]] = match[1], match[2]
        else:
            match = re.fullmatch(r"([a-z_]+)\{((?:[a-z_]+=\"(?:[^\"\\]|\\.)*\",?)+)\} (\S+)", line)
            assert match, line
            assert match[1] == current
            pairs = re.findall(r"([a-z_]+)=\"((?:[^\"\\]|\\.)*)\"", match[2])
            labels = tuple(
                (name, re.sub(r"\\.", lambda m: UNESCAPED[m[0]], value)) for name, value in pairs
            )
            assert (match[1], labels) not in samples
            samples[match[1], labels] = float(match[3])
    return samples, types


def test_every_metric_of_a_record_and_a_node_is_exported_or_listed() -> None:
    names = {KEY_PREFIXES.get(field.name, field.name) for field in fields(StepRecord)}
    names -= {"ranks", "router_metrics", "attention_logits"}  # whose parts are keys
    names -= {"anomalies", "eval_skipped"}  # events are counted; the evaluation is made up for
    names = {name + "/" if name in KEY_PREFIXES.values() else name for name in names}
    names |= {"loss", "eval_loss", "grad_norm"}
    logged = {name for name in TRACKER_NAMES if name != "ranks"}
    exported = {name for name in RECORD_HELP if not name.startswith("rank/")}
    assert names | logged == exported | {"router_entropy", "router_bias_effect"}
    assert set(ROUTER_METRICS) <= {name.rstrip("/") for name in exported}
    every = [exported_name(name)[0] for name in RECORD_HELP]
    every += [exported_name(name, "weft_node_")[0] for name in NODE_HELP]
    assert len(set(every)) == len(every)


def test_text_format_has_every_number_of_a_record_in_base_units() -> None:
    counter = Metric("weft_events_total", "Events.", "1", [({"kind": "slow rank"}, 2.0)], True)
    samples, types = parse_text_format(
        format_metrics([*export_record(FULL.to_dict()), counter], "r")
    )
    run = ("run", "r")
    assert samples["weft_loss", (run,)] == FULL.loss
    assert samples["weft_eval_loss", (run,)] == 2.5
    assert samples["weft_memory_peak_bytes", (run,)] == 1.5 * 2**30
    assert samples["weft_rank_memory_peak_bytes", (run, ("stat", "max"))] == 2 * 2**30
    assert samples["weft_layer_grad_norm", (run, ("layer", "layers.1"))] == 0.5
    assert samples["weft_source_loss", (run, ("source", 'a "b"\\c\nd'))] == 1.25
    assert samples["weft_train_metric", (run, ("name", "reward_margin"))] == -0.5
    assert samples["weft_run_seconds", (run, ("kind", "productive"))] == 3.0
    assert samples["weft_record_timestamp_seconds", (run,)] == FULL.time
    assert samples["weft_events_total", (run, ("kind", "slow rank"))] == 2
    assert types.pop("weft_events_total") == "counter"
    assert set(types.values()) == {"gauge"}
    # A NaN is missing, as in metrics.jsonl.
    assert "weft_loss" not in {
        m.name for m in export_record(record(1, loss=float("nan")).to_dict())
    }


def test_text_format_of_a_node_has_base_units() -> None:
    sample = {"cpu_percent": 50.0, "memory_gib": 2.0, "net_in_mb_s": 3.0, "gpu_power_w": 700.0}
    samples, _ = parse_text_format(format_metrics(export_sample(sample | {"time": 1.0}), "r"))
    assert {name: value for (name, _), value in samples.items()} == {
        "weft_node_cpu_ratio": 0.5,
        "weft_node_memory_bytes": 2 * 2**30,
        "weft_node_net_in_bytes_per_second": 3e6,
        "weft_node_gpu_power_watts": 700,
    }


def test_server_follows_the_files_of_a_run(tmp_path: Path) -> None:
    lines: list[str] = []
    events = EventLog(tmp_path, print)
    events.add("start", 0, "started on 2 ranks")
    with serve_metrics("127.0.0.1:0", tmp_path, True, lines.append):
        url = lines[0].removeprefix("metrics for Prometheus: ")
        with urlopen(url) as answer:  # before the first record
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            samples, _ = parse_text_format(answer.read().decode())
        assert "weft_step" not in {name for name, _ in samples}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(FULL.to_dict()) + "\n")
        events.add("restart", 7, "rank 1 failed")
        events.add("start", 5, "resumed")
        samples, _ = parse_text_format(urlopen(url).read().decode())
        run = ("run", tmp_path.name)
        assert samples["weft_step", (run,)] == 7
        assert samples["weft_events_total", (run, ("kind", "start"))] == 2
        assert samples["weft_events_total", (run, ("kind", "restart"))] == 1
        assert samples["weft_node_memory_total_bytes", (run,)] > 2**30
        with pytest.raises(HTTPError, match="404"):
            urlopen(url.replace("/metrics", "/etc/passwd"))
        with serve_metrics(url.split("/")[2], tmp_path, True, lines.append):  # the port is in use
            pass
        assert "address already in use. Training continues without it" in lines[1]
    with serve_metrics("127.0.0.1:0", tmp_path, False, lines.append):
        url = lines[-1].removeprefix("metrics for Prometheus: ")
        names = {name for name, _ in parse_text_format(urlopen(url).read().decode())[0]}
        assert "weft_node_memory_bytes" in names
        assert not names & {"weft_step", "weft_events_total"}


@pytest.mark.parametrize("value", ["9400", "localhost", "127.0.0.1:99999", "::1:9400", "a b:1"])
def test_address_that_is_none_is_refused(value: str) -> None:
    assert parse_address("[::1]:9400") == ("::1", 9400)
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address(value) is None
    job, _, errors = read_job("demo", [("monitor.prometheus", value)])
    assert not errors
    with pytest.raises(InvalidConfig, match="is not HOST:PORT"):
        resolve(job, Machine("cpu", 1))


# --------------------------------------------------------------------------- OTLP


class Collector(ThreadingHTTPServer):
    """A receiver of OTLP over HTTP: bodies, paths and headers of the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answer = b"{}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        url = f"http://127.0.0.1:{collector.server_port}/base/"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield collector
        collector.shutdown()


def test_otlp_records_are_read_by_the_messages_of_opentelemetry(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.proto", reason="the messages are not installed")
    from google.protobuf.json_format import Parse
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=a%20b,x-other=c")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=llm,service.name=other")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    sink = OpenTelemetry(tmp_path, {}, 0)
    sink.write(FULL)
    sink.close()
    ((path, headers, body),) = collector.requests
    assert path == "/base/v1/metrics"
    assert (headers["Content-Type"], headers["X-Api-Key"]) == ("application/json", "a b")
    message: Any = Parse(body, ExportMetricsServiceRequest())  # refuses unknown fields
    (resource,) = message.resource_metrics
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert attributes["service.name"] == "pretraining"
    assert (attributes["team"], attributes["service.instance.id"]) == ("llm", tmp_path.name)
    (scope,) = resource.scope_metrics
    expected = {metric.name: metric for metric in export_record(FULL.to_dict())}
    assert {metric.name for metric in scope.metrics} == set(expected)
    for metric in scope.metrics:
        assert metric.unit == expected[metric.name].unit
        points = [
            ({each.key: each.value.string_value for each in point.attributes}, point.as_double)
            for point in metric.gauge.data_points
        ]
        assert points == [(dict(labels), value) for labels, value in expected[metric.name].points]
        for point in metric.gauge.data_points:
            assert point.time_unix_nano == pytest.approx(1e9 * FULL.time, abs=1000)


def test_otlp_endpoint_of_metrics_is_used_as_it_is_and_wrong_settings_are_refused(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{collector.server_port}/own"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", url)
    OpenTelemetry(tmp_path, {}, 0).write(FULL)
    assert collector.requests[0][0] == "/own"
    for name, value in (("PROTOCOL", "grpc"), ("METRICS_ENDPOINT", "localhost:4317")):
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP"):
            OpenTelemetry(tmp_path, {}, 0)
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}")
