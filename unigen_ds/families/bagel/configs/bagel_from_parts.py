# init.py would write the fine-tune of one directory: differs because this model begins from three published parts.
"""A unified model from its published parts, as BAGEL began: Qwen2.5, SigLIP and FLUX's autoencoder.

The expert that draws begins as a copy of the one that reads (``copy_init_moe``); connectors and the head of the
velocity begin at their initial values, so the first stage needs more updates and a higher rate than a fine-tune. With
Qwen2.5-0.5B weights, gradients, moments and average are 28 GB: one device of 40 GB, or 2 of 24 GB. Images up to 512 x
512: 1,024 latent patches.

    torchrun --nproc-per-node 8 tools/train.py bagel_from_parts \\
        --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

_base_ = "bagel_7b_fsdp.py"
_llm = "models/Qwen2.5-0.5B-Instruct"

model = dict(
    pretrained=dict(
        _delete_=True,
        llm=_llm,
        vit="models/siglip-so400m-14-980-flash-attn2-navit",
        vae="models/flux-vae",
    ),
    copy_init_moe=True,
    max_latent_size=32,
)
tokenizer = dict(path=_llm)
processor = dict(
    vae_transform=dict(max_size=512, min_size=256),
    vit_transform=dict(max_size=490, min_size=224),
)
train_dataloader = dict(seq_length=8192)
optim_wrapper = dict(optimizer=dict(lr=1e-4))
param_scheduler = [dict(type="LinearLR", start_factor=0.001, unit="update", begin=0, end=2000)]
train_cfg = dict(max_updates=100_000)
backend = dict(_delete_=True, type="fsdp", sharding_strategy="FULL_SHARD")
default_hooks = dict(first_update=dict(expected=None))
