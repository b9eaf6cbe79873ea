"""Fetches a Hugging Face repository: weights as safetensors, tokenizer and configuration, nothing that runs code."""

import json
import os
import shutil
from pathlib import Path

from mesh.cli.problem import Problem

PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def is_usable(folder: Path) -> bool:
    """Whether a gateway and a worker find there what they need, judged by file names."""
    return (
        (folder / "tokenizer.json").is_file()
        and (folder / "config.json").is_file()
        and any(folder.glob("*.safetensors"))
    )


def download_repository(repository: str, into: Path) -> None:
    """Download `repository` ("org/name") into the new folder `into`.

    Raises Problem when the hub cannot be reached, does not have it, keeps it behind a licence, or lacks a needed file.
    """
    import httpx
    from huggingface_hub import errors, snapshot_download

    hub = os.environ.get("HF_ENDPOINT") or None
    try:
        snapshot_download(repository, local_dir=into, allow_patterns=PATTERNS, endpoint=hub)
    except errors.GatedRepoError:
        raise Problem(
            f"{repository} wants its terms accepted first", "accept them on its page, then set HF_TOKEN"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise Problem(
            f"the hub has no repository {repository}: {_first_line(error)}",
            "check the name; private ones need HF_TOKEN",
        ) from None
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HfHubHTTPError,
        httpx.HTTPError,
    ) as error:
        raise Problem(
            f"the Hugging Face hub did not answer: {_first_line(error)}", "check the network and HF_ENDPOINT"
        ) from None
    shutil.rmtree(into / ".cache", ignore_errors=True)
    if not is_usable(into):
        raise Problem(
            f"{repository} lacks one of tokenizer.json, config.json, *.safetensors", "choose a repository that has them"
        )
    _fold_template(into)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _fold_template(folder: Path) -> None:
    """Newer repositories keep the template in a file of its own; a model folder keeps it in tokenizer_config.json."""
    template = folder / "chat_template.jinja"
    if not template.is_file():
        return
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config["chat_template"] = template.read_text(encoding="utf-8")
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
