"""Options of the Python tests: the same files run on every device and on every path.

    pytest tests/python                                     # CPU, the path that the library chooses
    pytest tests/python --device cuda --path cuda_generic   # one path by name: what it does not compute is skipped
    pytest tests/python --runslow                           # soaks and sizes that take minutes
"""

import json
import os
import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Derandomised: a run that fails fails again. tests/fuzz draws new cases.
hypothesis.settings.register_profile(
    "requirements", derandomize=True, deadline=None, max_examples=15, print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("requirements")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"])
    parser.addoption("--path", default="auto", help="name of a path as explain() prints it, or auto")
    parser.addoption("--table", metavar="FILE", help="write the errors of dg and dbeta that test_gradients.py finds, as JSON")
    parser.addoption("--runslow", action="store_true", help="also run the tests marked slow")


def share_gpus(worker):
    """Workers of pytest-xdist ("gw0", "gw1", ..) begin with different GPUs where there are several; each still sees them all."""
    import torch

    count = torch.cuda.device_count()  # does not start CUDA, which reads the variable when it starts
    if count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(worker.removeprefix("gw")) % count
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % count) for i in range(count))


def pytest_configure(config):
    if hasattr(config, "workerinput") and config.getoption("--device") == "cuda":
        share_gpus(config.workerinput["workerid"])
    config.addinivalue_line("markers", "cuda: needs a CUDA device (graphs, streams, sanitizers)")
    config.addinivalue_line("markers", "slow: takes minutes; run with --runslow")
    config.addinivalue_line("markers", "early: seconds long, run first: with many workers nobody then waits for it alone at the end")
    config.addinivalue_line(
        "markers", "path(name, operations=.., planned=False): about one path: skipped where a run has no calls on it, and fails if another "
        "path has computed something; planned: and if a call with auto_cp was not planned for a sequence split")
    config.addinivalue_line("markers", "requirement(number): which requirement of docs/testing.md a test is about; read by paths_plugin.py")
    config.addinivalue_line("markers", "cpu_only: about the host alone, independent of --device")
    if config.option.durations is None:
        config.option.durations = 12  # the suite has a time budget: always show where it goes
    import helpers
    import paths_plugin

    helpers.settings.device = config.getoption("--device")
    helpers.settings.path = config.getoption("--path")
    paths = paths_plugin.Paths(config.getoption("--device"), config.getoption("--path"), config)
    paths.watch()
    config.pluginmanager.register(paths, "paths")
    if config.getoption("--table") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(config.getoption("--table")))


class Table:
    """Writes what tests have recorded under the name "gradients", a row each, when all have run."""

    def __init__(self, file):
        self.file, self.rows = Path(file), []

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.rows += [json.loads(value) for name, value in report.user_properties if name == "gradients"]

    def pytest_sessionfinish(self):
        import flash_qla

        rows = sorted(self.rows, key=lambda row: (row["dtype"], row["gates"], row["dht"], row["auto_cp"], row["tokens"]))
        head = {name: flash_qla.build_info().get(name) for name in ("version", "commit", "gpu_0")}
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        self.file.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def pytest_collection_modifyitems(config, items):
    import known_misses
    import torch

    device = config.getoption("--device")
    hopper = device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if hopper and config.getoption("--path") == "auto":
        for item in items:
            if reason := known_misses.ON_HOPPER.get(item.nodeid.removeprefix("tests/python/")):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    for item in items:
        if device == "cpu" and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs --device cuda"))
        if device != "cpu" and item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason="about the host alone: runs with --device cpu"))
        if item.get_closest_marker("slow") and not config.getoption("--runslow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --runslow"))
    items.sort(key=lambda item: not (item.get_closest_marker("slow") or item.get_closest_marker("early")))  # else as they were


@pytest.fixture
def device():
    import helpers

    return helpers.settings.device


@pytest.fixture
def paths(request):
    """The record of this test's calls (paths_plugin.py)."""
    return request.config.pluginmanager.get_plugin("paths")


@pytest.fixture(autouse=True)
def chosen_path():
    """Every call of a test takes the path named on the command line."""
    import helpers

    with helpers.use_path(helpers.settings.path):
        yield


# Workers share one GPU: what a test of a large size leaves in a worker's cache, others would lack.
KEPT_BYTES = 2 << 30


@pytest.fixture(autouse=True)
def shared_gpu(device):
    yield
    if device == "cuda":
        import torch

        if torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()
