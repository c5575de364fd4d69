"""A real Prometheus scrapes a real server, and the Grafana dashboard's queries have data."""

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.server.serving import PATIENCE, free_port, serving, wait_for, write_tiny_model

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = shutil.which("prometheus")
BOUNDS = ("--slo-ttft-ms", "1000", "--slo-tbt-ms", "100", "--slo-tpot-ms", "100")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="there is no prometheus (Debian: apt-get install prometheus)"
)


class Scraped:
    """A Prometheus over HTTP."""

    def __init__(self, port):
        self.base = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path, **query):
        url = f"{self.base}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return json.load(response)["data"]

    def up(self):
        try:
            return any(float(r["value"][1]) for r in self.get("query", query="up")["result"])
        except OSError:
            return False


@contextmanager
def scraping(base, folder):
    """Run Prometheus with our file, for that server, and faster."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "250ms"
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [base.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", "--log.level=error"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen(command)
    try:
        yield Scraped(port)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def load(served):
    """Requests of every end: answered, refused, broken off."""
    body = {"prompt": [5] * 100, "max_tokens": 20, "ignore_eos": True}
    assert served.request("/v1/completions", {**body, "nope": 1})[0] == 400
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: served.request("/v1/completions", body), range(8)))
    assert [status for status, _, _ in answers] == [200] * 8
    gone = served.metrics().get("requests_aborted_total", 0)
    with pytest.raises(TimeoutError):
        long = json.dumps({**body, "max_tokens": 15_000}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(served.base + "/v1/completions", long, headers)
        urllib.request.urlopen(request, timeout=0.2)
    wait_for(lambda: served.metrics().get("requests_aborted_total", 0) > gone)


def queries():
    """Return every query of the dashboard, with its variables as Grafana would fill them in."""
    dashboard = json.loads((DEPLOY / "grafana" / "twolane.json").read_text())
    filled = {"$__rate_interval": "10m", "$model": ".*", "$instance": ".*"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in filled.items():
                query = query.replace(name, value)
            assert "$" not in query
            yield pytest.param(query, id=f"{panel['title']} {target['refId']}")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Has scraped a server twice under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    model = write_tiny_model(folder / "model")
    args = ("--load-format", "dummy", "--kv-tokens", "20000", *BOUNDS)
    with serving(str(model), *args) as served, scraping(served.base, folder) as scraped:
        wait_for(scraped.up)
        for rounds in (1, 2):
            load(served)
            served_tokens = served.metrics()["generation_tokens_total"]
            done = f"sum(twolane:generation_tokens_total) >= {served_tokens}"
            wait_for(lambda done=done: scraped.get("query", query=done)["result"])
            assert served_tokens >= rounds * 8 * 20
        scraped.at = time.time()
        yield scraped


@pytest.mark.parametrize("query", list(queries()))
def test_every_query_of_the_grafana_dashboard_has_data(prometheus, query):
    # Of when the load was over: rates of the time since may be none.
    result = prometheus.get("query", query=query, time=prometheus.at)["result"]
    assert any(math.isfinite(float(series["value"][1])) for series in result), result


def test_the_variables_of_the_dashboard_have_values(prometheus):
    dashboard = json.loads((DEPLOY / "grafana" / "twolane.json").read_text())
    asked = [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert asked
    for definition in asked:
        metric, label = definition.removeprefix("label_values(").removesuffix(")").split(", ")
        metric = metric.replace("$model", ".*")
        assert prometheus.get(f"label/{label}/values", **{"match[]": metric})


def test_the_configuration_is_valid_as_it_stands():
    promtool = shutil.which("promtool")
    subprocess.run([promtool, "check", "config", DEPLOY / "prometheus.yml"], check=True)
