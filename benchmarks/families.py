"""Small models of many families, with a batch for each: what the memory of a training step is planned for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from accelerate import Accelerator

Batch = dict[str, Tensor]
TRANSFORMERS, OTHERS = 5.0, 10.0
"""Percent by which a plan may be above the allocations of a step."""
BELOW = 5.0
"""Percent by which a plan may be below them."""
WITH_WORKSPACES = {"ConvNeXt": 30.0, "nn.LSTM": 10.0, "nn.LSTM bidirectional": 10.0}
"""Percent for families whose kernels have large workspaces on the CPU, which a plan does not contain."""


@dataclass(frozen=True)
class Family:
    """How a model and a batch are made, and what its forward pass gets besides the batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    arguments: Mapping[str, Any]
    budget: float
    below: float = BELOW

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss in the output; of a model without one, the mean of its first output."""
        output: Any = model(**batch, **self.arguments)
        if isinstance(output, Tensor):
            return output if output.ndim == 0 else output.pow(2).mean()
        loss = getattr(output, "loss", None)
        return output[0].float().pow(2).mean() if loss is None else loss


def record_allocations(work: Callable[[], None]) -> int:
    """Return the peak of the bytes that torch's profiler records on the CPU while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    peak = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def plan_and_run(family: Family, accelerator: Accelerator) -> tuple[int, int]:
    """Return the peak that a plan predicts, and that of the third and fourth step of a loop.

    The loop has the output of the model, where that has a loss, until the next one.
    """
    torch.manual_seed(0)
    model, batch = family.build().train(), family.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with torch.no_grad():
        output: Any = model(**batch, **family.arguments)
    has_loss = getattr(output, "loss", None) is not None
    given = {**batch, **family.arguments} if has_loss else batch
    predicted = accelerator.plan_memory(model, optimizer, given, None if has_loss else family.loss).peak
    output = None
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        nonlocal output
        if has_loss:
            output = model(**given)
            loss = output.loss
        else:
            loss = family.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> None:
        step()
        step()

    steps()
    output = None
    states = [
        each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)
    ]
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *states, *batch.values()))
    return predicted, held + record_allocations(steps)


def of_config(model: str, config: str, sizes: Mapping[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def of_diffusers(model: str, sizes: Mapping[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, model)(**sizes)


def ids(batch: int, length: int, low: int = 3, high: int = 1000) -> Tensor:
    return torch.randint(low, high, (batch, length))


def text(batch: int = 4, length: int = 128) -> Batch:
    tokens = ids(batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_text(batch: int = 4, length: int = 512) -> Batch:
    return {**text(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def classified_text(batch: int = 8, length: int = 128) -> Batch:
    return {"input_ids": ids(batch, length), "labels": torch.zeros(batch, dtype=torch.long)}


def images(size: int = 64, batch: int = 4, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)


def classified_images(size: int = 64, batch: int = 4) -> Batch:
    return {"pixel_values": images(size, batch), "labels": torch.zeros(batch, dtype=torch.long)}


def speech(batch: int = 2, samples: int = 16000, tokens: int = 12) -> Batch:
    return {"input_values": torch.randn(batch, samples), "labels": ids(batch, tokens, 1, 30)}


WORDS = {"vocab_size": 2000, "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
DECODER = {**WORDS, "intermediate_size": 352, "num_key_value_heads": 2}
ENCODER = {**WORDS, "intermediate_size": 512}
EXPERTS = {**DECODER, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
          "head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1,
          "n_group": 2, "topk_group": 1,
          "first_k_dense_replace": 1, "num_key_value_heads": 4}  # fmt: skip
SEQ2SEQ = {"vocab_size": 2000, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 512,
           "decoder_ffn_dim": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1, "max_position_embeddings": 256}  # fmt: skip
VISION = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": 64, "patch_size": 8}  # fmt: skip
SPEECH = {"vocab_size": 32, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 256, "conv_dim": (64, 64, 64), "conv_stride": (5, 4, 4),
          "conv_kernel": (10, 4, 4),
          "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
          "mask_time_length": 4}  # fmt: skip
WHISPER = {"vocab_size": 2000, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 80,
           "max_source_positions": 200, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2,
           "bos_token_id": 1}  # fmt: skip
GPT = {"vocab_size": 2000, "n_embd": 128, "n_layer": 3, "n_head": 4}
CLIP = {"text_config": ENCODER, "vision_config": VISION}

# Name: model, configuration, sizes, and a batch where it is not of text.
MODELS_OF_TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 8}),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig",
                  {**EXPERTS, "shared_expert_intermediate_size": 192}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", "DeepseekV2Config",
                    {**EXPERTS, **LATENT, "topk_method": "greedy", "n_group": 1}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**EXPERTS, **LATENT}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig",
                {**EXPERTS, "num_local_experts": 8,
                 "layer_types": ["sliding_attention", "full_attention"] * 2,
                 "num_hidden_layers": 4, "sliding_window": 32}),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", EXPERTS),
    "Llama 4": ("Llama4ForCausalLM", "Llama4TextConfig",
                {**DECODER, "head_dim": 32, "num_local_experts": 4, "intermediate_size_mlp": 256,
                 "interleave_moe_layer_step": 1}),
    "GraniteMoE": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**DECODER, "num_local_experts": 8}),
    "PhiMoE": ("PhimoeForCausalLM", "PhimoeConfig", {**DECODER, "num_local_experts": 8}),
    "JetMoE": ("JetMoeForCausalLM", "JetMoeConfig",
               {**DECODER, "num_local_experts": 4, "kv_channels": 32, "num_experts_per_tok": 2}),
    "Jamba": ("JambaForCausalLM", "JambaConfig",
              {**DECODER, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
               "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
               "use_mamba_kernels": False}, partial(text, 2, 32)),
    "Switch": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
               {"vocab_size": 2000, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "num_layers": 2,
                "num_experts": 4, "expert_capacity": 64, "decoder_start_token_id": 0}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Llama with a mask": ("LlamaForCausalLM", "LlamaConfig", DECODER, masked_text),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 32}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 32}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 32, "sliding_window": 64}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 32, "sliding_window": 64}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 64}),
    "Phi": ("PhiForCausalLM", "PhiConfig", DECODER),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 16}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER),
    "OPT": ("OPTForCausalLM", "OPTConfig", {**WORDS, "ffn_dim": 512, "word_embed_proj_dim": 128}),
    "BLOOM": ("BloomForCausalLM", "BloomConfig",
              {"vocab_size": 2000, "hidden_size": 128, "n_layer": 3, "n_head": 4}),
    "Falcon": ("FalconForCausalLM", "FalconConfig", WORDS),
    "T5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 2000, "d_model": 128, "d_ff": 512, "d_kv": 32, "num_heads": 4, "num_layers": 2,
            "decoder_start_token_id": 0}),
    "BART": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ),
    "Marian": ("MarianMTModel", "MarianConfig", SEQ2SEQ),
    "BERT": ("BertForMaskedLM", "BertConfig", ENCODER),
    "BERT classifier": ("BertForSequenceClassification", "BertConfig", ENCODER, classified_text),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config",
                   {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                    "position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                    "position_biased_input": False}),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", {**ENCODER, "embedding_size": 64}),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": 64}),
    "DistilBERT": ("DistilBertForSequenceClassification", "DistilBertConfig",
                   {"vocab_size": 2000, "dim": 128, "hidden_dim": 512, "n_heads": 4, "n_layers": 3},
                   classified_text),
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig",
                   {**ENCODER, "local_attention": 32, "cls_token_id": 1, "sep_token_id": 2}),
    "Longformer": ("LongformerForMaskedLM", "LongformerConfig", {**ENCODER, "attention_window": 32}),
    "Nystromformer": ("NystromformerForMaskedLM", "NystromformerConfig",
                      {**ENCODER, "segment_means_seq_len": 128, "num_landmarks": 16}),
    "Reformer": ("ReformerModelWithLMHead", "ReformerConfig",
                 {"vocab_size": 2000, "hidden_size": 128, "num_attention_heads": 4, "attention_head_size": 32,
                  "feed_forward_size": 256, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [64, 64],
                  "attn_layers": ["local", "lsh"], "is_decoder": True, "num_buckets": 4, "pad_token_id": 0,
                  "lsh_attn_chunk_length": 32, "local_attn_chunk_length": 32}),
    "XLNet": ("XLNetLMHeadModel", "XLNetConfig",
              {"vocab_size": 2000, "d_model": 128, "n_layer": 3, "n_head": 4, "d_inner": 512}),
    "ViT": ("ViTForImageClassification", "ViTConfig", VISION, classified_images),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", VISION, classified_images),
    "Swin": ("SwinForImageClassification", "SwinConfig",
             {"image_size": 64, "patch_size": 4, "embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6],
              "window_size": 4}, classified_images),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [48, 96, 192], "depths": [2, 2, 2], "num_stages": 3, "image_size": 64},
                 classified_images),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig",
               {"depths": [2, 2, 2], "hidden_sizes": [64, 128, 256], "embedding_size": 32},
               classified_images),
    "SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                  {"hidden_sizes": [32, 64], "depths": [2, 2], "num_encoder_blocks": 2, "sr_ratios": [4, 2],
                   "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
                   "mlp_ratios": [4, 4], "decoder_hidden_size": 64},
                  lambda: {"pixel_values": images(), "labels": torch.zeros(4, 64, 64, dtype=torch.long)}),
    "CLIP": ("CLIPModel", "CLIPConfig", CLIP,
             lambda: {"pixel_values": images(), "input_ids": ids(4, 64)}, {"return_loss": True}),
    "Wav2Vec2 CTC": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, speech),
    "HuBERT CTC": ("HubertForCTC", "HubertConfig", SPEECH, speech),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER,
                lambda: {"input_features": torch.randn(4, 80, 400), "labels": ids(4, 64)}),
    "Mamba": ("MambaForCausalLM", "MambaConfig",
              {"vocab_size": 2000, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
              partial(text, 2, 48)),
    "Mamba-2": ("Mamba2ForCausalLM", "Mamba2Config",
                {"vocab_size": 2000, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16,
                 "num_heads": 4,
                 "head_dim": 32, "n_groups": 2, "chunk_size": 32}, partial(text, 2, 64)),
    "RWKV": ("RwkvForCausalLM", "RwkvConfig",
             {"vocab_size": 2000, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64},
             partial(text, 2, 48)),
}  # fmt: skip


def noised(size: int = 32, batch: int = 4, channels: int = 3, **others: Tensor) -> Batch:
    return {"sample": images(size, batch, channels), "timestep": torch.randint(0, 1000, (batch,)), **others}


UNET = {"sample_size": 32, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
PATCHES = {"sample_size": 16, "patch_size": 2, "in_channels": 4}
TRANSFORMER = {**PATCHES, "num_attention_heads": 4, "num_layers": 2}


def sd3() -> Batch:
    return {
        "hidden_states": images(32, 4, 4),
        "encoder_hidden_states": torch.randn(4, 24, 64),
        "pooled_projections": torch.randn(4, 64),
        "timestep": torch.randint(0, 1000, (4,)),
    }


def flux() -> Batch:
    return {
        "hidden_states": torch.randn(4, 64, 16),
        "encoder_hidden_states": torch.randn(4, 24, 64),
        "pooled_projections": torch.randn(4, 64),
        "timestep": torch.rand(4),
        "img_ids": torch.zeros(64, 3),
        "txt_ids": torch.zeros(24, 3),
    }


MODELS_OF_DIFFUSERS: dict[str, tuple[Any, ...]] = {
    "UNet2DModel": ("UNet2DModel", {**UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                    "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, noised),
    "UNet2DConditionModel": (
        "UNet2DConditionModel",
        {**UNET, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 64,
         "attention_head_dim": 8, "in_channels": 4, "out_channels": 4},
        lambda: noised(32, 4, 4, encoder_hidden_states=torch.randn(4, 16, 64))),
    "AutoencoderKL": (
        "AutoencoderKL",
        {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "latent_channels": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        lambda: {"sample": images(64, 2)}),
    "DiT": ("DiTTransformer2DModel", {**TRANSFORMER, "attention_head_dim": 32},
            lambda: {"hidden_states": images(16, 8, 4), "timestep": torch.randint(0, 1000, (8,)),
                     "class_labels": torch.zeros(8, dtype=torch.long)}),
    "Transformer2D": ("Transformer2DModel",
                      {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "in_channels": 32,
                       "norm_num_groups": 8, "cross_attention_dim": 64},
                      lambda: {"hidden_states": images(16, 4, 32),
                               "encoder_hidden_states": torch.randn(4, 16, 64)}),
    "SD3": ("SD3Transformer2DModel",
            {**TRANSFORMER, "sample_size": 32, "attention_head_dim": 32, "joint_attention_dim": 64,
             "caption_projection_dim": 128, "pooled_projection_dim": 64, "out_channels": 4,
             "pos_embed_max_size": 32}, sd3),
    "Flux": ("FluxTransformer2DModel",
             {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32,
              "num_attention_heads": 4, "joint_attention_dim": 64, "pooled_projection_dim": 64,
              "axes_dims_rope": (8, 12, 12)}, flux),
}  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent network over embedded tokens, with a head for each of them."""

    def __init__(self, kind: str, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layers = getattr(nn, kind)
        self.layers = layers(128, 256, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(256 * (1 + bidirectional), 1000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(input_ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Translator(nn.Module):
    """`nn.Transformer` between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = nn.Transformer(128, 4, 2, 2, 512, batch_first=True)
        self.head = nn.Linear(128, 1000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(input_ids), self.embedding(labels))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Convolutional(nn.Module):
    """Convolutions with normalization and pooling, with a head."""

    def __init__(self, dimensions: int = 2, normalized: bool = True) -> None:
        super().__init__()
        convolution, norm, pool = (
            getattr(nn, f"{name}{dimensions}d") for name in ("Conv", "BatchNorm", "MaxPool")
        )
        layers: list[nn.Module] = []
        for narrow, wide in ((3, 32), (32, 64), (64, 128)):
            layers += [
                convolution(narrow, wide, 3, padding=1),
                *([norm(wide)] * normalized),
                nn.ReLU(),
                pool(2),
            ]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1) if dimensions == 3 else nn.Identity())
        self.head = nn.LazyLinear(10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(pixel_values).flatten(1)), labels)


def convolutional(dimensions: int, shape: tuple[int, ...], normalized: bool = True) -> nn.Module:
    model = Convolutional(dimensions, normalized)
    with torch.no_grad():
        model(torch.zeros(2, 3, *shape), torch.zeros(2, dtype=torch.long))  # gives the head its size
    return model


def labeled(*shape: int) -> Batch:
    return {"pixel_values": torch.randn(*shape), "labels": torch.zeros(shape[0], dtype=torch.long)}


class Packed(nn.Module):
    """A recurrent network over packed sequences of several lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(64, 128, batch_first=True, bidirectional=True)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        rnn: Any = nn.utils.rnn
        packed = rnn.pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
        output: Tensor = rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]
        return output.pow(2).mean()


class GradientPenalty(nn.Module):
    """A loss of the gradient of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.Softplus(), nn.Linear(512, 1))

    def forward(self, values: Tensor) -> Tensor:
        with torch.enable_grad():
            values = values.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.layers(values).sum(), values, create_graph=True)
        return gradient.pow(2).sum()


class Images(nn.Module):
    """Layers for images in a memory format, with a loss of their output."""

    def __init__(self, memory_format: torch.memory_format, *layers: nn.Module) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Tensor = self.layers(pixel_values.contiguous(memory_format=self.memory_format))
        return output.mean((2, 3)).pow(2).mean() if output.shape[1] > 3 else output.pow(2).mean()


def normalized() -> nn.Module:
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3)
    return Images(torch.channels_last, *layers, nn.BatchNorm2d(64), nn.ReLU())


def upsampled(mode: str) -> nn.Module:
    layers = nn.Conv2d(3, 16, 1), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(16, 3, 1)
    return Images(torch.contiguous_format, *layers)


def segmented() -> nn.Module:
    return Images(torch.contiguous_format, nn.Conv2d(3, 16, 1), nn.Conv2d(16, 3, 1))


def packed() -> Batch:
    return {"values": torch.randn(8, 24, 64), "lengths": torch.randint(5, 25, (8,))}


class TransposedNorm(nn.Module):
    """Batch normalization of the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, values: Tensor) -> Tensor:
        for _ in range(3):
            values = self.norm(self.linear(values).transpose(1, 2)).transpose(1, 2).relu()
        return values.pow(2).mean()


class Regression(nn.Module):
    """A loss of many outputs."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 256), nn.Sigmoid())
        self.loss = loss

    def forward(self, values: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layers(values), labels)


def regression_batch() -> Batch:
    return {"values": torch.randn(4000, 16), "labels": torch.rand(4000, 256)}


class Orthogonal(nn.Module):
    """A layer whose weight is the exponential of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.orthogonal(nn.Linear(256, 256), orthogonal_map="matrix_exp")

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values).pow(2).mean()


MODELS_OF_TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "nn.LSTM": (partial(Recurrent, "LSTM"), text),
    "nn.LSTM bidirectional": (partial(Recurrent, "LSTM", True), text),
    "nn.GRU": (partial(Recurrent, "GRU"), text),
    "nn.RNN": (partial(Recurrent, "RNN"), text),
    "nn.Transformer": (Translator, text),
    "Conv1d": (partial(convolutional, 1, (512,)), partial(labeled, 16, 3, 512)),
    "Conv2d": (partial(convolutional, 2, (64, 64)), partial(labeled, 8, 3, 64, 64)),
    "Conv2d without norm": (partial(convolutional, 2, (64, 64), False), partial(labeled, 8, 3, 64, 64)),
    "Conv2d channels_last": (normalized, lambda: {"pixel_values": images(64, 8)}),
    "Conv2d with few outputs": (segmented, lambda: {"pixel_values": images(128, 4)}),
    "Upsample nearest": (partial(upsampled, "nearest"), lambda: {"pixel_values": images(64, 4)}),
    "Upsample bilinear": (partial(upsampled, "bilinear"), lambda: {"pixel_values": images(64, 4)}),
    "BatchNorm1d transposed": (TransposedNorm, lambda: {"values": torch.randn(32, 32, 64)}),
    "Packed LSTM": (partial(Packed, "LSTM"), packed),
    "Packed GRU": (partial(Packed, "GRU"), packed),
    "Gradient penalty": (GradientPenalty, lambda: {"values": torch.randn(256, 64)}),
    "MSE loss": (partial(Regression, nn.functional.mse_loss), regression_batch),
    "Smooth L1 loss": (partial(Regression, nn.functional.smooth_l1_loss), regression_batch),
    "Binary cross entropy": (partial(Regression, nn.functional.binary_cross_entropy), regression_batch),
    "Orthogonal layer": (Orthogonal, lambda: {"values": torch.randn(64, 256)}),
    "Conv3d": (partial(convolutional, 3, (16, 16, 16)), partial(labeled, 4, 3, 16, 16, 16)),
}


def families() -> dict[str, Family]:
    """Return all families by name."""
    found = {}
    for name, (model, config, sizes, *rest) in MODELS_OF_TRANSFORMERS.items():
        batch, arguments = (*rest, *(text, {})[len(rest) :])
        found[name] = Family(partial(of_config, model, config, sizes), batch, arguments, TRANSFORMERS)
    for name, (model, sizes, batch) in MODELS_OF_DIFFUSERS.items():
        found[name] = Family(partial(of_diffusers, model, sizes), batch, {}, OTHERS)
    for name, (build, batch) in MODELS_OF_TORCH.items():
        found[name] = Family(build, batch, {}, OTHERS)
    return {name: replace(family, below=WITH_WORKSPACES.get(name, BELOW)) for name, family in found.items()}
