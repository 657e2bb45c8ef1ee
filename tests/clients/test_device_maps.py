"""Models of transformers with a device map, adapters of peft on them, pipelines of diffusers.

Tiny models are made from configurations. The packages `peft` and `diffusers` are not among those that the
tests install: without them their tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules

pytestmark = [  # what clients warn of among themselves
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = torch.arange(8).view(1, 8)


def build(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if family == "t5":
        sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config).eval()
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=4, tie_word_embeddings=family == "tied")
    return transformers.LlamaForCausalLM(config).eval()


def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one forward, and tokens of a generation."""
    more = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=TOKENS, **more).logits
        return logits, model.generate(TOKENS, max_new_tokens=4, do_sample=False)


def same(model: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(answers(model), answers(expected), strict=True))


@pytest.fixture(params=["llama", "tied", "t5"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = build(request.param)
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return model, tmp_path / "model"


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto", {"": "disk"}, "small"], ids=str)
def test_from_pretrained(saved: tuple[Any, Path], tmp_path: Path, device_map: Any) -> None:
    expected, folder = saved
    size = sum(parameter.nbytes for parameter in expected.parameters())
    more = {"device_map": "auto", "max_memory": {"cpu": 2 * size // 3}} if device_map == "small" else {}
    model = type(expected).from_pretrained(
        folder, **{"device_map": device_map, "offload_folder": tmp_path / "offload", **more}
    )
    assert same(model, expected)
    if device_map not in ("auto", {"": "cpu"}):
        assert "disk" in model.hf_device_map.values()
        assert any(parameter.is_meta for parameter in model.parameters())
        assert not list((tmp_path / "offload").iterdir()), "weights are mapped from where they are"
        model.save_pretrained(tmp_path / "again")
        assert same(type(expected).from_pretrained(tmp_path / "again"), expected)
    remove_hook_from_submodules(model)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_adapters_of_peft_on_offloaded_weights(tmp_path: Path, where: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = build("llama")
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).eval()

    model = adapted()
    _ = cpu_offload(model) if where == "memory" else disk_offload(model, tmp_path)
    with torch.no_grad():
        logits = adapted()(input_ids=TOKENS).logits
        assert torch.allclose(model(input_ids=TOKENS).logits, logits, atol=1e-6)
        merged = model.merge_and_unload()  # calls the hooks of single layers by hand
        assert torch.allclose(merged(input_ids=TOKENS).logits, logits, atol=1e-5)
    remove_hook_from_submodules(merged)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["enable_sequential_cpu_offload", "enable_model_cpu_offload"])
def test_pipelines_of_diffusers(how: str) -> None:
    diffusers = pytest.importorskip("diffusers")

    def pipeline() -> Any:
        torch.manual_seed(0)
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        sizes = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4}
        unet = diffusers.UNet2DModel(**sizes, layers_per_block=1, down_block_types=down, up_block_types=up)
        return diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler(10))

    def draw(pipe: Any) -> Any:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return pipe(num_inference_steps=2, generator=generator, output_type="np").images

    plain, offloaded = pipeline(), pipeline()
    getattr(offloaded, how)(device="cpu")
    assert (draw(plain) == draw(offloaded)).all()
    remove_hook_from_submodules(offloaded.unet)
