import json
import shutil
import struct

import numpy as np
import pytest

from receipts.errors import DigestMismatchError, SnapshotError
from support.tiny_qwen35 import Sizes, write_snapshot
from teacher.snapshot.folder import INDEX, open_snapshot, read_snapshot, required_tensors
from teacher.snapshot.weights import WeightSource


def read_header(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path, change):
    """Change the header's tensors; bytes of dropped ones go too."""
    header, data = read_header(path)
    tensors = {name: (form, data[slice(*form["data_offsets"])]) for name, form in header.items() if name[0] != "_"}
    tensors = change(tensors)
    made, body = {}, b""
    for name, (form, raw) in tensors.items():
        made[name] = {**form, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    raw_header = json.dumps(made).encode()
    path.write_bytes(struct.pack("<Q", len(raw_header)) + raw_header + body)


def split(folder, parts=2):
    """Cut the single file into shards with an index."""
    header, data = read_header(folder / "model.safetensors")
    names = [name for name in header if name != "__metadata__"]
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[part::parts]
        shutil.copy(folder / "model.safetensors", folder / file)
        rewrite(folder / file, lambda tensors, mine=mine: {name: tensors[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": len(data)}, "weight_map": weight_map}))
    return weight_map


def test_a_snapshot_has_every_text_tensor_and_counts_the_rest(tiny):
    snapshot = open_snapshot(tiny)
    assert set(snapshot.tensors) == {name for name, _ in required_tensors(snapshot.config)}
    assert snapshot.extras == {"vision": 1, "mtp": 1}
    assert snapshot.record()["manifest"]["root_sha256"] == snapshot.manifest.root_digest.hex


def test_weights_are_the_stored_values_exactly(tiny):
    snapshot = read_snapshot(tiny)
    header, data = read_header(tiny / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    raw = np.frombuffer(data[slice(*header[name]["data_offsets"])], dtype="<u2").astype(np.uint32) << 16
    stored = WeightSource(snapshot).layer(1)["mlp.up_proj.weight"]
    assert np.array_equal(stored.float32(), raw.view(np.float32).reshape(stored.shape))
    table = WeightSource(snapshot).embedding_rows([3, 0, 3]).float32()
    assert np.array_equal(table[0], table[2])
    assert table.shape == (3, snapshot.config.hidden_size)


def test_shards_read_the_same_as_one_file(tiny, snapshot):
    split(snapshot)
    one, many = WeightSource(read_snapshot(tiny)), WeightSource(read_snapshot(snapshot))
    for name, stored in one.layer(0).items():
        assert np.array_equal(stored.bits, many.layer(0)[name].bits)


def test_an_index_that_disagrees_with_its_shards_is_refused(snapshot):
    weight_map = split(snapshot)
    form = json.loads((snapshot / INDEX).read_text())
    name = next(iter(weight_map))

    def refuse(sentence, **changes):
        (snapshot / INDEX).write_text(json.dumps({**form, **changes}))
        with pytest.raises(SnapshotError, match=sentence):
            read_snapshot(snapshot)

    other = next(file for file in weight_map.values() if file != weight_map[name])
    refuse("it in model-00001", weight_map={**weight_map, name: other})
    refuse("mtp.gone.weight in .* got no such tensor", weight_map={**weight_map, "mtp.gone.weight": other})
    refuse("expected only tensors that", weight_map={n: f for n, f in weight_map.items() if n != name})
    refuse("expected the shard that", weight_map={**weight_map, name: "model-00009-of-00009.safetensors"})
    refuse("names of safetensors files in the folder", weight_map={**weight_map, name: "../x.safetensors"})
    refuse("expected a weight_map", weight_map=[1])
    (snapshot / INDEX).write_text(json.dumps({**form, "metadata": {"total_size": 1}}))
    assert any("total_size is 1" in warning for warning in read_snapshot(snapshot).warnings)


def test_a_missing_shard_names_an_unfinished_download_beside_it(snapshot):
    split(snapshot)
    (snapshot / "model-00002-of-00002.safetensors").rename(snapshot / "model-00002.incomplete")
    with pytest.raises(SnapshotError, match=r"model-00002-of-00002.*unfinished download: model-00002\.incomplete"):
        read_snapshot(snapshot)


def test_a_shard_that_no_index_names_is_refused(snapshot):
    split(snapshot)
    shutil.copy(snapshot / "model-00001-of-00002.safetensors", snapshot / "old.safetensors")
    with pytest.raises(SnapshotError, match=r"old\.safetensors: expected only shards"):
        read_snapshot(snapshot)


def test_a_folder_without_weights_is_refused(snapshot):
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(SnapshotError, match="got 0 files"):
        read_snapshot(snapshot)


def renamed(old, new):
    return lambda tensors: {new if name == old else name: value for name, value in tensors.items()}


def retyped(part, dtype, shape=None):
    def change(tensors):
        return {
            name: ({**form, "dtype": dtype, "shape": shape or form["shape"]} if name.endswith(part) else form, raw)
            for name, (form, raw) in tensors.items()
        }

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (renamed("lm_head.weight", "mtp.spare"), r"lm_head\.weight: expected the tensor in a shard, got none"),
        (renamed("mtp.fc.weight", "model.language_model.layers.9.x"), r"got model\.language_model\.layers\.9\.x"),
        (renamed("mtp.fc.weight", "model.language_model.layers.0.mlp.up_proj.weight_scale_inv"), r"not BF16"),
        (renamed("mtp.fc.weight", "model.norm.weight"), r"expected norm\.weight once"),
        (retyped("layers.0.mlp.up_proj.weight", "F16"), r"expected .* in BF16, got F16; the source is not BF16"),
        (retyped("layers.0.mlp.up_proj.weight", "BF16", [96, 160]), r"of shape \[160, 96\] by .* got \[96, 160\]"),
    ],
)
def test_tensors_that_are_not_the_configs_are_refused_by_name(snapshot, change, sentence):
    rewrite(snapshot / "model.safetensors", change)
    with pytest.raises(SnapshotError, match=sentence):
        read_snapshot(snapshot)


def test_a_tied_model_has_no_head_of_its_own(tmp_path):
    folder = write_snapshot(tmp_path / "tied", Sizes(tied=True, wrapped=False))
    snapshot = read_snapshot(folder)
    head = WeightSource(snapshot).head_rows(2, 5).float32()
    assert np.array_equal(head, WeightSource(snapshot).embedding_rows([2, 3, 4]).float32())


def test_a_tied_model_with_another_head_is_refused_and_with_the_same_is_noted(tmp_path):
    folder = write_snapshot(tmp_path / "tied", Sizes(tied=True, wrapped=False))

    def add(tensors):
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}

    rewrite(folder / "model.safetensors", add)
    assert any("repeats the tied embedding" in warning for warning in read_snapshot(folder).warnings)

    def spoil(tensors):
        form, raw = tensors["lm_head.weight"]
        return {**tensors, "lm_head.weight": (form, b"\1" + raw[1:])}

    rewrite(folder / "model.safetensors", spoil)
    with pytest.raises(SnapshotError, match=r"expected no lm_head\.weight, or one equal to the embedding"):
        read_snapshot(folder)


def test_a_resave_with_one_added_to_its_norms_is_noticed(snapshot):
    assert not any("re-saved" in warning for warning in read_snapshot(snapshot).warnings)

    def shift(tensors):
        made = {}
        for name, (form, raw) in tensors.items():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                values = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
                raised = (values.view(np.float32) + 1).view(np.uint32) >> 16
                raw = raised.astype("<u2").tobytes()  # noqa: PLW2901
            made[name] = (form, raw)
        return made

    rewrite(snapshot / "model.safetensors", shift)
    assert any("re-saved checkpoint with 1 added" in warning for warning in read_snapshot(snapshot).warnings)


def test_a_file_that_changes_during_a_run_is_named(snapshot):
    opened = open_snapshot(snapshot)
    opened.rehash()
    data = bytearray((snapshot / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (snapshot / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(DigestMismatchError, match=r"model\.safetensors: expected sha256"):
        opened.rehash()


@pytest.mark.parametrize("name", ["nowhere", "no/such-model", "/nowhere/at/all"])
def test_what_is_neither_folder_nor_cached_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SnapshotError, match=name):
        read_snapshot(name)


def test_a_revision_makes_no_sense_with_a_folder(tiny):
    with pytest.raises(SnapshotError, match="expected no revision with a folder, got 'main'"):
        read_snapshot(tiny, revision="main")


def test_a_hub_id_is_found_in_the_hubs_cache_with_its_commit(tiny, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub"
    repo = home / "models--org--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    folder = repo / "snapshots" / commit
    folder.mkdir()
    for number, path in enumerate(sorted(tiny.iterdir())):
        shutil.copy(path, repo / "blobs" / str(number))
        (folder / path.name).symlink_to(f"../../blobs/{number}")
    import subprocess
    import sys

    script = (
        "import sys, json; from teacher.snapshot.folder import open_snapshot; s = open_snapshot('org/tiny');"
        "print(json.dumps([s.origin.name, s.origin.revision, s.origin.commit, s.manifest.root_digest.hex]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"HF_HUB_CACHE": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout) == ["org/tiny", "main", commit, open_snapshot(tiny).manifest.root_digest.hex]
