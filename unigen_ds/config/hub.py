"""Folders to and from repositories of the Hugging Face Hub, with huggingface_hub's own functions.

It reads the token (``hf auth login`` or ``HF_TOKEN``), the server (``HF_ENDPOINT``), the cache (``HF_HOME``,
``HF_HUB_CACHE``) and whether it may ask the server (``HF_HUB_OFFLINE``) itself, as it does for transformers.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unigen_ds.config.paths import command, download_remedy, is_hub_name
from unigen_ds.core.errors import ConfigError, UploadError
from unigen_ds.system.files import check_digests
from unigen_ds.system.log import logger

LOGIN = "`hf auth login`, or HF_TOKEN in the environment"
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configs and tokenizers."""
_AGAIN = ["consolidated*", "*/*"]
"""The weights once more, in another form."""
_FILE_ENDINGS = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".json", ".jsonl")


def folder_of(path_or_name: str | Path, *, where: str, weights: bool = True) -> Path:
    """The folder that a user names: a path, or ``OWNER/NAME[@REVISION]`` of the hub, in the cache or downloaded.

    A path that exists is a path; what can be no name of the hub is returned as it is, for the caller to report.
    ``where``: the key or argument, for the error. ``weights``: safetensors, or pickled weights where there are none.
    Raises ``ConfigError`` where the hub or the cache has no such model.
    """
    text = str(path_or_name)
    name, _, revision = text.partition("@")
    path = Path(text).expanduser()
    if path.exists() or not is_hub_name(name) or text.endswith(_FILE_ENDINGS):
        return path
    return download(name, where=f"{where} {text!r}", weights=weights, revision=revision or None)


@cache
def download(name: str, *, where: str, weights: bool, revision: str | None = None) -> Path:
    """The folder in the hub's cache with a model's files, never code. ``where`` begins the ``ConfigError``."""
    from huggingface_hub import snapshot_download

    def snapshot(*patterns: str) -> Path:
        try:
            folder = snapshot_download(name, revision=revision, allow_patterns=[*patterns], ignore_patterns=_AGAIN)
        except Exception as error:  # of the network, the server, the cache: many kinds
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problem = f"{where} is no folder here, and it cannot be loaded from the hub: {why}"
            raise ConfigError(problem, remedy=download_remedy(name)) from error
        return Path(folder)

    folder = snapshot(*_SMALL, *["*.safetensors"] * weights)
    if weights and not any(folder.glob("*.safetensors")):
        folder = snapshot(*_SMALL, "*.bin")
    logger().info("%s is of the hub: %s.", where, folder)
    return folder


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

        owner, _, name = self.name.partition("/")
        problem = "" if owner and name else "its owner is missing"
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            problem = str(error)
        if problem:
            choices = "OWNER/NAME with letters, digits, '-', '_' and '.'"
            raise ConfigError(f"{self.name!r} is no repository of the hub: {problem}", allowed=choices)
        if self.revision is not None and (not self.revision or any(c.isspace() for c in self.revision)):
            raise ConfigError(f"{self.revision!r} is no revision of {self.name}", allowed="the name of a branch")

    def command(self, folder: Path) -> str:
        """The command that uploads ``folder`` by hand."""
        return shlex.join(["hf", "upload", self.name, str(folder), *self._options()])

    def export_command(self, checkpoint: Path, out: Path, *options: str) -> str:
        """The command that writes ``out`` from a checkpoint and uploads it, with further ``options``."""
        return command("export", str(checkpoint), str(out), *options, "--push-to-hub", self.name, *self._options())

    def _options(self) -> list[str]:
        private = ["--private"] if self.private else []
        return [*private, *([] if self.revision is None else ["--revision", self.revision])]

    def upload(self, folder: Path) -> str:
        """Make the repository if need be, and upload all files of ``folder``, which never changes. Returns its address.

        Files that only the repository has stay. Raises ``CheckpointError`` for a changed file, and ``UploadError``.
        """
        from huggingface_hub import HfApi

        check_digests(folder)
        api = HfApi()
        try:
            repo = api.create_repo(self.name, private=self.private or None, exist_ok=True)
            if self.private and api.repo_info(repo.repo_id).private is False:
                raise UploadError(
                    f"{folder} is complete, but was not uploaded: {repo} exists already and is public",
                    remedy=f"make it private in its settings, or use another name; then: {self.command(folder)}",
                )
            if self.revision is not None and not api.revision_exists(repo.repo_id, self.revision):
                api.create_branch(repo.repo_id, branch=self.revision, exist_ok=True)
            api.upload_folder(
                repo_id=repo.repo_id,
                folder_path=folder,
                revision=self.revision,
                commit_message=f"Upload {folder.name}",
            )
        except UploadError:
            raise
        except Exception as error:  # of the network, the server, the storage: many kinds, and the folder is complete
            status = getattr(getattr(error, "response", None), "status_code", None)
            first = (str(error).strip().splitlines() or [""])[0]
            token = f"; its token must be valid and allowed to write there ({LOGIN})" if status in (401, 403) else ""
            raise UploadError(
                f"{folder} is complete, but was not uploaded to {self.name}: {api.endpoint}: {type(error).__name__}:"
                f" {first}{token}",
                remedy=f"then upload it: {self.command(folder)}",
            ) from error
        return str(repo)
