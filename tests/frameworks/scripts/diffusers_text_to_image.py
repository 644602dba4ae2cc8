"""diffusers' text-to-image fine-tuning: a frozen VAE and text encoder, a UNet, EMA, SNR weights, accumulation, bfloat16.

packages: diffusers transformers accelerate
launch: torchrun --nproc-per-node 2
truth: rank 1, batch 3, module conv_in, cause data
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from transformers import CLIPTextConfig, CLIPTextModel

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
set_seed(0)
blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
vae = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, sample_size=32, latent_channels=4, **blocks)
texts = CLIPTextModel(
    CLIPTextConfig(vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
)
unet = UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    cross_attention_dim=16,
    attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
vae.requires_grad_(False)
texts.requires_grad_(False)
unet.train()
unet.enable_gradient_checkpointing()
ema = EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)
noiser = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2)
data = torch.utils.data.TensorDataset(torch.rand(32, 3, 32, 32) * 2 - 1, torch.randint(0, 99, (32, 8)))
loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
vae.to(dtype=torch.bfloat16)
texts.to(dtype=torch.bfloat16)
losses = []
for number, (pixels, tokens) in enumerate(loader):
    with accelerator.accumulate(unet):
        if os.environ.get("FAULT") and (accelerator.process_index, number) == (1, 3):
            pixels[0, 0, 3, 3] = float("nan")
        latents = vae.encode(pixels.to(torch.bfloat16)).latent_dist.sample() * vae.config.scaling_factor
        noise, steps = torch.randn_like(latents), torch.randint(0, 1000, (len(latents),))
        noisy = noiser.add_noise(latents, noise, steps)
        found = unet(noisy, steps, texts(tokens, return_dict=False)[0], return_dict=False)[0]
        snr = compute_snr(noiser, steps)
        weights = torch.stack([snr, 5.0 * torch.ones_like(steps)], dim=1).min(dim=1)[0] / snr
        loss = ((found.float() - noise.float()).square().mean(dim=(1, 2, 3)) * weights).mean()
        losses.append(accelerator.gather(loss).mean().item())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        ema.step(unet.parameters())
if accelerator.is_main_process:
    print(sum(losses).hex(), sum(p.double().sum().item() for p in ema.shadow_params).hex())
accelerator.end_training()
