"""Stable Diffusion of a few thousand weights, with a tokenizer whose vocabulary is made here, saved as folders."""

import json
from pathlib import Path

import torch

WORDS = ("a", "photo", "of", "dark", "light", "cat", "dog")


def tokenizer(folder: Path) -> None:
    """CLIP's byte pairs for a handful of words: every letter, every letter at a word's end, and whole words."""
    letters = [chr(c) for c in range(97, 123)]
    merges: list[str] = []
    tokens = [*letters, *(f"{c}</w>" for c in letters)]
    for word in WORDS:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:
            if (pair := f"{pieces[0]} {pieces[1]}") not in merges:
                merges.append(pair)
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
            if pieces[0] not in tokens:
                tokens.append(pieces[0])
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8}))


def tiny_sd(folder: Path, seed: int = 0, **unet: object) -> Path:
    """A folder of random components, as diffusers and transformers write them. An image of 16 pixels has a latent of 8."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer(folder / "tokenizer")
    vocabulary = json.loads((folder / "tokenizer/vocab.json").read_text())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(vocabulary),
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=8,
                bos_token_id=vocabulary["<|startoftext|>"],
                eos_token_id=vocabulary["<|endoftext|>"],
            )
        ).save_pretrained(folder / "text_encoder")
        UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(4, 8, 8, 8),
            layers_per_block=1,
            cross_attention_dim=8,
            attention_head_dim=2,
            norm_num_groups=2,
            **unet,
        ).save_pretrained(folder / "unet")
        AutoencoderKL(
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=2,
        ).save_pretrained(folder / "vae")
    return folder


def tiny_unclip(folder: Path, seed: int = 0) -> Path:
    """The same with what unCLIP adds: an image encoder of width 8 for 8 pixels, its usual values, and two schedules."""
    from diffusers import DDIMScheduler, DDPMScheduler
    from safetensors.torch import save_file
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    # the U-Net sees an embedding of 8 and its level's embedding of 8
    tiny_sd(folder, seed, class_embed_type="projection", projection_class_embeddings_input_dim=16)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        config = CLIPVisionConfig(**shape, image_size=8, patch_size=4, projection_dim=8)
        CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
        usual = {"mean": torch.randn(1, 8), "std": torch.rand(1, 8) + 0.5}
    (folder / "image_normalizer").mkdir()
    (folder / "image_normalizer/config.json").write_text(json.dumps({"embedding_dim": 8}))
    save_file(usual, folder / "image_normalizer/diffusion_pytorch_model.safetensors")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(folder / "image_noising_scheduler")
    DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False).save_pretrained(folder / "scheduler")
    (folder / "feature_extractor").mkdir()
    seen = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (folder / "feature_extractor/preprocessor_config.json").write_text(json.dumps(seen))
    return folder
