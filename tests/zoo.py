"""A zoo of transformers models: one of each common kind, tiny and with random weights. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 64
PADDING = 0
LENGTH = 8
"""Tokens in a sequence."""
PIXELS = 16
"""The side of a square image."""
PATCH = 4
IMAGE_TOKEN = VOCABULARY - 1
"""Where the model of images and text puts its image: once per patch."""
SAMPLES = 400
"""Of a sound wave."""
MELS, STEPS = 8, 16
"""A spectrogram: its bands, and its steps in time."""

Batch = dict[str, Any]


@dataclass(frozen=True)
class Species:
    """An architecture: ``build`` and ``batch`` draw from the generators that ``make`` and ``feed`` have seeded.

    ``family``: the kind of model it represents. A batch holds the model's arguments; the output has a ``loss``.
    """

    name: str
    family: str
    build: Callable[[], Any]
    batch: Callable[[], Batch]

    def make(self) -> nn.Module:
        """The same model at each call, ready to be trained."""
        transformers.set_seed(0)
        model: nn.Module = self.build()
        return model.train()

    def feed(self, number: int) -> Batch:
        """Batch ``number``, the same at each call; leaves the generators seeded for what the model draws (dropout)."""
        transformers.set_seed(1 + number)  # seeds numpy too: Wav2Vec2 draws its masks from it
        return self.batch()


def model(name: str, config: Any) -> Any:
    """A model with random weights.

    The class is looked up here, not in the list: a transformers version without the class fails only this species' test.
    """
    return getattr(transformers, name)(config)


# --- what they are fed ------------------------------------------------------------------------------------------------


def text() -> Batch:
    """Tokens, padded at the end of the second row, with nothing to predict there: this uses each family of masks."""
    tokens = torch.randint(3, IMAGE_TOKEN, (2, LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {
        "input_ids": tokens.masked_fill(mask == 0, PADDING),
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, PIXELS, PIXELS), "labels": torch.randint(2, (2,))}


def sound() -> Batch:
    mask = torch.ones(2, SAMPLES, dtype=torch.long)
    mask[1, SAMPLES // 2 :] = 0
    return {
        "input_values": torch.randn(2, SAMPLES) * mask,
        "attention_mask": mask,
        "labels": torch.randint(1, VOCABULARY, (2, 3)),
    }


def speech() -> Batch:
    return {"input_features": torch.randn(2, MELS, STEPS), "labels": torch.randint(3, VOCABULARY, (2, LENGTH))}


def captions() -> Batch:
    """Images, and texts that go with them."""
    tokens = text()
    return {"pixel_values": images()["pixel_values"], **tokens}


def pairs() -> Batch:
    """Images and texts for a model that learns which of them match: there are no labels."""
    pixels, tokens = images()["pixel_values"], text()
    tokens.pop("labels")
    return {"pixel_values": pixels, **tokens, "return_loss": True}


def illustrated() -> Batch:
    """A text that begins with an image."""
    patches = torch.full((2, (PIXELS // PATCH) ** 2), IMAGE_TOKEN)
    tokens = text()
    return {
        "pixel_values": images()["pixel_values"],
        "input_ids": torch.cat([patches, tokens["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.ones_like(patches), tokens["attention_mask"]], dim=1),
        "labels": torch.cat([torch.full_like(patches, -100), tokens["labels"]], dim=1),
    }


# --- sizes ------------------------------------------------------------------------------------------------------------

HEADS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BODY = {**HEADS, "intermediate_size": 24}
SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**BODY, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
DECODER = {**ENCODER, **SPECIAL, "num_key_value_heads": 1}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
VISION = {**BODY, "image_size": PIXELS, "patch_size": PATCH}
SEQUENCES = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
}


# --- the species ------------------------------------------------------------------------------------------------------


def bert() -> Any:
    return model("BertForMaskedLM", transformers.BertConfig(**ENCODER))


def albert() -> Any:
    """One layer, called twice."""
    return model("AlbertForMaskedLM", transformers.AlbertConfig(**ENCODER, embedding_size=8))


def deberta() -> Any:
    """Relative attention in three parts."""
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    return model("DebertaV2ForMaskedLM", transformers.DebertaV2Config(**ENCODER, **relative, type_vocab_size=0))


def modernbert() -> Any:
    """A local and a global layer, each with its own mask."""
    layers = {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 4}
    special = {**SPECIAL, "cls_token_id": 1, "sep_token_id": 2}
    return model("ModernBertForMaskedLM", transformers.ModernBertConfig(**ENCODER, **special, **layers))


def gpt2() -> Any:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
    net = model("GPT2LMHeadModel", transformers.GPT2Config(**sizes, **SPECIAL))
    net.loss_type = "ForCausalLM"  # also the default, but the default warns, and that breaks compilation
    return net


def llama() -> Any:
    """Attention written out: its additive masks are floats."""
    return model("LlamaForCausalLM", transformers.LlamaConfig(**DECODER, attn_implementation="eager"))


def qwen3() -> Any:
    return model("Qwen3ForCausalLM", transformers.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True))


def gemma3() -> Any:
    """Sliding windows, soft caps and tied embeddings."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    caps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "attn_implementation": "eager"}
    return model("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**DECODER, **layers, **caps, head_dim=8))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.T5Config(**sizes, decoder_start_token_id=PADDING, attn_implementation="eager")
    return model("T5ForConditionalGeneration", config)


def bart() -> Any:
    return model("BartForConditionalGeneration", transformers.BartConfig(**SEQUENCES, max_position_embeddings=32))


def mixtral() -> Any:
    return model("MixtralForCausalLM", transformers.MixtralConfig(**DECODER, **EXPERTS, num_local_experts=4))


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(**DECODER, **EXPERTS, num_experts=4, moe_intermediate_size=8, head_dim=8)
    return model("Qwen3MoeForCausalLM", config)


def mamba() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}
    return model("MambaForCausalLM", transformers.MambaConfig(**sizes, **SPECIAL))


def mamba2() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}
    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    return model("Mamba2ForCausalLM", transformers.Mamba2Config(**sizes, **heads, **SPECIAL))


def jamba() -> Any:
    """A state space, attention and experts in one."""
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    state = {"mamba_d_state": 4, "mamba_dt_rank": 2}
    return model("JambaForCausalLM", transformers.JambaConfig(**DECODER, **EXPERTS, **layers, **state, num_experts=4))


def zamba2() -> Any:
    """State spaces, and one shared attention block, called in two layers."""
    layers = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}
    state = {"mamba_d_state": 4, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4}
    sizes = {**DECODER, "num_hidden_layers": 4, "num_key_value_heads": 2}
    return model("Zamba2ForCausalLM", transformers.Zamba2Config(**sizes, **layers, **state))


def qwen3_next() -> Any:
    """Linear attention with a gate, plain attention, and experts with one that is always active."""
    linear = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    experts = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3NextConfig(**DECODER, **EXPERTS, **linear, **experts, **layers, head_dim=8)
    return model("Qwen3NextForCausalLM", config)


def vit() -> Any:
    return model("ViTForImageClassification", transformers.ViTConfig(**VISION))


def convnext() -> Any:
    sizes = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2], "patch_size": PATCH, "image_size": PIXELS}
    return model("ConvNextForImageClassification", transformers.ConvNextConfig(**sizes, drop_path_rate=0.1))


def swin() -> Any:
    sizes = {"image_size": PIXELS, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}
    return model("SwinForImageClassification", transformers.SwinConfig(**sizes))


def wav2vec2() -> Any:
    """Convolutions, one of them with a parametrized weight, and time steps that are masked at random."""
    sound = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2}
    position = {
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.2,
        "mask_time_length": 2,
    }
    config = transformers.Wav2Vec2Config(**BODY, **sound, **position, vocab_size=VOCABULARY, layerdrop=0.0)
    return model("Wav2Vec2ForCTC", config)


def whisper() -> Any:
    sizes = {"num_mel_bins": MELS, "max_source_positions": STEPS // 2, "max_target_positions": 16}
    return model("WhisperForConditionalGeneration", transformers.WhisperConfig(**SEQUENCES, **sizes))


def clip() -> Any:
    config = transformers.CLIPConfig(text_config={**ENCODER, **SPECIAL}, vision_config=VISION, projection_dim=8)
    return model("CLIPModel", config)


def blip() -> Any:
    words = {**ENCODER, **SPECIAL, "sep_token_id": 2, "encoder_hidden_size": 16}
    config = transformers.BlipConfig(text_config=words, vision_config=VISION, projection_dim=8, image_text_hidden_size=8)
    return model("BlipForConditionalGeneration", config)


def llava() -> Any:
    words = transformers.LlamaConfig(**{**DECODER, "max_position_embeddings": 64})
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=words, image_token_index=IMAGE_TOKEN
    )
    return model("LlavaForConditionalGeneration", config)


ZOO = [
    Species(build.__name__, family, build, batch)
    for family, batch, builds in [
        ("encoder", text, [bert, albert, deberta, modernbert]),
        ("decoder", text, [gpt2, llama, qwen3, gemma3]),
        ("encoder-decoder", text, [t5, bart]),
        ("experts", text, [mixtral, qwen3_moe]),
        ("state space", text, [mamba, mamba2]),
        ("hybrid", text, [jamba, zamba2, qwen3_next]),
        ("vision", images, [vit, convnext, swin]),
        ("audio", sound, [wav2vec2]),
        ("audio", speech, [whisper]),
        ("multimodal", pairs, [clip]),
        ("multimodal", captions, [blip]),
        ("multimodal", illustrated, [llava]),
    ]
    for build in builds
]
