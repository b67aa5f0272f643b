"""Downloads from the hub and other servers. Each is tried twice, and none leaves half a file."""

import hashlib
import io
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data.inputs import Source
from plumbing.files import atomic_write

TIMEOUT = 10  # seconds without an answer
RETRY_SECONDS = 2.0  # before the second attempt
PATIENCE = 20  # seconds. A failure that took longer is final: the hub's client has already tried again
OWN_FILES = "For your own files, use --input FILES."
# {exception of the hub's client: what is wrong, and what to do}
REFUSALS = {
    "GatedRepoError": "it is gated. Accept its conditions on its page, then log in: hf auth login.",
    "HFValidationError": f"a data set's name is OWNER/NAME, as the Hub shows it. {OWN_FILES}",
    "RepositoryNotFoundError": f"it is private or does not exist. Check it, or log in: hf auth login. {OWN_FILES}",
    "RevisionNotFoundError": "it has no such revision. Choose a commit, branch or tag from its page.",
}
NO_NETWORK = (
    "Check the network and run the command again. Offline, use your own files with --input. fineweb.py also has "
    "--dataset python-docs."
)


HUB_NAME = re.compile(r"gpt2(-medium|-large|-xl)?|[\w.-]+/(?!.*\.(pt|tiktoken)$)[\w.-]+")  # of a model


def retry(name: str, advice: str, function: Callable[[], Any]) -> Any:
    """Call `function` to download `name`, and once more if that may help. Its last error is shown with `advice`."""
    for attempt in (1, 2):
        begun = time.monotonic()
        try:
            return function()
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            if getattr(error, "errno", None) in console.ADVICE:  # an error of the disk
                raise
            if refusal := REFUSALS.get(type(error).__name__):
                raise UserError(f"Could not download {name}: {refusal}") from None
            if attempt == 2 or time.monotonic() - begun > PATIENCE:
                wrong = console.plain(console.first_line(error)).removeprefix("Got: ")
                raise UserError(f"Could not download {name}: {wrong}. {advice}") from None
        time.sleep(RETRY_SECONDS)


def find_model(name: str) -> Path:
    """The path of this name or, if there is none, the folder of the hub's model, downloaded if necessary."""
    if os.path.exists(name) or os.path.exists(os.path.dirname(name)) or not HUB_NAME.fullmatch(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    files = ["*.json", "merges.txt", "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns="*/*"))
    except Exception as error:  # the hub's client has renamed its network errors from version to version
        raise UserError(
            f"Could not download {name}: {console.first_line(error)}. Check the name and the network, or give a folder "
            "in Hugging Face format."
        ) from None


def has_digest(file: io.BufferedReader | io.BytesIO, digest: str) -> bool:
    """Whether an open file has this digest: sha256, or git's sha1. An empty digest fits any file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begun = hashlib.sha1(b"blob %d\0" % size) if len(digest) == 40 else hashlib.sha256()
    return not digest or hashlib.file_digest(file, lambda: begun).hexdigest() == digest


def file_has_digest(path: str, digest: str) -> bool:
    with open(path, "rb") as file:
        return has_digest(file, digest)


def fetch(source: Source, folder: str) -> str:
    """The local path of a source: the user's own file, one in the hub's cache, or one downloaded to `folder`."""
    if source.path or not source.repo:
        return source.path
    import huggingface_hub

    file: Any = dict(repo_id=source.repo, filename=source.name, repo_type="dataset", revision=source.commit)
    for path in (huggingface_hub.try_to_load_from_cache(**file), os.path.join(folder, source.name)):
        if isinstance(path, str) and os.path.isfile(path) and file_has_digest(path, source.digest):
            return path

    def load():
        # offline, this fails at once; hf_hub_download would repeat the same request for 23 seconds
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**file), timeout=TIMEOUT)
        path = huggingface_hub.hf_hub_download(**file, local_dir=folder)
        if file_has_digest(path, source.digest):
            return path
        os.remove(path)
        raise ConnectionError(f"the download differs from the {source.size:,} bytes that the Hub lists")

    return retry(f"{source.name} of {source.repo}", NO_NETWORK, load)


def fetch_all(
    sources: Sequence[Source], folder: str, *, first: int, ahead: bool
) -> Iterator[tuple[int, Source]]:
    """Yield (number, source with its file's path) from number `first` on. Files on the hub are downloaded to `folder`.

    ahead: download the next file while this one is read.
    """
    coming = None
    for number in range(first, len(sources)):
        source = sources[number]
        path = coming.result() if coming else fetch(source, folder)
        if ahead and number + 1 < len(sources):
            coming = in_background(fetch, sources[number + 1], folder)
        yield number, source._replace(path=path)


def in_background(function: Callable[..., Any], *args: Any) -> Future:
    """Call a function in a daemon thread. An executor's thread would make an exit wait for the download."""
    coming = Future()

    def run():
        try:
            coming.set_result(function(*args))
        except BaseException as error:  # raised in the thread that waits
            coming.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return coming


def remove_fetched(sources: Sequence[Source], folder: str) -> None:
    """Remove downloads that are no longer needed. The user's own files stay."""
    for source in sources:
        if not source.path:
            Path(folder, source.name).unlink(missing_ok=True)


def download(url: str, path: str, digest: str, *, advice: str) -> None:
    """Download `url` to `path` if the content has this digest. An error is shown with `advice`."""

    def load():
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            content = response.read()
        if not has_digest(io.BytesIO(content), digest):
            raise ConnectionError(f"the {len(content):,} bytes that came are not the expected file")
        return content

    content = retry(url, advice, load)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)
