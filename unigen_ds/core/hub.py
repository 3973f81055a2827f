"""Folders to and from repositories of the Hugging Face Hub, with huggingface_hub's own functions.

It reads the token (``hf auth login`` or ``HF_TOKEN``) and the server (``HF_ENDPOINT``) itself.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError, UploadError
from unigen_ds.core.paths import download_remedy

LOGIN = "`hf auth login`, or HF_TOKEN in the environment"
_MISSING = {
    401: f"the token is not valid ({LOGIN})",
    403: "the token has no permission to write there (a token of type write, of a member of OWNER)",
}


@dataclass(frozen=True)
class HubRepo:
    """A repository for a model. Raises ``ConfigError`` for a name or a revision that cannot be one.

    Args:
        name: ``OWNER/NAME``.
        private: make it a private one; the upload is refused where it exists and is public.
        revision: the branch, created if it is not there; None: the main one.
    """

    name: str
    private: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        allowed = "OWNER/NAME with letters, digits, '-', '_' and '.'"
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise ConfigError(f"{self.name!r} is no repository of the hub: {error}", allowed=allowed) from error
        owner, _, name = self.name.partition("/")
        if not (owner and name):
            raise ConfigError(f"{self.name!r} is no repository of the hub: its owner is missing", allowed=allowed)
        if self.revision is not None and (not self.revision or any(c.isspace() for c in self.revision)):
            raise ConfigError(f"{self.revision!r} is no revision of {self.name}", allowed="the name of a branch")

    def command(self, folder: Path) -> str:
        """The command that uploads ``folder`` by hand."""
        return shlex.join(["hf", "upload", self.name, str(folder), *self._options()])

    def export_command(self, checkpoint: Path, out: Path, *options: str) -> str:
        """The command that writes ``out`` from a checkpoint and uploads it, with further ``options``."""
        words = ["python", "tools/export.py", str(checkpoint), str(out), *options]
        return shlex.join([*words, "--push-to-hub", self.name, *self._options()])

    def _options(self) -> list[str]:
        private = ["--private"] if self.private else []
        return [*private, *([] if self.revision is None else ["--revision", self.revision])]

    def upload(self, folder: Path) -> str:
        """Create the repository if it is not there, and upload all files of ``folder``. Returns its address.

        Files that the repository has and ``folder`` has not are left there. Raises ``UploadError``; ``folder`` is never
        changed.
        """
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            created = api.create_repo(self.name, private=self.private or None, exist_ok=True)
            if self.private and api.repo_info(created.repo_id).private is False:
                raise UploadError(
                    f"{folder} is complete, but was not uploaded: {created} exists already and is public",
                    remedy=f"make it private in its settings, or use another name; then: {self.command(folder)}",
                )
            if self.revision is not None and not api.revision_exists(created.repo_id, self.revision):
                api.create_branch(created.repo_id, branch=self.revision, exist_ok=True)
            api.upload_folder(
                repo_id=created.repo_id,
                folder_path=folder,
                revision=self.revision,
                commit_message=f"Upload {folder.name}",
            )
        except UploadError:
            raise
        except Exception as error:  # of the network, the server, the storage: many kinds, and the folder is complete
            raise UploadError(
                f"{folder} is complete, but was not uploaded to {self.name}: {_cause(error, api.endpoint)}",
                remedy=f"then upload it: {self.command(folder)}",
            ) from error
        return str(created)


_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")


def download(name: str, *, where: str, weights: bool) -> Path:
    """The folder in the hub's cache with the files of a model, downloaded where they are not there yet.

    Args:
        name: ``OWNER/NAME``.
        where: begins the error.
        weights: also its ``*.safetensors``; never another format of weights, and never code.

    Raises ``ConfigError``.
    """
    from huggingface_hub import snapshot_download

    wanted = [*_SMALL, *["*.safetensors"] * weights]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["consolidated*", "*/*"]))
    except Exception as error:  # of the network, the server, the name: many kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{where} {name!r} is no folder here, and it cannot be loaded from the hub: {first}",
            remedy=download_remedy(name),
        ) from error


def has_token() -> bool:
    """Whether this machine has a token, without which nothing can be uploaded."""
    from huggingface_hub import get_token

    return get_token() is not None


def _cause(error: Exception, endpoint: str) -> str:
    """What is missing, in one line."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it"
    if status is None:
        return f"{endpoint} cannot be reached, or the upload broke off ({type(error).__name__}: {first})"
    if status == 401 and not has_token():
        return f"there is no token ({LOGIN}); the server answered: {first}"
    if status in _MISSING:
        return f"{_MISSING[status]}; the server answered: {first}"
    return f"the server answered with an error: {first}"
