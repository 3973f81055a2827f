# init.py would write no config for it: differs because a demo makes its own data, for a model from scratch.
"""A unified text + image model learns 36 emoji in colour: to draw them by name, to name them, and to edit their colour.

About 10 minutes on 2 CPU cores. Pictures of 32 x 32 pixels, 16 tokens each; of every emoji one colour or skin tone is
in no training record. The three tasks are three sources of a weighted mixture.
"""

custom_imports = dict(imports=["unigen_ds.examples.emoji"])  # everything below that begins with Emoji

batch_size, max_updates, save_steps, save_total_limit = 8, 600, 100, 3
seq_length = 512
root = "work_dirs/data/emoji"
flow = dict(num_timesteps=9, timestep_shift=3.0, text_scale=1.5, image_scale=1.0, interval=(0.0, 1.0), renorm="none")

model = dict(
    type="EmojiModel",
    llm=dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4),
    vit=dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_channels=3,
    ),
    vae=dict(type="CosineAutoencoder"),
    latent_patch_size=1,
    max_latent_size=4,
    timestep_shift=3.0,  # most training times are near the noise, where a name becomes a shape
)
tokenizer = dict(type="EmojiTokenizer")
processor = dict(
    vit_transform=dict(type="ImageTransform", max_size=32, min_size=32, stride=8),
    vae_transform=dict(type="ImageTransform", max_size=32, min_size=32, stride=8),
    text_dropout=0.1,
)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=1,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking", window=512),
    dataset=[
        dict(type="EmojiDataset", root=root, task="draw", weight=5),
        dict(type="EmojiDataset", root=root, task="edit", weight=4),
        dict(type="EmojiDataset", root=root, task="read", weight=1),
    ],
)
val_dataloader = dict(
    batch_size=16,
    dataset=[dict(type="EmojiDataset", root=root, task=task, split="val") for task in ("draw", "edit", "read")],
)
optim_wrapper = dict(
    optimizer=dict(  # in a trial of 200 updates Muon had the loss that AdamW had after twice as many
        type="Muon",
        lr=8e-3,
        momentum=0.95,
        weight_decay=0.02,
        adjust_lr_fn="match_rms_adamw",
        adamw=dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, patterns=["llm2vae", "vae2llm"]),
    ),
    clip_grad=dict(max_norm=1.0),
    precision="fp32",
)
loss_weights = dict(text=0.2, image=1.0)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, unit="update", begin=0, end=100),
    dict(type="CosineAnnealingLR", eta_min=0.0, unit="update", begin=100, end=max_updates),
]
train_cfg = dict(max_updates=max_updates)
backend = dict(type="single")
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(
        type="CheckpointHook", by_epoch=False, unit="update", interval=save_steps, max_keep_ckpts=save_total_limit
    ),
)
custom_hooks = [
    dict(type="EMAHook", momentum=0.01),
    dict(
        type="EvaluateHook",
        interval=300,
        unit="update",
        use_ema=True,
        metrics=[dict(type="EmojiAccuracy", root=root), dict(type="ExactMatch")],
        max_samples=18,
        generation=dict(max_new_tokens=12, flow=flow),
    ),
    dict(
        type="PreviewHook",
        interval=300,
        prompts=["draw a rocket", "draw a blue car", "draw a hand", "draw a baby with light skin"],
        num_held_out=4,
        flow=flow,
        max_new_tokens=12,
    ),
    dict(type="EmojiReportHook", flow=flow),
]
randomness = dict(seed=42)
env = dict(num_threads=1)  # the second core reads the data; on a busy machine two threads wait for each other
