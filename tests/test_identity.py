"""Hashes of models and tokenizers, and the refusal of drafters that do not fit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foredraft.infer.drafter_card import (
    CARD_FILE,
    DrafterCard,
    check_drafter,
    read_drafter_card,
    write_drafter_card,
)
from foredraft.infer.identity import (
    TargetIdentity,
    chat_template_sha256,
    identify_target,
    read_sha256,
    tokenizer_sha256,
)

TARGET = TargetIdentity(id="org/target", revision="0123456789abcdef", weights_sha256="a" * 64)
CARD = DrafterCard(family="lm", target=TARGET, tokenizer_sha256="b" * 64, draft_vocab=None, max_depth=64)


def test_weights_decide_not_the_name(tiny_target: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    original, copied = identify_target(str(tiny_target)), identify_target(str(copy))
    assert (original.id, copied.id) == ("tiny-target", "copy")
    assert original.is_same(copied)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert not original.is_same(identify_target(str(copy)))


def test_a_file_is_a_target(tiny_target: Path) -> None:
    identity = identify_target(str(tiny_target / "model.safetensors"))
    assert identity.id == "model.safetensors"
    assert identity.is_same(identify_target(str(tiny_target)))


def test_hub_cache_hash_is_taken_from_the_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--x"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / ("d" * 64)).write_bytes(b"weights")
    os.symlink(blobs / ("d" * 64), snapshot / "model.safetensors")
    monkeypatch.setattr("foredraft.infer.identity.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("foredraft.infer.identity.snapshot_download", lambda *_, **__: str(snapshot))
    expected = TargetIdentity(id="org/x", revision="c0ffee", weights_sha256="d" * 64)
    assert identify_target("org/x") == expected


def test_large_files_are_hashed_once(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.infer.identity.CACHED_FROM_BYTES", 0)
    monkeypatch.setattr("foredraft.infer.identity.constants.HF_HOME", str(tmp_path))
    first = identify_target(str(tiny_target))
    monkeypatch.setattr("foredraft.infer.identity.read_sha256", lambda _: pytest.fail("hashed again"))
    assert identify_target(str(tiny_target)) == first


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights, found \['config\.json'\]"):
        identify_target(str(tmp_path))


def test_tokenizer_hash_survives_use_and_save(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    before = tokenizer_sha256(tokenizer)
    tokenizer(["a", "long text"], padding="max_length", max_length=4, truncation=True)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_sha256(again) == before
    assert chat_template_sha256(again) != chat_template_sha256(AutoTokenizer.from_pretrained(tiny_target))


def test_an_added_token_is_another_tokenizer(tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    before = tokenizer_sha256(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    assert tokenizer_sha256(tokenizer) != before


def test_card_round_trip(tmp_path: Path) -> None:
    card = replace(CARD, draft_vocab="draft_vocab.safetensors", training={"tokens": 7}, measured={"k": 5})
    write_drafter_card(tmp_path, card)
    assert read_drafter_card(tmp_path) == card
    assert json.loads((tmp_path / CARD_FILE).read_text())["schema"] == 1


def test_plain_model_folder_has_no_card(tiny_target: Path) -> None:
    assert read_drafter_card(tiny_target) is None


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"schema": 9}', '{"schema": 1, "target": {}}', '{"schema": 1, "surprise": 2}'],
)
def test_a_bad_card_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / CARD_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"foredraft\.json is not a drafter description"):
        read_drafter_card(tmp_path)


def test_another_tokenizer_is_always_refused() -> None:
    with pytest.raises(ValueError, match="another tokenizer than target org/target"):
        check_drafter(CARD, TARGET, "c" * 64, allow_target_mismatch=True)


def test_another_target_is_refused_unless_allowed() -> None:
    other = replace(TARGET, id="org/other", weights_sha256="e" * 64)
    with pytest.raises(ValueError, match=r"target org/target at 0123456789ab .*allow-target-mismatch"):
        check_drafter(CARD, other, CARD.tokenizer_sha256)
    check_drafter(CARD, other, CARD.tokenizer_sha256, allow_target_mismatch=True)
    check_drafter(CARD, replace(TARGET, id="elsewhere", revision=None), CARD.tokenizer_sha256)


def test_hash_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "é"}')
    assert read_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
