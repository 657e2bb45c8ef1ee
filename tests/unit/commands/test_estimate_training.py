"""`accelerate estimate-memory --batch_size`: a traced step of a configuration or of the user's function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accelerate.base import ConfigurationError, is_torch_version
from accelerate.commands.estimate import estimate_command, estimate_command_parser
from accelerate.commands.estimate_sizes import OPTIMIZERS

FACTORIES = """
import torch
from torch import nn

def whole():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, torch.zeros(2, 64), lambda model, batch: model(batch).mean()

def without_loss():
    return nn.Linear(64, 64), torch.zeros(2, 64)

def wrong_shape():
    return nn.Linear(64, 64), torch.zeros(2, 63), lambda model, batch: model(batch).mean()

def frozen():
    model, *others = whole()
    return model.requires_grad_(False), *others

def lazy():
    return nn.LazyLinear(4), [torch.ones(2, 4)], lambda model, batch: model(*batch).sum()

def missing_key():
    raise KeyError("size")

class Asserting(nn.Linear):
    def forward(self, values):
        raise AssertionError("too small")

def asserting():
    return Asserting(4, 4), [torch.ones(2, 4)], lambda model, batch: model(*batch).sum()

def number():
    return 3

def alone():
    return nn.Linear(4, 4)

def failing():
    raise ValueError("no such size")
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=200,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    estimate_command(estimate_command_parser().parse_args(list(words)))
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(estimate(capsys, *words, "--json"))


def test_a_configuration_is_planned(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, llama, "--batch_size", "2", "--sequence_length", "32")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(llama))
    size = sum(parameter.nbytes for parameter in model.parameters())
    parts = found["device_bytes"]
    assert parts["parameters"] == size
    assert parts["optimizer"] == pytest.approx(2 * size, rel=0.001)
    assert parts["total"] == sum(value for name, value in parts.items() if name != "total")
    assert found["layout"]["name"] == "none"
    twice = facts(capsys, llama, "--batch_size", "64", "--sequence_length", "32")["device_bytes"]
    once = facts(capsys, llama, "--batch_size", "32", "--sequence_length", "32")["device_bytes"]
    assert twice["activations"] == pytest.approx(2 * once["activations"], rel=0.05)


@pytest.mark.slow
def test_flags_change_the_parts(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (llama, "--batch_size", "64", "--sequence_length", "64")
    plain = facts(capsys, *words)["device_bytes"]

    def total(*flags: str) -> int:
        return int(facts(capsys, *words, *flags)["device_bytes"]["total"])

    assert total("--gradient_checkpointing") < plain["total"]
    assert total("--mixed_precision", "bf16") < plain["total"]
    assert total("--gradient_accumulation_steps", "4") > plain["total"]
    assert total("--optimizer", "sgd") == plain["total"] - plain["optimizer"]
    half = facts(capsys, *words, "--parameter_dtype", "bfloat16")["device_bytes"]
    assert 2 * half["parameters"] == plain["parameters"]


def test_offloaded_inputs_of_blocks_are_on_the_host(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.LlamaConfig.from_pretrained(llama, num_hidden_layers=8).save_pretrained(tmp_path)
    words = (str(tmp_path), "--batch_size", "64", "--sequence_length", "64", "--gradient_checkpointing")
    kept, offloaded = facts(capsys, *words), facts(capsys, *words, "--offload_activations")
    saved = kept["device_bytes"]["total"] - offloaded["device_bytes"]["total"]
    assert kept["host_bytes"] == 0
    assert 0 < saved < offloaded["host_bytes"]
    assert offloaded["layout"]["name"] == "none + checkpointing + offload activations"
    assert "host, for each process: " in estimate(capsys, *words, "--offload_activations")


OLD_ADAGRAD = pytest.mark.skipif(
    is_torch_version("<", "2.13"), reason="Adagrad of this torch creates its state in its constructor"
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[OLD_ADAGRAD] if name == "adagrad" else []) for name in sorted(OPTIMIZERS)],
)
def test_each_optimizer_has_its_state(name: str, factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate.commands.model_tensors import Weight

    weights = [Weight("", shape, "F32") for shape in ((64, 64), (64,), (64, 64), (64,))]
    found = facts(capsys, f"{factories}:whole", "--batch_size", "2", "--optimizer", name)
    assert found["device_bytes"]["optimizer"] == pytest.approx(OPTIMIZERS[name](weights), abs=64)


@pytest.mark.slow
def test_devices_get_a_bar_a_batch_size_and_layouts(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (llama, "--batch_size", "8", "--sequence_length", "64", "--devices", "4x20MB")
    shown = estimate(capsys, *words)
    assert "Layouts that fit 4x20MB, without offload and with the least communication first" in shown
    assert "device 0 to 3, each: [P" in shown
    found = facts(capsys, *words)
    largest = found["devices"]["largest_batch_size"]
    assert f"{largest:,}" in shown

    def total(size: int) -> int:
        chosen = found["layout"]
        flags = ["--sharding", chosen["sharding"], "--tp_size", str(chosen["tensor_parallel"])]
        flags += ["--gradient_checkpointing"] * chosen["checkpointing"]
        flags += ["--offload_activations"] * chosen["offload_activations"]
        words = (llama, "--batch_size", str(size), "--sequence_length", "64", "--num_processes", "4")
        return int(facts(capsys, *words, *flags)["device_bytes"]["total"])

    assert total(largest) <= 20 * 10**6 < total(largest + 1)
    assert [each["name"] for each in found["fitting_layouts"]][0] == found["layout"]["name"]


@pytest.mark.slow
def test_the_output_names_devices_that_no_layout_fits(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = estimate(capsys, llama, "--batch_size", "8", "--devices", "2x1MB")
    assert "No layout fits 2x1MB" in shown
    assert "fits in this layout: none" in shown


def test_offloaded_parts_are_on_the_host(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (llama, "--batch_size", "2", "--num_processes", "2", "--offload", "all")
    found = facts(capsys, *words)
    assert found["device_bytes"]["parameters"] == 0
    assert found["host_bytes"] > 0
    assert "host, for each process" in estimate(capsys, *words)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}  # fmt: skip
    folder = tmp_path_factory.mktemp("mixtral")
    config = transformers.MixtralConfig(**sizes, architectures=["MixtralForCausalLM"])
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_experts_are_shared_by_ranks(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (mixtral, "--batch_size", "2", "--sequence_length", "64")

    def parameters(*flags: str) -> int:
        return int(facts(capsys, *words, *flags)["device_bytes"]["parameters"])

    whole = parameters()
    experts = 2 * 8 * 3 * 64 * 256 * 4
    assert parameters("--num_processes", "4", "--sharding", "none", "--ep_size", "4") == (
        whole - experts * 3 // 4
    )
    assert parameters("--num_processes", "4", "--ep_size", "2") == whole // 4
    args = estimate_command_parser().parse_args([*words, "--num_processes", "3", "--ep_size", "3"])
    with pytest.raises(ConfigurationError, match="ep_size=3: MixtralExperts has 8 experts.*1, 2, 4, 8"):
        estimate_command(args)


@pytest.mark.slow
def test_layouts_of_a_model_with_experts_share_them(mixtral: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (mixtral, "--batch_size", "2", "--sequence_length", "64", "--devices", "2x100MB")
    names = [each["name"] for each in facts(capsys, *words)["fitting_layouts"]]
    assert {"ddp", "ddp + ep 2", "full_shard", "full_shard + ep 2"} <= set(names)


def test_ranks_that_divide_sequences_have_a_part_of_the_activations(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (llama, "--batch_size", "2", "--sequence_length", "64", "--num_processes", "4")
    whole, divided = facts(capsys, *words), facts(capsys, *words, "--sp_size", "2")
    assert divided["layout"]["name"] == "full_shard + sp 2"
    assert divided["device_bytes"]["parameters"] == whole["device_bytes"]["parameters"]
    assert divided["device_bytes"]["activations"] <= whole["device_bytes"]["activations"] / 2
    args = estimate_command_parser().parse_args([*words, "--sp_size", "3"])
    with pytest.raises(ConfigurationError, match="--sp_size=3.*4 processes"):
        estimate_command(args)


def test_each_micro_batch_of_a_pipeline_has_the_given_size(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (llama, "--batch_size", "2", "--sequence_length", "64", "--num_processes", "2", "--pp_size", "2")
    assert facts(capsys, *words)["batch_size"] == 16
    assert "batch size 16 in 8 micro-batches" in estimate(capsys, *words)


@pytest.mark.parametrize(
    ("model", "config", "sizes"),
    [
        ("ViTForImageClassification", "ViTConfig", {"image_size": 32, "patch_size": 8, "hidden_size": 48,
                                                    "num_attention_heads": 4, "num_hidden_layers": 2}),
        ("BertForSequenceClassification", "BertConfig", {"hidden_size": 48, "num_attention_heads": 4,
                                                         "num_hidden_layers": 2, "vocab_size": 200}),
        ("BertForQuestionAnswering", "BertConfig", {"hidden_size": 48, "num_attention_heads": 4,
                                                    "num_hidden_layers": 2, "vocab_size": 200}),
        ("BertModel", "BertConfig", {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
                                     "vocab_size": 200}),
        ("T5ForConditionalGeneration", "T5Config", {"d_model": 48, "d_ff": 64, "d_kv": 12, "num_heads": 4,
                                                    "num_layers": 2, "vocab_size": 200,
                                                    "decoder_start_token_id": 0}),
    ],
)  # fmt: skip
def test_a_batch_is_made_from_the_configuration(
    model: str, config: str, sizes: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    getattr(transformers, config)(**sizes, architectures=[model]).save_pretrained(tmp_path)
    path = str(tmp_path / "config.json")
    assert facts(capsys, path, "--batch_size", "64")["device_bytes"]["activations"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("M:whole",), "add --batch_size"),
        (("M:whole", "--batch_size", "0"), "--batch_size=0: it is less than 1"),
        (("M:none", "--batch_size", "2"), "has no attribute 'none'"),
        (("no_such_module:none", "--batch_size", "2"), "No module named 'no_such_module'"),
        (("M:failing", "--batch_size", "2"), "no such size"),
        (("M:number", "--batch_size", "2"), "it returned int. Return model, batch"),
        (("M:alone", "--batch_size", "2"), "it returned no batch"),
        (("M:frozen", "--batch_size", "2"), "no parameters that train"),
        (("M:lazy", "--batch_size", "2"), "have no shape yet"),
        (("M:missing_key", "--batch_size", "2"), "cannot be imported and called: KeyError: 'size'"),
        (("M:asserting", "--batch_size", "2"), "its training step fails: AssertionError: too small"),
        (("M:without_loss", "--batch_size", "2"), "The output of Linear has no loss"),
        (("M:wrong_shape", "--batch_size", "2"), "its training step fails: RuntimeError"),
        (("M:whole", "--batch_size", "2", "--devices", "8by80"), "Write 8x80GB"),
        (("M:whole", "--batch_size", "2", "--devices", "8x80GB", "--num_processes", "4"), "has 8 devices"),
        (("M:whole", "--batch_size", "2", "--num_processes", "4", "--tp_size", "3"), "a divisor"),
        (
            ("M:whole", "--batch_size", "2", "--num_processes", "6", "--ep_size", "2", "--pp_size", "2"),
            "--ep_size x --pp_size=4: 6 processes",
        ),
        (
            ("M:whole", "--batch_size", "2", "--num_processes", "2", "--ep_size", "2"),
            "ep_size=2: Sequential has no modules of experts",
        ),
        (("M:whole", "--batch_size", "2", "--offload", "all"), "none keeps parameters on the device"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_error(words: tuple[str, ...], message: str, factories: str) -> None:
    args = estimate_command_parser().parse_args([word.replace("M:", f"{factories}:") for word in words])
    with pytest.raises(ConfigurationError, match=message):
        estimate_command(args)


@pytest.mark.parametrize(
    "flags", [("--devices", "8x80GB"), ("--gradient_checkpointing",), ("--tp_size", "2"), ("--ep_size", "2")]
)
def test_flags_of_a_step_need_a_batch_size(flags: tuple[str, ...], llama: str) -> None:
    args = estimate_command_parser().parse_args([llama, *flags])
    with pytest.raises(ConfigurationError, match=f"{flags[0]} needs a training step: add --batch_size"):
        estimate_command(args)


def test_weights_alone_cannot_be_trained(tmp_path: Path, llama: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    for model in (tmp_path, tmp_path / "model.safetensors"):
        args = estimate_command_parser().parse_args([str(model), "--batch_size", "2"])
        with pytest.raises(ConfigurationError, match="a training step needs the model"):
            estimate_command(args)
    args = estimate_command_parser().parse_args([llama, "--batch_size", "2", "--sequence_length", "10000000"])
    with pytest.raises(ConfigurationError, match="sequence_length=10000000"):
        estimate_command(args)


@pytest.mark.slow
def test_a_step_is_planned_without_memory_for_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    found = facts(
        capsys, str(tmp_path), "--batch_size", "1", "--sequence_length", "2048", "--devices", "8x80GB"
    )
    assert found["device_bytes"]["total"] > 10**10
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("architectures", [None, ["LlamaForCausalLM"]], ids=str)
def test_an_assumed_class_is_named(
    architectures: list[str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, vocab_size=200, architectures=architectures).save_pretrained(tmp_path)
    words = (str(tmp_path), "--batch_size", "1", "--sequence_length", "8")
    kind = "LlamaForCausalLM" if architectures else "LlamaModel"
    assert facts(capsys, *words)["model_class"] == kind
    shown = "Model: LlamaModel, since its configuration names no class in architectures."
    assert (shown in estimate(capsys, *words)) == (architectures is None)


CONFIGS = Path(__file__).parent / "configs"
WEIGHTS = {
    "llama-3-8b": 8.03e9,
    "gpt-oss-20b": 20.9e9,
    "gemma-3-27b": 27.4e9,
    "qwen3-30b-a3b": 30.5e9,
    "gpt-oss-120b": 116.8e9,
    "deepseek-v3": 671e9,
}
"""Configuration -> parameters, as published."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_large_models_have_the_bytes_of_a_closed_form(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(CONFIGS / f"{name}.json"), "--batch_size", "1", "--mixed_precision", "bf16")
    found = facts(capsys, *words, "--sharding", "full_shard", "--devices", "8x80GB")
    parts, weights = found["device_bytes"], WEIGHTS[name]
    assert parts["parameters"] == pytest.approx(4 * weights / 8, rel=0.02)
    assert parts["optimizer"] == pytest.approx(8 * weights / 8, rel=0.02)
    # In the optimizer step each device has gradients too: 16 bytes for each parameter.
    fits = 16 * weights / 8 < 80e9
    without_offload = [each for each in found["fitting_layouts"] if "offload" not in each["name"]]
    assert bool(without_offload) == fits


def test_a_class_that_transformers_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=200, architectures=["FooForBar"])
    config.save_pretrained(tmp_path)
    words = [str(tmp_path), "--batch_size", "1", "--sequence_length", "8"]
    estimate_command(estimate_command_parser().parse_args(words))
    assert "since the class FooForBar in its architectures is not one of" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"hidden_size": "x"}, {"hidden_size": 100, "num_attention_heads": 7}])
def test_a_wrong_configuration_is_one_error(changes: dict[str, Any], tmp_path: Path) -> None:
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **changes}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    args = estimate_command_parser().parse_args([str(tmp_path), "--batch_size", "1"])
    with pytest.raises(ConfigurationError, match="transformers cannot build it.*hidden.size") as raised:
        estimate_command(args)
    assert raised.value.__cause__ is not None
