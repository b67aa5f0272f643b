"""The fixtures that all tests share, and how pytest runs them. The helpers are in harness.py."""

import contextlib
import functools
import importlib
import signal
import socket

import pytest

pytest.register_assert_rewrite("corpora", "harness")
# a shell's `pytest &` ignores Ctrl-C, and so would the programs started from here, whose Ctrl-C is tested
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in two processes, where pytest-xdist is there; its workers come here as well."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"
        config.option.loadscopereorder = False  # it would begin with the files that have most tests


def pytest_configure(config):
    """Import the harness before a test imports torch, as it sets the environment; xdist's controller runs no tests."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        importlib.import_module("harness")  # takes two seconds


# the files that take longest, longest first: then both processes end at about the same time
LONGEST = [
    "shard",
    "changed_models",
    "simulated_gpu",
    "resume",
    "changed_training",
    "readme",
    "branch",
    "recipe",
    "weights",
]


def pytest_collection_modifyitems(config, items):
    """Slow tests run only where -m names them."""
    items.sort(key=lambda item: [*LONGEST, item.path.stem[5:]].index(item.path.stem[5:]))
    if "slow" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def limit_seconds(item):
    return 1800 if item.get_closest_marker("slow") else 300


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A fixture that hangs fails. On Windows, which has no such signal, there is no limit."""
    with time_limit(limit_seconds(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that hangs fails."""
    with time_limit(limit_seconds(item)):
        return (yield)


@contextlib.contextmanager
def time_limit(seconds):
    """Context of a phase of a test: after so many seconds it fails, and its traceback says where it was."""

    def stop(*args):
        pytest.fail(f"took more than {seconds} seconds")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Each test is in a folder of its own, so that none writes to where the suite was started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def leave_no_trace():
    """Restore what a test or a run sets for the process: signal handlers, torch's threads and kernels, random state."""
    import torch
    from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    with sdpa_kernel(_cur_sdpa_kernel_backends()):
        yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def no_network_and_no_commit():
    """A connection to anything but this machine is an error, at once. Only the real scripts ask git for the commit."""
    from plumbing.run import source_code

    from harness import no_git, patched

    def connect_here(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"the tests may not reach {address}")
        return connect(self, address)

    with patched(socket.socket, "connect", connect_here) as connect:
        with patched(source_code, "git", no_git):
            yield


@pytest.fixture
def whole_text(monkeypatch):
    """An export is compared with transformers on all of the text, as outside of the tests."""
    from plumbing.run import huggingface

    import harness

    monkeypatch.setattr(huggingface, "text_to_compare", harness.text_to_compare)


@pytest.fixture
def data(tmp_path):
    from harness import make_shards

    return make_shards(tmp_path / "data")


@pytest.fixture
def out(tmp_path):
    """The folder of a test's run, which is not there yet."""
    return tmp_path / "out"


@pytest.fixture
def output(capsys):
    """output(): what was printed since the last call."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def changed(data, tmp_path):
    """changed(edits): train_gpt2.py with these edits, as an edits.Changed."""
    from edits import Changed

    return functools.partial(Changed, tmp_path, data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards that a module's tests share and leave as they are."""
    from harness import make_shards

    return make_shards(tmp_path_factory.mktemp("module") / "data")
