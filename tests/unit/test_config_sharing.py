"""poros_config.json in folders and on the Hub, which is a stub on the loopback interface here."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_api

from poros_hf import config as config_module
from poros_hf.config import CONFIG_FILE, SCHEMA_VERSION, PorosConfig
from poros_hf.errors import ConfigError, HubError, PorosError
from tests.hub_stub import READ_ONLY, REPOSITORY, TOKEN, StubHub, serve

CONFIG = PorosConfig(block_size=4, num_slots=3, double_quant=False)
TEXT = json.dumps(CONFIG.to_dict())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    with serve() as stub:
        point_at(stub.address, monkeypatch, tmp_path)
        yield stub


def point_at(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api.api, "endpoint", address)  # of the functions of the module
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between retries
    monkeypatch.delenv("HF_TOKEN", raising=False)


def read(repo_or_dir: object = REPOSITORY, **kwargs: Any) -> PorosError:
    with pytest.raises(PorosError) as caught:
        PorosConfig.from_pretrained(repo_or_dir, **kwargs)
    assert CONFIG_FILE in str(caught.value)
    assert str(repo_or_dir) in str(caught.value)
    return caught.value


def test_from_pretrained_gives_the_same_config_when_it_was_saved_in_a_folder(tmp_path):
    path = CONFIG.save_pretrained(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / CONFIG_FILE
    assert PorosConfig.from_pretrained(path.parent) == CONFIG


def test_save_pretrained_leaves_one_file_when_there_was_one(tmp_path):
    PorosConfig().save_pretrained(tmp_path)
    CONFIG.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]
    assert PorosConfig.from_pretrained(tmp_path) == CONFIG


def test_save_pretrained_keeps_the_old_file_when_the_new_one_cannot_be_finished(
    tmp_path, monkeypatch
):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    PorosConfig().save_pretrained(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        CONFIG.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]
    assert PorosConfig.from_pretrained(tmp_path) == PorosConfig()


def test_from_pretrained_names_the_file_when_a_folder_has_none(tmp_path):
    error = read(tmp_path)
    assert error.slug == "hub-file"
    assert error.details["file"] == CONFIG_FILE


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "some/where/else"])
def test_from_pretrained_does_not_ask_the_hub_when_a_path_does_not_exist(name, hub):
    assert read(name).slug == "hub-folder"
    assert hub.requests == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"nf4"', "\xff"], ids=lambda text: repr(text)
)
def test_from_pretrained_names_the_file_when_it_is_no_json_object(text, tmp_path):
    (tmp_path / CONFIG_FILE).write_text(text, encoding="latin-1")
    assert read(tmp_path).slug == "config-file"


@pytest.mark.parametrize(
    ("values", "slug"),
    [
        ({"num_slot": 3}, "config-key"),
        ({"trust_remote_code": True}, "config-key"),
        ({"num_slots": 0}, "config-value"),
        ({"quant_method": "awq"}, "config-value"),
        ({"schema_version": SCHEMA_VERSION + 1, "num_slots": 3}, "config-schema"),
    ],
)
def test_from_pretrained_names_the_file_when_its_content_is_refused(values, slug, tmp_path):
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values))
    error = read(tmp_path)
    assert isinstance(error, ConfigError)
    assert error.slug == slug
    assert str(tmp_path) in error.details["source"]


def test_from_pretrained_reads_a_repository(hub):
    hub.put(CONFIG_FILE, TEXT)
    assert PorosConfig.from_pretrained(REPOSITORY) == CONFIG


def test_from_pretrained_reads_the_revision_that_is_given(hub):
    hub.put(CONFIG_FILE, TEXT)
    hub.put(CONFIG_FILE, json.dumps(PorosConfig().to_dict()), revision="v1")
    assert PorosConfig.from_pretrained(REPOSITORY, revision="v1") == PorosConfig()


def test_from_pretrained_names_the_revision_when_there_is_none(hub):
    hub.put(CONFIG_FILE, TEXT)
    error = read(revision="v9")
    assert (error.slug, error.details["revision"]) == ("hub-revision", "v9")


def test_from_pretrained_sends_the_token_that_is_given(hub):
    hub.is_private = True
    hub.put(CONFIG_FILE, TEXT)
    assert PorosConfig.from_pretrained(REPOSITORY, token=TOKEN) == CONFIG


def test_from_pretrained_asks_for_a_token_when_there_is_none(hub):
    hub.is_private = True
    assert read().slug == "hub-token"


def test_from_pretrained_asks_for_a_login_when_the_stored_token_is_demanded(hub):
    assert read(token=True).slug == "hub-token"


def test_from_pretrained_says_forbidden_when_the_token_has_no_access(hub):
    hub.is_private = True
    assert read(token=READ_ONLY).slug == "hub-forbidden"


@pytest.mark.parametrize("name", ["someone/else", "not a name!"])
def test_from_pretrained_names_the_repository_when_there_is_none(name, hub):
    error = read(name)
    assert (error.slug, error.details["repository"]) == ("hub-repository", name)


def test_from_pretrained_names_the_file_when_a_repository_has_none(hub):
    hub.put("adapter_config.json", "{}")
    error = read()
    assert (error.slug, error.details["file"]) == ("hub-file", CONFIG_FILE)


def test_from_pretrained_names_repository_and_file_when_the_schema_is_newer(hub):
    hub.put(CONFIG_FILE, json.dumps({"schema_version": SCHEMA_VERSION + 6}))
    error = read()
    assert error.slug == "config-schema"
    assert error.details["schema_version"] == SCHEMA_VERSION + 6


def test_from_pretrained_names_repository_and_file_when_the_json_is_broken(hub):
    hub.put(CONFIG_FILE, TEXT[:-5])
    assert read().slug == "config-file"


def test_from_pretrained_says_unreachable_when_the_server_fails(hub):
    hub.status = 500
    assert read().slug == "hub-unreachable"


def test_from_pretrained_says_unreachable_when_the_server_is_down(monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    point_at(f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
    error = read()
    assert isinstance(error, HubError)
    assert error.slug == "hub-unreachable"


def test_from_pretrained_takes_the_cached_file_when_the_server_fails_later(hub):
    hub.put(CONFIG_FILE, TEXT)
    PorosConfig.from_pretrained(REPOSITORY)
    hub.status = 500
    assert PorosConfig.from_pretrained(REPOSITORY) == CONFIG


def test_from_pretrained_asks_nothing_when_only_local_files_count(hub):
    hub.put(CONFIG_FILE, TEXT)
    assert read(local_files_only=True).slug == "hub-unreachable"
    assert hub.requests == []


def test_push_to_hub_makes_the_repository_and_commits_the_file(hub):
    address = CONFIG.push_to_hub(REPOSITORY, token=TOKEN, private=True)
    assert address.startswith(hub.address)
    made = hub.created[0]  # huggingface_hub 1 says private, 2 says visibility
    assert made.get("private") is True or made.get("visibility") == "private"
    assert PorosConfig.from_dict(json.loads(hub.uploaded()[CONFIG_FILE])) == CONFIG


def test_push_to_hub_commits_to_the_revision_that_is_given(hub):
    CONFIG.push_to_hub(REPOSITORY, token=TOKEN, revision="next")
    assert ("POST", f"/api/models/{REPOSITORY}/commit/next") in hub.requests


@pytest.mark.parametrize(("token", "slug"), [(False, "hub-token"), (READ_ONLY, "hub-forbidden")])
def test_push_to_hub_says_why_when_it_is_refused(token, slug, hub):
    with pytest.raises(HubError) as caught:
        CONFIG.push_to_hub(REPOSITORY, token=token)
    assert (caught.value.slug, caught.value.details["repository"]) == (slug, REPOSITORY)


def test_push_to_hub_says_unreachable_when_the_server_fails(hub):
    hub.status = 501
    with pytest.raises(HubError) as caught:
        CONFIG.push_to_hub(REPOSITORY, token=TOKEN)
    assert caught.value.slug == "hub-unreachable"


def test_migrations_lead_from_every_older_schema_to_the_present_one():
    assert sorted(config_module.MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_from_dict_migrates_step_by_step_when_the_schema_is_older(monkeypatch):
    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {"slots" if key == "slot_count" else key: value for key, value in values.items()}

    def rename_again(values: dict[str, Any]) -> dict[str, Any]:
        return {"num_slots" if key == "slots" else key: value for key, value in values.items()}

    monkeypatch.setattr(config_module, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(config_module, "MIGRATIONS", {1: rename, 2: rename_again})
    read = PorosConfig.from_dict({"schema_version": 1, "slot_count": 5})
    assert read == PorosConfig(num_slots=5)
    assert read.to_dict()["schema_version"] == 3


def test_from_dict_leaves_migrated_names_unknown_when_the_schema_is_present(monkeypatch):
    monkeypatch.setattr(config_module, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(config_module, "MIGRATIONS", {1: lambda values: {}})
    with pytest.raises(ConfigError) as caught:
        PorosConfig.from_dict({"slot_count": 5})
    assert caught.value.slug == "config-key"
