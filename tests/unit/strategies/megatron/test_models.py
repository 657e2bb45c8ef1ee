"""Models are built from Megatron-LM's arguments by the classes of `megatron.core`."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.strategies.megatron import model_provider_func

from .conftest import Fake

ARGUMENTS = {
    "padded_vocab_size": 64,
    "max_position_embeddings": 32,
    "untie_embeddings_and_output_weights": True,
    "rotary_percent": 0.5,
    "rotary_base": 10000,
    "transformer_impl": "local",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "use_rope_scaling": False,
    "fp16_lm_cross_entropy": False,
    "bert_binary_head": True,
    "encoder_num_layers": None,
    "num_layers": 3,
    "decoder_num_layers": 2,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
}


@pytest.fixture
def classes(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(name: str) -> Any:
        return lambda *args, **kwargs: (name, args, kwargs)

    content: dict[str, dict[str, Any]] = {
        "core.models": {},
        "core.models.gpt": {"GPTModel": SimpleNamespace},
        "core.models.gpt.gpt_layer_specs": {"get_gpt_decoder_block_spec": spec("gpt")},
        "core.models.bert": {},
        "core.models.bert.bert_model": {"BertModel": SimpleNamespace},
        "core.models.bert.bert_layer_specs": {
            "bert_layer_local_spec": "local",
            "get_bert_layer_with_transformer_engine_spec": lambda: "engine",
        },
        "core.models.T5": {"T5Model": SimpleNamespace},
        "core.models.T5.t5_spec": {
            f"get_t5_{part}_with_{kind}_block_spec": spec(f"{part} {kind}")
            for part in ("encoder", "decoder")
            for kind in ("local", "transformer_engine")
        },
    }
    for name, values in content.items():
        module = ModuleType(f"megatron.{name}")
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    arguments: Any = sys.modules["megatron.training.arguments"]
    arguments.core_transformer_config_from_args = lambda args: SimpleNamespace(num_layers=args.num_layers)


def build(fake: Fake, family: str, changed: dict[str, Any] | None = None, **given: Any) -> Any:
    fake.args = Namespace(model_type_name=family, **{**ARGUMENTS, **(changed or {})})
    return model_provider_func(**given)


@pytest.mark.usefixtures("classes")
def test_gpt_is_built_with_the_arguments_of_its_stage(fake: Fake) -> None:
    model = build(fake, "gpt", pre_process=False, vp_stage=1, config=None, pg_collection=None)
    assert (model.pre_process, model.post_process, model.vp_stage) == (False, True, 1)
    assert (model.vocab_size, model.max_sequence_length) == (64, 32)
    assert model.share_embeddings_and_output_weights is False
    name, _, options = model.transformer_layer_spec
    assert (name, options["use_transformer_engine"], options["vp_stage"]) == ("gpt", False, 1)
    assert not hasattr(model, "pg_collection")


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize(("kind", "spec"), [("local", "local"), ("transformer_engine", "engine")])
def test_bert(fake: Fake, kind: str, spec: str) -> None:
    model = build(fake, "bert", {"transformer_impl": kind})
    assert (model.num_tokentypes, model.add_binary_head, model.transformer_layer_spec) == (2, True, spec)
    assert build(fake, "bert", {"bert_binary_head": False}).num_tokentypes == 0


@pytest.mark.usefixtures("classes")
def test_t5(fake: Fake) -> None:
    model = build(fake, "t5", add_decoder=False)
    assert (model.encoder_config.num_layers, model.config.num_layers) == (3, 2)
    assert model.transformer_encoder_layer_spec == ("encoder local", (3,), {})
    assert model.transformer_decoder_layer_spec == ("decoder local", (2,), {})
    assert (model.add_encoder, model.add_decoder) == (True, False)


@pytest.mark.usefixtures("classes")
def test_a_given_configuration_is_used(fake: Fake) -> None:
    config = SimpleNamespace(num_layers=7)
    assert build(fake, "gpt", config=config).config is config


def test_other_families_are_refused(fake: Fake) -> None:
    with pytest.raises(ConfigurationError, match="custom_model_provider_function"):
        build(fake, "other")
