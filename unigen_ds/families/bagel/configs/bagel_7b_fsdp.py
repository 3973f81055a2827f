# init.py would write epochs, validation and previews: differs because it has the numbers of BAGEL's own command.
"""BAGEL-7B-MoT, fine-tuned to draw, edit and read, with the numbers of BAGEL's own fine-tuning command, under FSDP2.

14 B parameters, of which 7 B work on a token: weights, gradients and moments in fp32, and the average, are 280 GB, so 8
devices of 80 GB hold one copy (HYBRID_SHARD: one for each 8). A 1,024 x 1,024 image is 4,096 latent patches, and up to
4,900 patches where it is read too; 16,384 tokens hold one edit at full size. docs/finetune_bagel.md has every command.

    torchrun --nproc-per-node 8 tools/train.py bagel_7b_fsdp --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

batch_size, accumulative_counts, seq_length, max_updates = 1, 1, 16_384, 10_000
_pretrained = "models/BAGEL-7B-MoT"

model = dict(type="UnifiedModel", pretrained=_pretrained, timestep_shift=1.0, activation_checkpointing=True)
tokenizer = dict(type="PretrainedTokenizer", path=_pretrained)
processor = dict(
    vae_transform=dict(type="ImageTransform", max_size=1024, min_size=512, stride=16),
    vit_transform=dict(type="ImageTransform", max_size=980, min_size=378, stride=14),
    text_dropout=0.1,
    vae_dropout=0.3,
    vit_dropout=0.3,
)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking"),
    dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl", index_workers=4),
)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=2e-5, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    precision="bf16",
)
loss_weights = dict(text=0.25, image=1.0)
param_scheduler = [dict(type="LinearLR", start_factor=0.01, unit="update", begin=0, end=500)]  # then constant
train_cfg = dict(max_updates=max_updates)
backend = dict(type="fsdp", sharding_strategy="HYBRID_SHARD", num_shard=8)
default_hooks = dict(
    logger=dict(type="LoggerHook", unit="update", interval=10),
    checkpoint=dict(type="CheckpointHook", unit="update", interval=500, max_keep_ckpts=2),
    # the first losses that BAGEL's TRAIN.md shows for its example data: ce 0.55, mse 0.41
    first_update=dict(type="FirstUpdateHook", expected=dict(text=0.55, image=0.41), factor=3.0),
)
custom_hooks = [dict(type="EMAHook", momentum=0.0001)]
randomness = dict(seed=42)
