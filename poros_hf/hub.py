"""Single files of a repository on the Hub or of a folder in its place.

Whatever the Hub answers becomes a HubError that names repository and file and says what to do.
huggingface_hub is imported when a repository is asked for, not before.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from poros_hf.errors import HubError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A folder, or a repository on the Hub; a folder of that name wins.

    Attributes:
        name: Path, or `owner/name`.
        revision: Branch, tag or commit; None is the default branch. Folders have none.
        token: Access token; None takes the one that `hf auth login` stored, False none.
        cache_dir: Where downloads are kept; None is the cache of huggingface_hub.
        local_files_only: Look into that cache alone.
    """

    name: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | None = None
    local_files_only: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether the files are on this machine."""
        return Path(self.name).is_dir()

    def describe(self, file: str) -> str:
        """Name a file and where it is, for messages."""
        at = f" at revision {self.revision}" if self.revision and not self.is_folder else ""
        return f"{file} of {self.name}{at}"

    def fetch(self, file: str) -> Path:
        """Return the path of a file, which is downloaded if it is not in the cache.

        Raises:
            HubError: It could not be had, with the likely reason.
        """
        if self.is_folder:
            path = Path(self.name) / file
            if path.is_file():
                return path
            raise _missing_file(self, file)
        if looks_like_path(self.name):
            raise HubError(
                "hub-folder",
                f"the folder {self.name} does not exist, so {file} cannot be read from it",
                remedies=["check the path", "name a repository as owner/name"],
                repository=self.name,
                file=file,
            )
        return self._download(file)

    def find(self, file: str) -> Path | None:
        """Return the path of a file, or None if it could not be had for whatever reason."""
        try:
            return self.fetch(file)
        except HubError:
            return None

    @property
    def cache_folder(self) -> Path:
        """Where downloads are kept."""
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE)

    def download_bytes(self, prefix: str = "") -> int:
        """Return the bytes of a model's safetensors files that are not in the cache.

        Args:
            prefix: Of the files' names, such as `subfolder/`.

        Returns:
            0 as well where the Hub does not say: whoever downloads will be told the reason.
        """
        from huggingface_hub import HfApi, try_to_load_from_cache

        try:
            info = HfApi(token=self.token).model_info(
                self.name, revision=self.revision, files_metadata=True
            )
        except _hub_errors():
            return 0
        return sum(
            file.size or 0
            for file in info.siblings or []
            if fnmatch.fnmatchcase(file.rfilename, f"{prefix}model*.safetensors")
            and not isinstance(
                try_to_load_from_cache(
                    self.name, file.rfilename, cache_dir=self.cache_dir, revision=info.sha
                ),
                str,
            )
        )

    def upload(self, file: str, text: str, *, private: bool | None, message: str) -> str:
        """Put a file into the repository, which is made if it does not exist.

        Returns:
            The address of the commit.

        Raises:
            HubError: The Hub did not take it.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=self.token)
        try:
            api.create_repo(self.name, exist_ok=True, private=private)
            commit = api.upload_file(
                path_or_fileobj=text.encode(),
                path_in_repo=file,
                repo_id=self.name,
                revision=self.revision,
                commit_message=message,
            )
        except _hub_errors() as error:
            raise _translate(error, self, file) from error
        return str(commit.commit_url)

    def check_writable(self, *, private: bool | None) -> None:
        """Make the repository if it does not exist, which asks for the right to write to it.

        Raises:
            HubError: The Hub refuses it, or cannot be asked.
        """
        from huggingface_hub import HfApi

        with self.translated("a new commit"):
            HfApi(token=self.token).create_repo(self.name, exist_ok=True, private=private)

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Turn what huggingface_hub raises in a `with` block into a HubError.

        Args:
            what: Is read or written, for the message.
        """
        try:
            yield
        except _hub_errors() as error:
            raise _translate(error, self, what) from error

    def _download(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(
                self.name,
                file,
                revision=self.revision,
                token=self.token,
                cache_dir=self.cache_dir,
                local_files_only=self.local_files_only,
            )
        except _hub_errors() as error:
            raise _translate(error, self, file) from error
        return Path(path)


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """A repository in a cache of huggingface_hub, told by the path of one of its files.

    Attributes:
        name: `owner/name`.
        snapshot: The folder that holds the files of one commit and is named after it.
    """

    name: str
    snapshot: Path

    def download_command(self, path: Path) -> str:
        """Return the shell command that replaces a file of the snapshot by a new download."""
        from huggingface_hub import constants

        file = path.absolute().relative_to(self.snapshot).as_posix()
        words = ["hf", "download", self.name, file, "--force-download"]
        words += ["--revision", self.snapshot.name]
        cache = self.snapshot.parents[2]
        if cache != Path(constants.HF_HUB_CACHE).absolute():
            words += ["--cache-dir", str(cache)]
        return shlex.join(words)


def cached_repository(path: Path) -> CachedRepository | None:
    """Return the repository that a file was downloaded from, or None outside a cache.

    Links are not followed: a cache holds the files of a snapshot as links to their content.
    """
    for folder in path.absolute().parents:
        kind, _, name = folder.parent.parent.name.partition("--")
        if folder.parent.name == "snapshots" and kind == "models" and name:
            return CachedRepository(name.replace("--", "/"), folder)
    return None


def download_again(path: Path) -> str:
    """Say how to replace a damaged or missing file, with the command where it is known."""
    cached = cached_repository(path)
    if cached is not None:
        return f"download this file again: `{cached.download_command(path)}`"
    folder = str(path.parent.absolute())
    words = ["hf", "download", "OWNER/NAME", path.name, "--force-download", "--local-dir", folder]
    return f"download or copy this file again (from the Hub: `{shlex.join(words)}`)"


def looks_like_path(name: str) -> bool:
    """Tell whether a name can only be meant as a path: repositories are `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def write_atomic(path: Path, text: str) -> None:
    """Write a small text file so that a reader finds the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub raises when it does not get what it asked for.

    The base of its HTTP errors comes from the HTTP library that this release of it uses.
    """
    from huggingface_hub import errors

    transport = errors.HfHubHTTPError.__mro__[1]
    return (
        transport,
        errors.EntryNotFoundError,
        errors.HFValidationError,
        errors.LocalTokenNotFoundError,
        ConnectionError,
    )


def _translate(error: BaseException, source: Repository, file: str) -> HubError:
    """Say what an error of huggingface_hub means, by the first HTTP answer in its chain."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return _missing_repository(source, file)
    if isinstance(error, errors.LocalTokenNotFoundError):
        return _no_token(source, file)
    answer = _first_answer(error)
    if answer is None:
        return _unreachable(source, file, error)
    if isinstance(answer, errors.EntryNotFoundError):
        return _missing_file(source, file)
    if isinstance(answer, errors.RevisionNotFoundError):
        return _missing_revision(source, file)
    known = {401: _no_token, 403: _forbidden, 404: _missing_repository}
    make = known.get(answer.response.status_code)
    return make(source, file) if make else _unreachable(source, file, answer)


def _first_answer(error: BaseException) -> HfHubHTTPError | None:
    from huggingface_hub.errors import HfHubHTTPError

    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, HfHubHTTPError):
            return chain
        chain = chain.__cause__
    return None


def _missing_file(source: Repository, file: str) -> HubError:
    return HubError(
        "hub-file",
        f"{source.name} has no {file}",
        remedies=["check the name and the revision", "write the file with save_pretrained"],
        repository=source.name,
        file=file,
        revision=source.revision,
    )


def _missing_repository(source: Repository, file: str) -> HubError:
    return HubError(
        "hub-repository",
        f"the Hub has no repository {source.name!r} (asked for {file})",
        remedies=["check the name", "pass a token that may see it, if it is private"],
        repository=source.name,
        file=file,
    )


def _missing_revision(source: Repository, file: str) -> HubError:
    return HubError(
        "hub-revision",
        f"{source.name} has no revision {source.revision!r} (asked for {file})",
        remedies=["name a branch, a tag or a full commit hash that it has"],
        repository=source.name,
        file=file,
        revision=source.revision,
    )


def _no_token(source: Repository, file: str) -> HubError:
    return HubError(
        "hub-token",
        f"the Hub wants to know who asks for {file} of {source.name}: there is no valid access "
        "token, or no such repository (without one it does not say which)",
        remedies=["run `hf auth login`", "pass token=..."],
        repository=source.name,
        file=file,
    )


def _forbidden(source: Repository, file: str) -> HubError:
    return HubError(
        "hub-forbidden",
        f"the Hub refuses {file} of {source.name} to this access token",
        remedies=[
            "ask for access, or accept the terms, on the page of the repository",
            "use a token with the permission (to upload: write)",
        ],
        repository=source.name,
        file=file,
    )


def _unreachable(source: Repository, file: str, error: BaseException) -> HubError:
    reason = error.__cause__ or error
    return HubError(
        "hub-unreachable",
        f"{source.describe(file)} is not in the local cache, and the Hub did not answer as it "
        f"should ({type(reason).__name__}: {str(reason).strip().splitlines()[0]})",
        remedies=["check the connection and HF_ENDPOINT", "try again later", "use a local folder"],
        repository=source.name,
        file=file,
    )
