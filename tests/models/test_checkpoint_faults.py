"""Everything that can be wrong with a folder of weights: each is refused, and the message says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_cases import machine_of
from safetensors.torch import save_file
from torch import Tensor

import checkpoints
from recurra.errors import CheckpointError, ConfigError
from recurra.models import load_model, read_config


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Healthy checkpoints, never changed."""
    root = tmp_path_factory.mktemp("healthy")
    mamba = checkpoints.write_mamba(root / "mamba", num_hidden_layers=2)
    return {
        "mamba": mamba,
        "mamba2": checkpoints.write_mamba2(root / "mamba2", num_hidden_layers=2),
        "shards": checkpoints.write_mamba2(root / "shards", num_hidden_layers=2, shards=2),
        "original": checkpoints.write_mamba_ssm(mamba, root / "original"),
    }


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a healthy checkpoint, to be spoilt."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(originals[name], tmp_path / name))

    return make


def load(folder: Path, load_format: str = "auto") -> torch.nn.Module:
    model = load_model(
        read_config(folder), ops=machine_of("cpu", "reference").ops, device=torch.device("cpu"),
        weight_dtype=torch.float32, act_dtype=torch.float32, load_format=load_format,
    )  # fmt: skip
    assert isinstance(model, torch.nn.Module)
    return model


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a folder with one file."""
    tensors = checkpoints.read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


IN_PROJ = "backbone.layers.1.mixer.in_proj.weight"


def test_missing_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    rewrite(folder, lambda tensors: tensors.pop(IN_PROJ))
    with pytest.raises(CheckpointError, match=f"missing: {IN_PROJ}"):
        load(folder)


def test_left_over_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    rewrite(folder, lambda tensors: tensors.update({"backbone.layers.2.norm.weight": torch.ones(48)}))
    with pytest.raises(
        CheckpointError, match=r"left over, used by nothing: backbone\.layers\.2\.norm\.weight"
    ):
        load(folder)


def test_many_faults_are_named_at_once_and_briefly(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    configure(folder, num_hidden_layers=40)
    with pytest.raises(
        CheckpointError, match=r"missing: .*layers\.10\.mixer\.A_log.* and \d+ more"
    ) as caught:
        load(folder)
    assert len(str(caught.value)) < 1000


def test_bias_that_the_configuration_switches_off(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    configure(folder, use_conv_bias=False)
    with pytest.raises(CheckpointError, match=r"left over.*conv1d\.bias"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (IN_PROJ, (240, 47)),
        ("backbone.embeddings.weight", (319, 48)),
        ("backbone.layers.0.mixer.A_log", (8, 1)),
        ("backbone.layers.0.mixer.conv1d.weight", (136, 4, 4)),
        ("backbone.layers.0.mixer.conv1d.weight", (4, 1, 136)),
    ],
)
def test_misshapen_tensor(copy: Callable[[str], Path], name: str, shape: tuple[int, ...]) -> None:
    folder = copy("mamba2")
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError, match="has shape") as caught:
        load(folder)
    assert name in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_quantised_weights_are_refused_not_cast(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    rewrite(folder, lambda t: t.update({IN_PROJ: t[IN_PROJ].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=f"{IN_PROJ} is stored as F8_E4M3"):
        load(folder)
    rewrite(folder, lambda t: t.update({IN_PROJ: t[IN_PROJ].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{IN_PROJ} is stored as I8"):
        load(folder)


def test_nothing_is_loaded_into_a_model_that_does_not_fit(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recurra.models.files import WeightFiles

    folder = copy("mamba2")
    rewrite(folder, lambda tensors: tensors.pop(IN_PROJ))
    monkeypatch.setattr(WeightFiles, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_truncated_file(copy: Callable[[str], Path], keep: float) -> None:
    folder = copy("mamba2")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(\d+ bytes\) is damaged or cut short"):
        load(folder)


def test_corrupt_header(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* is damaged"):
        load(folder)


def test_lfs_pointer(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        load(folder)


def test_missing_folder_and_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        read_config(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"neither config\.json nor params\.json"):
        read_config(tmp_path)


def test_no_weights(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r'no \*\.safetensors file \(load_format="dummy" needs none\)'):
        load(folder)
    load(folder, "dummy")


def test_shards_without_their_index(copy: Callable[[str], Path], originals: dict[str, Path]) -> None:
    folder = copy("shards")
    (folder / "model.safetensors.index.json").unlink()
    want = load(originals["shards"]).state_dict()
    for name, value in load(folder).state_dict().items():
        assert torch.equal(value, want[name]), name


def test_missing_shard(copy: Callable[[str], Path]) -> None:
    folder = copy("shards")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"not in the folder: {shards[1].name}"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=rf"holds {len(shards) - 1} of the {len(shards)} files model-\*"
    ):
        load(folder)


def test_damaged_index(copy: Callable[[str], Path]) -> None:
    index = copy("shards") / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(index.parent)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json can't be read as JSON"):
        load(index.parent)


def test_a_tensor_in_two_files(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    save_file({IN_PROJ: torch.zeros(1)}, folder / "more.safetensors")
    with pytest.raises(
        CheckpointError, match=f"{IN_PROJ} is in both .*model.safetensors and .*more.safetensors"
    ):
        load(folder)


def _pickled(folder: Path, content: object | None = None) -> Path:
    """Replace the weights by a pickle, as the original checkpoints have them."""
    tensors = checkpoints.read_tensors(folder)
    if "lm_head.weight" in tensors:  # tied tables share memory there
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    torch.save(tensors if content is None else content, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickle_is_refused_with_a_way_out(copy: Callable[[str], Path]) -> None:
    folder = _pickled(copy("original"))
    with pytest.raises(CheckpointError, match="can run any code") as caught:
        load(folder)
    assert 'load_format="pt"' in str(caught.value)
    assert "python -m recurra.models.convert" in str(caught.value)


def test_pickle_when_asked_for(copy: Callable[[str], Path], originals: dict[str, Path]) -> None:
    got = load(_pickled(copy("original")), "pt").state_dict()
    for name, value in load(originals["mamba"]).state_dict().items():
        assert torch.equal(got[name], value), name


class Malicious:
    """Unpickling it calls a function."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return print, ("ran",)


def test_pickle_with_more_than_tensors(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _pickled(copy("original"), {"x": Malicious()})
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        load(folder, "pt")
    assert "ran" not in capsys.readouterr().out
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="plain table of tensors"):
        load(folder, "pt")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r'load_format="pt" reads pytorch_model\.bin, and .* has none'):
        load(folder, "pt")


def test_unknown_load_format(originals: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"load_format='gguf'.*auto, dummy, pt"):
        load(originals["mamba"], "gguf")


def test_tied_head(copy: Callable[[str], Path]) -> None:
    """A stored copy of a tied head must be the embedding; an untied head must be there."""
    folder = copy("original")
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].mul_(2.0))
    with pytest.raises(CheckpointError, match="but the two stored tensors differ"):
        load(folder)
    configure(folder, tie_embeddings=False)
    head = load(folder).state_dict()["head.weight"]
    assert torch.equal(head, checkpoints.read_tensors(folder)["lm_head.weight"])
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(folder)
    configure(folder, tie_embeddings=True)
    model = load(folder)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_both_orders_of_the_filters_axes(
    copy: Callable[[str], Path], originals: dict[str, Path], name: str
) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        for key, value in tensors.items():
            if key.endswith("conv1d.weight"):
                tensors[key] = value.transpose(1, 2).contiguous()

    folder = copy(name)
    rewrite(folder, swap)
    want = load(originals[name]).state_dict()
    for key, value in load(folder).state_dict().items():
        assert torch.equal(value, want[key]), key


def test_mistral_and_transformers_weights_side_by_side(copy: Callable[[str], Path]) -> None:
    """Folders often hold both; the configuration that is read decides which are meant."""
    folder = copy("mamba2")
    save_file({"model.nonsense": torch.zeros(1)}, folder / "consolidated.safetensors")
    load(folder)
    tensors = {f"model.{k}": v for k, v in checkpoints.read_tensors(folder).items() if k != "model.nonsense"}
    save_file(tensors, folder / "consolidated.safetensors")
    (folder / "model.safetensors").unlink()
    load(folder)


def test_progress_counts_bytes_to_the_end(originals: dict[str, Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(
        read_config(originals["shards"]), ops=machine_of("cpu", "reference").ops, device=torch.device("cpu"),
        weight_dtype=torch.float32, act_dtype=torch.float32,
        progress=lambda what, done, total: seen.append((what, done, total)),
    )  # fmt: skip
    stored = sum(t.nbytes for t in checkpoints.read_tensors(originals["shards"]).values())
    assert seen[-1] == ("loading weights", stored, stored)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
