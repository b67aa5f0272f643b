"""What the tests rely on: a process that a test starts is as a new one would be."""

import json
import os

import harness


def show_environment():
    print(json.dumps(dict(os.environ)))


def environment_of_a_process():
    return json.loads(harness.run(show_environment)[0].splitlines()[-1]).items()


def test_a_process_has_the_environment_of_the_test_that_starts_it_and_nothing_of_an_earlier_one(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = environment_of_a_process()
    assert found >= os.environ.items() and "HF_HUB_OFFLINE" not in dict(found)
    monkeypatch.undo()
    found = environment_of_a_process()
    assert found >= os.environ.items() and "http_proxy" not in dict(found)
