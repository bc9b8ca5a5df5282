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


def tiny_sd(folder: Path, seed: int = 0) -> Path:
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
        ).save_pretrained(folder / "unet")
        AutoencoderKL(
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=2,
        ).save_pretrained(folder / "vae")
    return folder
